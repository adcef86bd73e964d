"""Decode steps over buffers that stay where they are, so that a device can record each batch size once and replay it.

A step of n sequences runs in the smallest *bucket*: at least n rows, and tables at least as wide as the longest. The
rows behind are padding: token 0 at position 0, which is stored nowhere and sees nothing. One function computes a
bucket, whether it is recorded or not.

The likeliest token of each row is chosen on the device and stays there, so that the next step can be launched before
anybody has seen it (`ahead_of`); a batch without randomness sends nothing else back. Where tokens are drawn, logits
go to the host, because each sequence has its own generator there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ullage_engine.attention import Batch, Part
from ullage_engine.decode_tables import DEPTH, DecodeTables
from ullage_engine.device import Device, Mark, Work
from ullage_engine.kernels.tables import BlockTables
from ullage_engine.scheduler import Chunk
from ullage_engine.staging import StagingRing
from ullage_engine.store import BlockStore

log = logging.getLogger(__name__)

STEP = 8
"""Rows from one of the larger buckets to the next."""
NARROWEST = 64
"""Blocks of the narrowest tables; each wider kind is `WIDER` times as wide. What reads tables splits its work by their
width, so a short context in wide tables would start many programs that find nothing to do."""
WIDER = 4
NO_TOKEN = -1
"""In place of a token where the logits were NaN or infinite."""
IDS, SOURCES, POSITIONS, SLOTS, ROWS = range(5)
"""Numbers of each row: its token, or the row of the step before that chooses it (else -1); its position; the slot it
is written to (-1: none); rows of the cache that it sees."""
PADDING = (0, -1, 0, -1, 0)


def buckets(limit: int) -> list[int]:
    """Batch sizes up to at least `limit`: 1, 2, 4, then multiples of `STEP`."""
    sizes = [1, 2, 4, *range(STEP, limit + STEP, STEP)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= limit) + 1]


def widths(blocks: int) -> list[int]:
    """Widths of tables up to `blocks`."""
    kinds = []
    width = NARROWEST
    while width < blocks:
        kinds.append(width)
        width *= WIDER
    return [*kinds, blocks]


class Bucket(NamedTuple):
    """Kinds of steps that are computed alike."""

    rows: int
    blocks: int
    """Width of the tables."""


@dataclass(eq=False, slots=True)
class Flight:
    """A decode step that the device has been given; its chunks are not booked yet."""

    chunks: list[Chunk]
    mark: Mark
    _tokens: torch.Tensor
    _logits: torch.Tensor | None = None
    rows: dict[int, int] = field(default_factory=dict)
    """Row of each sequence, by `id`."""

    def __post_init__(self) -> None:
        self.rows = {id(chunk.sequence): row for row, chunk in enumerate(self.chunks)}

    def tokens(self) -> list[int]:
        """The likeliest token of each chunk, or `NO_TOKEN`; waits for the step."""
        self.mark.wait()
        return self._tokens[: len(self.chunks)].tolist()

    def logits(self) -> torch.Tensor:
        """[n, V] float32 in host memory; waits for the step.

        Raises:
            ValueError: they were not asked for.
        """
        if self._logits is None:
            raise ValueError("this step was launched without its logits")
        self.mark.wait()
        return self._logits


class DecodeGraphs:
    """Decode steps of one model over one store.

    Args:
        limit: most sequences in a step.
        context: most tokens of a sequence.
    """

    def __init__(self, model: Any, store: BlockStore, device: Device, *, limit: int, context: int) -> None:
        self._rows, self._widths = buckets(limit), widths(store.layout.blocks_for(context))
        most, where = self._rows[-1], device.torch_device
        self._model, self._store, self._device = model, store, device
        self._staging = StagingRing(device, DEPTH, 5, most)
        self._numbers = torch.zeros((5, most), dtype=torch.int64, device=where)
        self._tables = DecodeTables(device, most, self._widths[-1])
        self._at = torch.arange(most, device=where)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=where)
        self._logits = torch.zeros((most, model.config.vocab_size), device=where)
        self._recorded: dict[Bucket, Work] = {}
        self._last: Flight | None = None
        self._records = True

    def prepare(self, *, largest: bool = False) -> None:
        """Record every bucket, the largest first, so that the smaller ones find room in its memory.

        Args:
            largest: only those with the most rows.
        """
        self._send([], self._rows[-1], None)
        for rows in self._rows[-1:] if largest else reversed(self._rows):
            for blocks in reversed(self._widths):
                self._record(Bucket(rows, blocks))

    def fits(self, chunks: list[Chunk]) -> bool:
        """Whether these chunks are one decode step over blocks: a token each, no more sequences and blocks than buffers
        hold, and no cells."""
        return 0 < len(chunks) <= self._rows[-1] and all(
            chunk.width == 1 and chunk.sequence.cells is None and len(chunk.sequence.table) <= self._tables.width
            for chunk in chunks
        )

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None, *, logits: bool = False) -> Flight:
        """Give the device a decode step; returns at once.

        Args:
            ahead_of: the step launched last, not booked yet, with a chunk of each of these sequences: the tokens it
                chooses are the ones computed here.
            logits: whether `Flight.logits` will be asked for.

        Raises:
            ValueError: `ahead_of` is not the step launched last.
        """
        if ahead_of is not None and ahead_of is not self._last:
            raise ValueError("tokens of an earlier step are gone: only the one launched last can be followed")
        bucket = self._bucket(chunks)
        self._last = None
        self._send(chunks, bucket.rows, ahead_of)
        self._device.launch(self._recorded.get(bucket) or self._record(bucket))
        tokens = self._device.host_memory(bucket.rows)
        self._device.copy(tokens, self._tokens[: bucket.rows])
        scores = self._logits_home(len(chunks)) if logits else None
        self._last = Flight(chunks, self._device.mark(), tokens, scores)
        return self._last

    def _bucket(self, chunks: list[Chunk]) -> Bucket:
        longest = max(len(chunk.sequence.table) for chunk in chunks)
        rows = next(rows for rows in self._rows if rows >= len(chunks))
        return Bucket(rows, next(blocks for blocks in self._widths if blocks >= longest))

    def _logits_home(self, count: int) -> torch.Tensor:
        host = self._device.host_memory(count, self._logits.shape[1], dtype=torch.float32)
        self._device.copy(host, self._logits[:count])
        return host

    def _send(self, chunks: list[Chunk], rows: int, ahead_of: Flight | None) -> None:
        """This step's numbers into the buffers; rows without a chunk become padding."""
        self._tables.send([chunk.sequence for chunk in chunks], rows)
        columns = [_numbers(chunk, ahead_of) for chunk in chunks]
        columns += [PADDING] * (rows - len(chunks))
        with self._staging.buffer() as host:
            host[:, :rows] = torch.tensor(columns).T
            self._device.copy(self._numbers, host)

    def _record(self, bucket: Bucket) -> Work:
        """The bucket's step as the device repeats it best; as it is, once one could not be recorded."""

        def work() -> None:
            self._compute(bucket)

        recorded = work
        if self._records:
            try:
                recorded = self._device.record(work)
            except RuntimeError as error:
                log.warning("decode steps run without a graph, which is slower: %s", error)
                self._records = False
        self._recorded[bucket] = recorded
        return recorded

    @torch.inference_mode()
    def _compute(self, bucket: Bucket) -> None:
        size = bucket.rows
        ids, sources, positions, slots, rows = self._numbers[:, :size]
        # NO_TOKEN of a row that failed a step ago: its result is thrown away, but must not be looked up
        tokens = torch.where(sources < 0, ids, self._tokens[sources.clamp(min=0)]).clamp(min=0)
        tables = BlockTables(
            at=self._at[:size],
            tables=self._tables.tables[:size, : bucket.blocks].contiguous(),
            starts=self._tables.starts[:size, : bucket.blocks].contiguous(),
            rows=rows,
            positions=positions,
        )
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            ullage_batch=Batch(self._store, slots, (Part(tables),)),
        )
        logits = output.logits[0].float()
        peaks, likeliest = logits.max(-1)
        self._logits[:size] = logits
        self._tokens[:size] = torch.where(peaks.isfinite(), likeliest, NO_TOKEN)


def _numbers(chunk: Chunk, ahead_of: Flight | None) -> tuple[int, int, int, int, int]:
    """A row's `IDS` to `ROWS`; one token further where the step before is not booked yet."""
    sequence = chunk.sequence
    offset = 0 if ahead_of is None else 1
    token = sequence.tokens[sequence.computed] if ahead_of is None else 0
    source = -1 if ahead_of is None else ahead_of.rows[id(sequence)]
    slot = sequence.slots(1 + offset)[-1]
    return token, source, sequence.computed + offset, slot, sequence.kept + offset + 1
