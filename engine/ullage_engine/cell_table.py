"""Which cells hold what an evicted sequence has kept of its evicted blocks: a table for each (layer, KV head).

A set of survivors is fixed until the next eviction: later tokens go to the sequence's dense blocks. Heads keep
different tokens and different numbers of them. A head's rows fill its cells from the first on, in order of position
(but for rows of blocks that earlier evictions spared because they were shared). Non-goals: which rows survive
(`policies`), who may have which cell (`cells`), and their bytes (`store`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

NOTHING = -1
"""Stands where a head has no cell or no row."""


@dataclass(frozen=True, eq=False, slots=True)
class CellTable:
    """Survivors of one sequence, [L, H, ...] over layers and KV heads; tensors in host memory, never changed."""

    cells: torch.Tensor
    """[L, H, C] int64 cell ids, `NOTHING` beyond a head's own."""
    rows: torch.Tensor
    """[L, H] int64: rows each head keeps here."""
    positions: torch.Tensor
    """[L, H, C * block_tokens] int32: position of each row, `NOTHING` beyond a head's own."""

    @staticmethod
    def holding(cells: Sequence[Sequence[Sequence[int]]]) -> CellTable:
        """A table that owns cells, by layer and head, and has no row."""
        ids = padded_cells(cells)
        shape = ids.shape[:2]
        return CellTable(ids, torch.zeros(shape, dtype=torch.int64), torch.empty((*shape, 0), dtype=torch.int32))

    @property
    def held(self) -> list[int]:
        """Every cell of this table."""
        ids: list[int] = self.cells[self.cells >= 0].tolist()
        return ids

    @property
    def entries(self) -> int:
        """Rows of all heads of all layers."""
        return int(self.rows.sum())

    @property
    def tokens(self) -> float:
        """Entries divided by layers times heads."""
        return self.entries / self.rows.numel()

    @property
    def blocks(self) -> float:
        """Cells held, as blocks."""
        return int((self.cells >= 0).sum()) / self.rows.numel()

    def width(self, layer: int) -> int:
        """Cells of the head that has most of them in this layer."""
        return int((self.cells[layer] >= 0).sum(-1).max())

    def padded(self, layer: int) -> torch.Tensor:
        """[H, width] cells of one layer, padded with one that the sequence itself holds in it."""
        cells = self.cells[layer, :, : self.width(layer)]
        return torch.where(cells >= 0, cells, cells.max())

    def moved(self, moves: Mapping[int, int]) -> CellTable:
        """The same rows after cells were moved, target by source."""
        sources = torch.tensor(sorted(moves))
        targets = torch.tensor([moves[source] for source in sources.tolist()])
        at = torch.searchsorted(sources, self.cells).clamp_max(len(moves) - 1)
        cells = torch.where(sources[at] == self.cells, targets[at], self.cells)
        return CellTable(cells, self.rows, self.positions)

    def first(self, columns: int, block_tokens: int) -> int:
        """Rows in each head's first `columns` cells."""
        return int(self.rows.clamp_max(columns * block_tokens).sum())

    def without(self, columns: int, block_tokens: int) -> CellTable | None:
        """The same without each head's first (oldest) `columns` cells; None where no row is left."""
        rows = (self.rows - columns * block_tokens).clamp_min(0)
        if not rows.any():
            return None
        cells, positions = self.cells[..., columns:], self.positions[..., columns * block_tokens :]
        return CellTable(cells.contiguous(), rows, positions.contiguous())


@dataclass(frozen=True, eq=False, slots=True)
class Survivors:
    """Rows to keep of a set of source cells, and the shape of the table that will hold them."""

    picks: torch.Tensor
    """[L, H, C * block_tokens] int64: for each row of the table the row of the sources, `NOTHING` beyond the last."""
    rows: torch.Tensor
    """[L, H] int64."""
    positions: torch.Tensor
    """As in `CellTable`."""
    counts: torch.Tensor
    """[L, H] int64: cells each head needs."""

    @staticmethod
    def of(keep: torch.Tensor, positions: torch.Tensor, block_tokens: int) -> Survivors:
        """Those that `keep` [L, H, R] marks among rows at `positions` [L, H, R]."""
        rows = keep.sum(-1)
        counts = -(-rows // block_tokens)
        width = int(counts.max()) * block_tokens
        order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., :width]  # kept rows first, in their order
        beyond = torch.arange(order.shape[-1]) >= rows[..., None]
        chosen = positions.gather(-1, order).masked_fill(beyond, NOTHING)
        return Survivors(order.masked_fill(beyond, NOTHING), rows, chosen, counts)

    def table(self, cells: Sequence[Sequence[Sequence[int]]]) -> CellTable:
        """The table that holds them in these cells, given by layer and head."""
        return CellTable(padded_cells(cells), self.rows, self.positions)


def padded_cells(cells: Sequence[Sequence[Sequence[int]]]) -> torch.Tensor:
    """[L, H, greatest number] int64 of cells by layer and head, `NOTHING` beyond a head's own."""
    width = max(len(own) for layer in cells for own in layer)
    return torch.tensor(
        [[[*own, *[NOTHING] * (width - len(own))] for own in layer] for layer in cells], dtype=torch.int64
    )
