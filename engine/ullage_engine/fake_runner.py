"""A runner without a model, for tests of everything around it.

Its "key and value" of a token is a number mixed from the token, its position and the number *read back from the
cache* at the position before. A block written to the wrong slot, shared wrongly or read after reuse therefore changes
every later token, exactly like a real model, but at a millionth of the cost. `expected_tokens` says what a sequence
that never shares, waits or is preempted would generate.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from ullage_engine.decode_graphs import Flight
from ullage_engine.device import CpuDevice, Device
from ullage_engine.policies import mass
from ullage_engine.scheduler import Chunk

MODULUS = (1 << 61) - 1
EMPTY = -1
"""In a slot that was never written."""


def mix(previous: int, token: int, position: int) -> int:
    """The number stored for a token."""
    return (previous * 1_000_003 + token * 7_919 + position * 104_729 + 12_345) % MODULUS


def expected_tokens(prompt: Sequence[int], count: int, vocabulary: int) -> list[int]:
    """The `count` tokens that follow `prompt` under greedy sampling."""
    value, tokens = 0, list(prompt)
    for position, token in enumerate(tokens):
        value = mix(value, token, position)
    for _ in range(count):
        tokens.append(value % vocabulary)
        value = mix(value, tokens[-1], len(tokens) - 1)
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements `compute.Runner` over a table of numbers, one per slot of each cell; all heads hold the same.

    `data` is the same memory as bytes, [blocks, block_bytes] uint8, for copies between memory tiers.

    Args:
        fail: raises to make a chunk's computation fail; called before anything is written for it.
        cell_grid: layers and KV heads.
        device: decode steps can be launched on it; None: all is computed by `forward`.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        vocabulary: int,
        fail: Callable[[Chunk], None] | None = None,
        cell_grid: tuple[int, int] = (1, 1),
        device: Device | None = None,
    ) -> None:
        self.cell_grid = cell_grid
        self._cells = cell_grid[0] * cell_grid[1]
        self.slots = array("q", [EMPTY]) * (blocks * self._cells * block_tokens)
        """By cell id, `block * layers * heads + layer * heads + head`, and row."""
        self.block_bytes = block_tokens * 8 * self._cells
        self.data = torch.frombuffer(self.slots, dtype=torch.uint8).view(blocks, self.block_bytes)
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self._fail = fail
        self._device = device or CpuDevice()
        self._launches = device is not None

    def allocator_bytes(self) -> tuple[int, int]:
        size = len(self.slots) * 8
        return size, size

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        self._device.mark().wait()
        rows = []
        for chunk in chunks:
            if self._fail is not None:
                self._fail(chunk)
            values = self._write(chunk)
            for value in values[chunk.count - 1 :] if chunk.completes else ():
                row = torch.zeros(self._vocabulary)
                row[value % self._vocabulary] = 1.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self._vocabulary)

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None) -> Flight | None:
        if not self._launches:
            return None
        if self._fail is not None:
            for chunk in chunks:
                self._fail(chunk)
        offset = 0 if ahead_of is None else 1
        # what the step needs is read now: the device comes to it when the sequences may have moved on
        places = [(list(s.table), s.kept + offset, s.computed + offset) for s in (chunk.sequence for chunk in chunks)]
        known = [chunk.sequence.tokens[chunk.sequence.computed] for chunk in chunks]
        sources = None if ahead_of is None else [ahead_of.rows[id(chunk.sequence)] for chunk in chunks]
        chosen = torch.zeros(len(chunks), dtype=torch.int64)

        def work() -> None:
            before = ahead_of.tokens() if ahead_of is not None else []
            for row, (table, kept, position) in enumerate(places):
                token = known[row] if sources is None else before[sources[row]]
                previous = self._read(table, kept - 1) if kept else 0
                value = mix(previous, token, position)
                self._put(table[kept // self._block_tokens] * self._block_tokens + kept % self._block_tokens, value)
                chosen[row] = value % self._vocabulary

        self._device.launch(work)
        return Flight(chunks, self._device.mark(), chosen)

    def copy_blocks(self, copies: dict[int, int]) -> None:
        self._device.mark().wait()
        size = self._block_tokens * self._cells
        content = {target: self.slots[source * size : (source + 1) * size] for target, source in copies.items()}
        for target, slots in content.items():
            self.slots[target * size : (target + 1) * size] = slots

    def erase(self, slots: list[int]) -> None:
        for slot in slots:
            self._put(slot, EMPTY)

    def gather_cells(
        self, sources: torch.Tensor, source_rows: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        self._device.mark().wait()
        read = (sources * self._block_tokens + source_rows).tolist()
        written = (targets * self._block_tokens + target_rows).tolist()
        if len(set(written)) < len(written) or not set(written).isdisjoint(read):
            raise ValueError("a row is written twice, or read and written, in one gathering")
        for source, target in zip(read, written, strict=True):
            self.slots[target] = self.slots[source]

    def read_cells(self, layer: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros: numbers of tokens say nothing of what they are worth."""
        zeros = torch.zeros((cells.shape[0], cells.shape[1] * self._block_tokens, 1))
        return zeros, zeros

    def write_values(self, layer: int, cells: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Nothing: a token's number is no vector that could be changed."""

    @property
    def attention(self) -> mass.Attention:
        return mass.attention

    def scrub(self, blocks: list[int], cells: list[int]) -> None:
        self._device.mark().wait()
        size = self._block_tokens
        of_blocks = [block * self._cells + place for block in blocks for place in range(self._cells)]
        for cell in (*of_blocks, *cells):
            self.slots[cell * size : (cell + 1) * size] = array("q", [EMPTY]) * size

    def _put(self, slot: int, value: int) -> None:
        """Write a token's number into the cells of all heads."""
        block, row = divmod(slot, self._block_tokens)
        for place in range(self._cells):
            self.slots[(block * self._cells + place) * self._block_tokens + row] = value

    def _write(self, chunk: Chunk) -> list[int]:
        """Numbers of the chunk's tokens, drafts included."""
        sequence = chunk.sequence
        value = self._read(sequence.table, sequence.kept - 1) if sequence.kept else 0
        values = []
        for i, (slot, token) in enumerate(zip(sequence.slots(chunk.width), chunk.tokens, strict=True)):
            value = mix(value, token, sequence.computed + i)
            self._put(slot, value)
            values.append(value)
        return values

    def _read(self, table: list[int], row: int) -> int:
        value = self.slots[self._slot(table, row)]
        if value == EMPTY:
            raise LookupError(f"row {row} was never written")
        return value

    def _slot(self, table: list[int], row: int) -> int:
        """Where the first head's cell holds a row."""
        index, offset = divmod(row, self._block_tokens)
        return table[index] * self._cells * self._block_tokens + offset
