"""Which rows of a sequence stay in the cache when it is cut to a budget. Pure reading and arithmetic.

Entries, one a (layer, KV head, token), compete over all layers and heads: a budget of n tokens is n entries for each
head on average, and a head that needs more of its context than another keeps more. Protected rows stay and count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.cell_table import Survivors
from ullage_engine.policies.refit import Part
from ullage_engine.sequence import Sequence


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """All rows of one sequence that are in the cache: of each head first its cells', then its dense blocks'.

    R = S * block_tokens; tensors are in host memory.
    """

    cells: torch.Tensor
    """[L, H, S] int64 cell ids; where a head has fewer, some other cell of the layer's class stands."""
    exists: torch.Tensor
    """[L, H, R] bool."""
    candidates: torch.Tensor
    """[L, H, R] bool: those that may be dropped."""
    positions: torch.Tensor
    """[L, H, R] int32."""
    split: int
    """Of the S cells of a head, how many come from the sequence's cell table; the others are its dense blocks."""

    @property
    def protected(self) -> int:
        """Entries that stay whatever the budget is."""
        return int((self.exists & ~self.candidates).sum())

    @staticmethod
    def of(sequence: Sequence, cold: list[int], layers: int, heads: int, *, coming: int = 0) -> Rows:
        """Those of a sequence whose dense blocks `cold` (indices into its table) are candidates.

        Args:
            coming: rows that are stored after those that are booked.
        """
        size, kept = sequence.block_tokens, sequence.kept + coming
        used = -(-kept // size)
        grid = torch.arange(layers * heads).view(layers, heads, 1)
        dense = torch.tensor(sequence.table[:used]) * (layers * heads) + grid
        row = torch.arange(used * size)
        starts = torch.tensor(sequence.starts[:used], dtype=torch.int32)
        positions = (starts[:, None] + torch.arange(size, dtype=torch.int32)).flatten()
        is_cold = torch.zeros(used, dtype=torch.bool)
        is_cold[cold] = True
        shape = (layers, heads, used * size)
        exists = (row < kept).expand(shape)
        candidates = is_cold.repeat_interleave(size).expand(shape)
        positions = positions.expand(shape)
        if sequence.cells is None:
            return Rows(dense, exists, candidates, positions, 0)
        table = sequence.cells
        own = table.cells.flatten(1).amax(1)[:, None, None]
        cells = torch.where(table.cells >= 0, table.cells, torch.where(own >= 0, own, grid))
        held = torch.arange(table.positions.shape[-1]) < table.rows[..., None]
        return Rows(
            torch.cat([cells, dense], -1),
            torch.cat([held, exists], -1),
            torch.cat([held, candidates], -1),
            torch.cat([table.positions, positions], -1),
            cells.shape[-1],
        )


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """What keeping some of a sequence's candidates means for its memory."""

    blocks: list[int]
    """Dense blocks to give up, as indices into the table."""
    survivors: Survivors
    """Rows to gather from the sequence's cells and those blocks into a table of their own."""
    dropped: int
    """Entries that are gone."""
    stays: torch.Tensor
    """[L, H, R] bool: rows that are there afterwards, protected ones included."""
    free: torch.Tensor
    """[L, H, R] bool: of these the survivors, which get cells of their own."""

    def part(self, layer: int) -> Part:
        return Part(self.stays[layer], self.free[layer])

    @staticmethod
    def of(rows: Rows, keep: torch.Tensor, cold: list[int], block_tokens: int) -> Cut:
        """Keep the candidates that `keep` [L, H, R] marks. A block of which every head keeps all stays as it is."""
        keep = keep & rows.candidates
        everywhere = keep[..., rows.split * block_tokens :].flatten(0, 1).all(0)
        whole = everywhere.view(-1, block_tokens).all(-1)
        blocks = [index for index in cold if not whole[index]]
        leaving = torch.zeros(rows.cells.shape[-1], dtype=torch.bool)
        leaving[: rows.split] = True
        leaving[[rows.split + index for index in blocks]] = True
        free = keep & leaving.repeat_interleave(block_tokens)
        survivors = Survivors.of(free, rows.positions, block_tokens)
        stays = keep | (rows.exists & ~rows.candidates)
        return Cut(blocks, survivors, int(rows.candidates.sum() - keep.sum()), stays, free)
