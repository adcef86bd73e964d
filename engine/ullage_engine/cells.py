"""Split blocks: cells handed out one by one, for sequences that keep unequal counts per head.

After content eviction each (layer, head) of a sequence holds its own number of cells. Whole blocks can't give them
back, so such sequences take single cells of *split* blocks. A split block belongs to nobody in particular; when its
last cell is freed it becomes whole again. Partly used split blocks are real fragmentation, which compaction repairs.

A cell id is `block * cells_per_block + place`. Cells of layers with different cache types differ in size, so a cell
serves only its own *class* (`CacheLayout.cell_classes`); places are dealt with per class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ullage_engine.errors import PoolExhausted
from ullage_engine.integrity import IntegrityError
from ullage_engine.pool import BlockPool


@dataclass(frozen=True, slots=True)
class SplitUsage:
    """Cells of split blocks."""

    blocks: int
    cells: int
    """Cells that the split blocks have in all."""
    used: int

    @property
    def waste(self) -> float:
        """Share of the split blocks' cells that hold nothing; 0.0 without split blocks."""
        return 1.0 - self.used / self.cells if self.cells else 0.0


class CellPool:
    """Cells over a block pool. Not thread-safe: the step loop alone touches it.

    Args:
        classes: for each cell class, the places within a block that belong to it.
    """

    def __init__(self, pool: BlockPool, classes: Sequence[Sequence[int]]) -> None:
        self._pool = pool
        self._classes = [tuple(places) for places in classes]
        self.cells_per_block = sum(len(places) for places in self._classes)
        self._class_of = {place: index for index, places in enumerate(self._classes) for place in places}
        self._free: list[dict[int, None]] = [{} for _ in self._classes]
        """Free cells of split blocks by class, in order of release."""
        self._used: dict[int, int] = {}
        """Used cells by split block."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The split blocks; the block pool counts each as held once."""
        return tuple(self._used)

    def usage(self) -> SplitUsage:
        return SplitUsage(len(self._used), len(self._used) * self.cells_per_block, sum(self._used.values()))

    @property
    def classes(self) -> Sequence[tuple[int, ...]]:
        """The places of each class."""
        return self._classes

    def used_in(self, block: int) -> int:
        """Cells of a split block that a sequence holds."""
        return self._used[block]

    def needed_blocks(self, counts: Sequence[int]) -> int:
        """Whole blocks to split before `counts[class]` cells can be had."""
        short = (max(0, count - len(free)) for count, free in zip(counts, self._free, strict=True))
        return max((-(-n // len(places)) for n, places in zip(short, self._classes, strict=True)), default=0)

    def obtainable(self, index: int) -> int:
        """Cells of one class that an allocation can have."""
        return len(self._free[index]) + self._pool.available * len(self._classes[index])

    def allocate(self, counts: Sequence[int]) -> list[list[int]]:
        """Cells of each class, from partly used split blocks first.

        Raises:
            PoolExhausted: not enough blocks to split; nothing was changed.
        """
        missing = self.needed_blocks(counts)
        if missing > self._pool.available:
            raise PoolExhausted(f"{missing} blocks to split wanted, {self._pool.available} available")
        for block in self._pool.allocate(missing):
            self._used[block] = 0
            for place, index in self._class_of.items():
                self._free[index][block * self.cells_per_block + place] = None
        return [self._take(index, count) for index, count in enumerate(counts)]

    def release(self, cells: Iterable[int]) -> int:
        """Give cells back; returns how many blocks became whole again."""
        whole = 0
        for cell in cells:
            block, place = divmod(cell, self.cells_per_block)
            self._free[self._class_of[place]][cell] = None
            self._used[block] -= 1
            if self._used[block] == 0:
                self._mend(block)
                whole += 1
        return whole

    def adopt(self, blocks: Iterable[int]) -> None:
        """Turn private, unpublished blocks of a sequence into split ones, all of whose cells it now holds."""
        for block in blocks:
            self._pool.set_filled(block, 0)  # from here on its rows are counted by cell
            self._used[block] = self.cells_per_block

    def spare_blocks(self, counts: Sequence[int] | None = None) -> int:
        """Split blocks that would be whole if used cells lay as close together as they can.

        Args:
            counts: used cells of each class; None: those in use now.
        """
        used = self.used_by_class() if counts is None else counts
        needed = max(-(-n // len(places)) for n, places in zip(used, self._classes, strict=True))
        return len(self._used) - needed

    def used_by_class(self) -> list[int]:
        """Cells in use of each class."""
        split = len(self._used)
        return [split * len(places) - len(free) for places, free in zip(self._classes, self._free, strict=True)]

    def count(self, cells: Iterable[int]) -> list[int]:
        """How many of these cells are of each class."""
        counts = Counter(self._class_of[cell % self.cells_per_block] for cell in cells)
        return [counts[index] for index in range(len(self._classes))]

    def mending(self) -> list[dict[int, int]]:
        """Moves (target by source) that make all spare blocks whole again, one block's after the other.

        The least used blocks are emptied into free cells of the others, the fullest first; nothing is changed.
        """
        order = sorted(self._used, key=lambda block: self._used[block])
        spare, others = order[: self.spare_blocks()], order[self.spare_blocks() :]
        targets = [
            iter([cell for block in reversed(others) for cell in self._cells_of(block, index) if cell in free])
            for index, free in enumerate(self._free)
        ]
        return [
            {
                cell: next(targets[index])
                for index, free in enumerate(self._free)
                for cell in self._cells_of(block, index)
                if cell not in free
            }
            for block in spare
        ]

    def move(self, moves: Mapping[int, int]) -> int:
        """Book cells as moved, target by source; returns how many blocks became whole again."""
        for target in moves.values():
            block, place = divmod(target, self.cells_per_block)
            del self._free[self._class_of[place]][target]
            self._used[block] += 1
        return self.release(moves)

    def _cells_of(self, block: int, index: int) -> list[int]:
        return [block * self.cells_per_block + place for place in self._classes[index]]

    def _take(self, index: int, count: int) -> list[int]:
        free = self._free[index]
        cells = [cell for cell, _ in zip(free, range(count), strict=False)]
        for cell in cells:
            del free[cell]
            self._used[cell // self.cells_per_block] += 1
        return cells

    def _mend(self, block: int) -> None:
        del self._used[block]
        for place, index in self._class_of.items():
            del self._free[index][block * self.cells_per_block + place]
        self._pool.release([block])

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Compare the books with the cell tables of all sequences.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        held = [cell for table in tables for cell in table]
        if len(set(held)) != len(held):
            raise IntegrityError("a cell has two owners")
        moving = [block for block in self._used if self._pool.pinned(block) or not self._pool.private(block)]
        if moving:
            raise IntegrityError(f"split blocks {moving} are not free as soon as their cells are")
        used = dict.fromkeys(self._used, 0)
        for cell in held:
            block, place = divmod(cell, self.cells_per_block)
            if block not in used:
                raise IntegrityError(f"cell {cell} is held in block {block}, which is not split")
            if cell in self._free[self._class_of[place]]:
                raise IntegrityError(f"cell {cell} is held and free")
            used[block] += 1
        if used != self._used:
            raise IntegrityError("split blocks count other cells than the tables hold")
        free = sum(len(cells) for cells in self._free)
        if free + len(held) != len(self._used) * self.cells_per_block:
            raise IntegrityError("free and held cells do not make up the split blocks")
