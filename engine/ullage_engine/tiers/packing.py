"""Cells of an evicted sequence in whole blocks of its own, for the way to a lower tier and back.

Its cells lie scattered over split blocks that other sequences use too. Before they are stored they are copied, as
bytes, into blocks that hold nothing else; those come back as split blocks of the sequence.
"""

from __future__ import annotations

import torch

from ullage_engine.cell_table import CellTable
from ullage_engine.cells import CellPool
from ullage_engine.evictor import CellStore
from ullage_engine.pool import BlockPool


class CellPacking:
    """Packs and unpacks over one pool. Not thread-safe: the step loop alone touches it."""

    def __init__(self, pool: BlockPool, cells: CellPool, store: CellStore) -> None:
        self._pool = pool
        self._cells = cells
        self._store = store

    def needed(self, table: CellTable) -> int:
        """Blocks that a table's cells take when they are packed."""
        counts = self._cells.count(table.held)
        return max(-(-count // len(places)) for count, places in zip(counts, self._cells.classes, strict=True))

    def pack(self, table: CellTable) -> tuple[list[int], CellTable] | None:
        """Blocks that hold a table's cells, each with one reference, and the table as it is in them, where a block's
        number is its place in the list; None: too few blocks are available.
        """
        needed = self.needed(table)
        if needed > self._pool.available:
            return None
        blocks = self._pool.allocate(needed)
        moves = self._places(table)
        per_block = self._cells.cells_per_block
        targets = [blocks[cell // per_block] * per_block + cell % per_block for cell in moves.values()]
        self._copy(list(moves), targets)
        return blocks, table.moved(moves)

    def unpack(self, table: CellTable, blocks: list[int]) -> CellTable:
        """Turn blocks that hold a packed table into split ones; returns the table in them."""
        per_block = self._cells.cells_per_block
        moves = {cell: blocks[cell // per_block] * per_block + cell % per_block for cell in table.held}
        self._cells.adopt(blocks)
        used = set(moves.values())
        every = (block * per_block + place for block in blocks for place in range(per_block))
        self._cells.release([cell for cell in every if cell not in used])
        return table.moved(moves)

    def _places(self, table: CellTable) -> dict[int, int]:
        """Where each cell goes, by its place within as few blocks as possible, numbered from 0."""
        per_block = self._cells.cells_per_block
        moves: dict[int, int] = {}
        for places in self._cells.classes:
            own = [cell for cell in table.held if cell % per_block in places]
            for i, cell in enumerate(own):
                block, at = divmod(i, len(places))
                moves[cell] = block * per_block + places[at]
        return moves

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        size = self._pool.block_tokens
        rows = torch.arange(size).repeat(len(sources))
        scattered, packed = (torch.tensor(ids).repeat_interleave(size) for ids in (sources, targets))
        self._store.gather_cells(scattered, rows, packed, rows)
