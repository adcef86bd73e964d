"""Run the model over one step's packed tokens. Knows tensors and the model; knows nothing of queues or policies."""

from __future__ import annotations

from typing import Any

import torch

from ullage_engine.attention import make_batch
from ullage_engine.decode_graphs import DecodeGraphs, Flight
from ullage_engine.device import tensor_on
from ullage_engine.policies.mass import Attention
from ullage_engine.scheduler import Chunk
from ullage_engine.store import BlockStore


class ModelRunner:
    """Forward passes of one model over one block store.

    Args:
        decode: computes decode steps; None: they are packed and padded anew each time, which a CPU does as fast.
        invariant: a token's result depends on its own sequence alone, to the bit; the model's linear layers must have
            been made so by `numerics.make_invariant`.
    """

    def __init__(
        self,
        model: Any,
        store: BlockStore,
        device: torch.device,
        decode: DecodeGraphs | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        self._decode = decode
        self._model = model
        self.store = store
        self._device = device
        self._invariant = invariant

    @property
    def block_bytes(self) -> int:
        return self.store.layout.block_bytes

    def allocator_bytes(self) -> tuple[int, int]:
        return self.store.allocator_bytes()

    @torch.inference_mode()
    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Compute all chunks in one pass and write their keys and values.

        Returns:
            Logits [n, V] float32 in host memory, where tokens are chosen, each sequence by its own generator: in
            order, of each chunk that completes its sequence, of its last token and its drafts.
        """
        if self._decode is not None and self._decode.fits(chunks) and all(chunk.completes for chunk in chunks):
            return self._decode.launch(chunks, logits=True).logits()
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for chunk in chunks:
            start = chunk.sequence.computed
            tokens.extend(chunk.tokens)
            positions.extend(range(start, start + chunk.width))
            if chunk.completes:
                last.extend(range(len(tokens) - 1 - len(chunk.draft.tokens), len(tokens)))
        output = self._model(
            input_ids=tensor_on(self._device, [tokens]),
            position_ids=tensor_on(self._device, [positions]),
            use_cache=False,
            # the head over one row at least: an empty selection is not defined for every architecture
            logits_to_keep=tensor_on(self._device, last or [len(tokens) - 1]),
            ullage_batch=make_batch(self.store, chunks, self._device, row_by_row=self._invariant),
        )
        logits: torch.Tensor = output.logits[0, : len(last)].float().cpu()
        return logits

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None) -> Flight | None:
        """Begin a decode step and return at once; see `compute.Runner`."""
        if self._decode is None or not self._decode.fits(chunks):
            return None
        return self._decode.launch(chunks, ahead_of)

    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Copy whole blocks, source by target."""
        if copies:
            self.store.copy_blocks([*copies.values()], [*copies])

    def erase(self, slots: list[int]) -> None:
        """Zero the rows of single tokens."""
        layout = self.store.layout
        zeros = torch.zeros((len(slots), layout.kv_heads, layout.head_size), device=self._device)
        where = tensor_on(self._device, slots)
        for layer in range(layout.layers):
            self.store.write(layer, where, zeros, zeros)

    @property
    def cell_grid(self) -> tuple[int, int]:
        return self.store.layout.layers, self.store.layout.kv_heads

    def gather_cells(
        self, sources: torch.Tensor, source_rows: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        """Copy rows of cells by id; see `evictor.CellStore`."""
        self.store.copy_rows(sources, source_rows, targets, target_rows)

    def write_values(self, layer: int, cells: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """See `evictor.CellStore`."""
        self.store.write_values(layer, cells, rows, values)

    def read_cells(self, layer: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of cells by id [H, S]; see `observation.KeyStore`."""
        keys, values = self.store.read_cells(layer, cells.to(self._device)[None], torch.float32)
        return keys[0], values[0]

    @property
    def attention(self) -> Attention:
        """See `observation.KeyStore`."""
        return self.store.operations.attention

    def scrub(self, blocks: list[int], cells: list[int]) -> None:
        """Zero blocks and cells whose content may hold NaN, before others get them."""
        if blocks:
            self.store.data[tensor_on(self._device, blocks)] = 0
        if cells:
            self.store.zero_cells(tensor_on(self._device, cells))
