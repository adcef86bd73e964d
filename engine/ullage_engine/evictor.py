"""Content eviction: what the budget of a sequence does to its blocks and cells, all of it between two steps.

Survivors are copied into fresh cells, byte for byte but for values that somebody amends, then the table is switched,
then the old blocks and cells are released; where the fresh cells do not fit beside the old blocks, piece by piece.
Either way a cut that cannot be made leaves everything as it was. Filling fresh cells may be spread over many steps
(`begin`, `fill`, `switch`); nobody sees them before the switch.

Non-goals: scores (`policies`), and who must give how much (`eviction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ullage_engine.cell_table import CellTable, Survivors, padded_cells
from ullage_engine.cells import CellPool
from ullage_engine.eviction import Protection, cold_indices
from ullage_engine.policies.refit import Part
from ullage_engine.pool import BlockPool
from ullage_engine.retention import Cut, Rows
from ullage_engine.sequence import Sequence


class CellStore(Protocol):
    """The bytes of cells: `runner.ModelRunner`, or `fake_runner.FakeRunner` in tests."""

    @property
    def cell_grid(self) -> tuple[int, int]:
        """Layers and KV heads: the cells of a block, which lie in this order."""
        ...

    def gather_cells(
        self, sources: torch.Tensor, source_rows: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        """Copy row `source_rows[i]` of cell `sources[i]` to row `target_rows[i]` of cell `targets[i]`.

        All are [n] int64 in host memory; cells are ids. A source and its target are of one class. No target row is a
        source row of the same call.
        """
        ...

    def write_values(self, layer: int, cells: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store other values in row `rows[i]` of cell `cells[i]`, beside the keys that are there.

        `cells`, `rows`: [n] int64 in host memory, cells of the class of `layer`; `values`: [n, D] float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a cut did."""

    blocks: int = 0
    """By how many blocks the pool's available ones grew."""
    entries: int = 0
    """Rows of single heads that were dropped."""


NOTHING_EVICTED = Evicted()
HeadCells = list[list[int]]
"""Cells of one layer by head."""
Keep = Callable[[Rows], torch.Tensor]
"""Chooses which candidates stay: [L, H, R] bool."""
Amend = Callable[[Rows, int, Part], torch.Tensor | None]
"""Gives the values [H, R, D] that rows of a layer get, while all its rows are still there; None: the same."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What a cut does. It holds as long as the sequence's table and the rows of its cells stay the same."""

    rows: Rows
    cut: Cut
    cold: list[int]
    """Blocks whose rows are candidates, as indices into the sequence's table."""


@dataclass(frozen=True, eq=False, slots=True)
class Begun:
    """Cells that a cut is to fill."""

    fresh: CellTable
    """With all its rows, which are there once it is filled."""
    taken: int
    """Blocks that were split for it."""


class RowsLost(Exception):
    """An eviction failed in the middle of a sequence, which can't go on."""


class Evictor:
    """Cuts sequences and mends split blocks. Not thread-safe: the step loop alone touches it.

    Args:
        live: all sequences that may hold cells.
    """

    def __init__(
        self,
        pool: BlockPool,
        cells: CellPool,
        store: CellStore,
        protection: Protection,
        live: Callable[[], Iterable[Sequence]],
    ) -> None:
        self._pool = pool
        self._cells = cells
        self._store = store
        self._protection = protection
        self._live = live

    def may_cut(self, sequence: Sequence, budget: float) -> bool:
        """Whether a sequence has rows that may go to come to a budget of tokens."""
        return sequence.cells is not None or bool(self._cold(sequence, budget))

    def cut(self, sequence: Sequence, budget: float, keep: Keep, amend: Amend | None = None) -> Evicted:
        """Drop what `keep` does not choose of the rows that a budget of tokens does not protect.

        `amend` changes values of survivors that get cells of their own; others may be shared. Nothing is done where no
        block would be freed.
        """
        plan = self.plan(sequence, budget, keep)
        return NOTHING_EVICTED if plan is None else self.carry_out(sequence, plan, amend)

    def plan(self, sequence: Sequence, budget: float, keep: Keep) -> Plan | None:
        """What `cut` would do; None: nothing."""
        cold = self._cold(sequence, budget)
        if not cold and sequence.cells is None:
            return None
        rows = self._rows(sequence, cold)
        cut = Cut.of(rows, keep(rows), cold, sequence.block_tokens)
        worth = self._gain(sequence, cut) > self._cells.spare_blocks()  # which cost nothing
        return Plan(rows, cut, cold) if worth else None

    def carry_out(self, sequence: Sequence, plan: Plan, amend: Amend | None = None) -> Evicted:
        """Do all of a plan at once."""
        available = self._pool.available
        begun = self.begin(plan)
        if begun is None:
            if not self._piece_by_piece(sequence, plan.rows, plan.cut, amend):
                return NOTHING_EVICTED
            self._mend_holes()
            return Evicted(self._pool.available - available, plan.cut.dropped)
        try:
            self._fill(range(len(begun.fresh.cells)), plan.rows, plan.cut, begun.fresh, amend)
        except BaseException:
            self._cells.release(begun.fresh.held)
            raise
        return self.switch(sequence, plan, begun)

    def begin(self, plan: Plan) -> Begun | None:
        """Fresh cells for all survivors, the caller's to give back; None: they do not fit beside the old blocks."""
        counts, available = plan.cut.survivors.counts, self._pool.available
        if self._cells.needed_blocks(self._by_class(counts, of_layer=_sum)) > available:
            return None
        fresh = plan.cut.survivors.table([self._allocate(own, layer) for layer, own in enumerate(counts)])
        return Begun(fresh, available - self._pool.available)

    def fill(self, sequence: Sequence, plan: Plan, layers: range, fresh: CellTable, amend: Amend | None = None) -> None:
        """Copy some layers' survivors into their fresh cells; both these and the old ones may have moved meanwhile."""
        self._fill(layers, self._rows(sequence, plan.cold), plan.cut, fresh, amend)

    def worth(self, sequence: Sequence, plan: Plan, fresh: CellTable) -> bool:
        """Whether a switch leaves more blocks than giving the fresh cells back: others may share the old by now."""
        own = sum(self._pool.private(sequence.table[index]) for index in plan.cut.blocks)
        old = self._cells.count([] if sequence.cells is None else sequence.cells.held)
        return own + self._spare_without(old) > self._spare_without(self._cells.count(fresh.held))

    def _spare_without(self, counts: list[int]) -> int:
        used = self._cells.used_by_class()
        return self._cells.spare_blocks([have - less for have, less in zip(used, counts, strict=True)])

    def switch(self, sequence: Sequence, plan: Plan, begun: Begun) -> Evicted:
        """Give a sequence its fresh cells, which are filled, in place of what it has now."""
        available = self._pool.available
        old = [] if sequence.cells is None else sequence.cells.held
        sequence.cells = begun.fresh if begun.fresh.entries else None
        self._pool.release(sequence.drop_blocks(plan.cut.blocks))
        self._cells.release(old)
        self._mend_holes()
        freed = self._pool.available - available - begun.taken
        return Evicted(max(0, freed), plan.cut.dropped)  # what a copy still reads comes later

    def _mend_holes(self) -> None:
        for moves in self._cells.mending():  # the old cells left holes
            self.mend(moves)

    def _rows(self, sequence: Sequence, cold: list[int]) -> Rows:
        return Rows.of(sequence, cold, *self._store.cell_grid)

    def _cold(self, sequence: Sequence, budget: float) -> list[int]:
        return cold_indices(sequence, self._pool, self._protection.within(budget))

    def _gain(self, sequence: Sequence, cut: Cut) -> int:
        """Blocks that a cut frees, once what is left lies together."""
        old = self._cells.count([] if sequence.cells is None else sequence.cells.held)
        fresh = self._by_class(cut.survivors.counts, of_layer=_sum)
        after = [used - less + more for used, less, more in zip(self._cells.used_by_class(), old, fresh, strict=True)]
        return len(cut.blocks) + self._cells.spare_blocks(after)

    def thin(self, sequence: Sequence, columns: int) -> tuple[int, int]:
        """Drop the first `columns` cells of each head; returns rows dropped and blocks that became whole."""
        table = sequence.cells
        if table is None:
            return 0, 0
        given = table.cells[..., :columns]
        sequence.cells = table.without(columns, self._pool.block_tokens)
        entries = table.entries - (sequence.cells.entries if sequence.cells is not None else 0)
        return entries, self._cells.release(given[given >= 0].tolist())

    def mend(self, moves: dict[int, int]) -> int:
        """Move cells, target by source, whoever holds them; returns how many blocks became whole again."""
        size = self._pool.block_tokens
        rows = torch.arange(size).repeat(len(moves))
        sources, targets = (torch.tensor(list(ids)).repeat_interleave(size) for ids in (moves.keys(), moves.values()))
        self._store.gather_cells(sources, rows, targets, rows)
        for sequence in self._live():
            if sequence.cells is not None:
                sequence.cells = sequence.cells.moved(moves)
            if sequence.coming is not None:
                sequence.coming = sequence.coming.moved(moves)
        return self._cells.move(moves)

    # -- gathering -----------------------------------------------------------------------------------------------

    def _fill(self, layers: range, rows: Rows, cut: Cut, fresh: CellTable, amend: Amend | None) -> None:
        for layer in layers:
            values = amend(rows, layer, cut.part(layer)) if amend else None
            self._gather(layer, rows, cut.survivors, fresh.cells[layer])
            if values is not None:
                self._write(layer, cut.survivors, fresh.cells[layer], values)

    def _piece_by_piece(self, sequence: Sequence, rows: Rows, cut: Cut, amend: Amend | None) -> bool:
        """The blocks become cells of the sequence as they are, and each cell is released once its survivors are copied.

        Rows keep their order, so n cells of survivors empty at least n old ones: room for one cell a head is enough.
        What is left lies scattered over the old blocks until it is mended. False: not even that, or a copy still reads
        one of the blocks; nothing changed.
        """
        if any(self._pool.pinned(sequence.table[index]) for index in cut.blocks):
            return False
        least = self._by_class(cut.survivors.counts.clamp_max(1), of_layer=_most)
        if self._cells.needed_blocks(least) > self._pool.available:
            return False
        for index in cut.blocks:
            self._pool.withdraw(sequence.table[index])
        cells = _leaving(sequence, rows, cut.blocks)
        self._cells.adopt(sequence.drop_blocks(cut.blocks))
        done: list[HeadCells] = []
        for layer, old in enumerate(cells):
            fresh: HeadCells = [[] for _ in old]
            try:
                values = amend(rows, layer, cut.part(layer)) if amend else None
                self._copy_in_pieces(layer, rows, cut.survivors, old, fresh)
                if values is not None:
                    self._write(layer, cut.survivors, padded_cells([fresh])[0], values)
            except Exception as error:
                mixed = [[*own, *more.values()] for own, more in zip(fresh, old, strict=True)]
                rest = [[[*own.values()] for own in others] for others in cells[layer + 1 :]]
                # nothing leaks, but its rows are no longer told apart
                sequence.cells = CellTable.holding([*done, mixed, *rest])
                raise RowsLost("gathering failed in the middle of an eviction") from error
            done.append(fresh)
        sequence.cells = cut.survivors.table(done) if cut.survivors.counts.any() else None
        return True

    def _copy_in_pieces(
        self, layer: int, rows: Rows, survivors: Survivors, old: list[dict[int, int]], fresh: HeadCells
    ) -> None:
        """Fill `fresh` with the survivors of `old` (by head: cells by their column in `rows`), which is emptied."""
        size, counts, picks = self._pool.block_tokens, survivors.counts[layer], survivors.picks[layer]
        index, done = self._class_of(layer), 0
        while done < int(counts.max()):
            columns = max(1, self._cells.obtainable(index) // len(old))
            for own, more in zip(fresh, self._allocate((counts - done).clamp(0, columns), layer), strict=True):
                own += more
            part = slice(done * size, (done + columns) * size)
            self._gather(layer, rows, survivors, padded_cells([fresh])[0], part)
            done += columns
            for head, given in enumerate(old):
                ahead = {pick // size for pick in picks[head, done * size :].tolist() if pick >= 0}
                self._cells.release([given.pop(column) for column in [*given] if column not in ahead])

    def _gather(
        self, layer: int, rows: Rows, survivors: Survivors, cells: torch.Tensor, part: slice = slice(None)
    ) -> None:
        """Copy one layer's survivors, or those at some rows of their table, into their cells [H, C]."""
        size, picks = self._pool.block_tokens, survivors.picks[layer]
        first = part.start or 0
        head, at = (picks[:, part] >= 0).nonzero(as_tuple=True)
        at += first
        picked = picks[head, at]
        self._store.gather_cells(
            rows.cells[layer][head, picked // size], picked % size, cells[head, at // size], at % size
        )

    def _write(self, layer: int, survivors: Survivors, cells: torch.Tensor, values: torch.Tensor) -> None:
        """Give one layer's survivors, which lie in `cells` [H, C], other values."""
        size, picks = self._pool.block_tokens, survivors.picks[layer]
        head, at = (picks >= 0).nonzero(as_tuple=True)
        device = values.device
        chosen = values[head.to(device), picks[head, at].to(device)]
        self._store.write_values(layer, cells[head, at // size], at % size, chosen)

    # -- cells ---------------------------------------------------------------------------------------------------

    def _allocate(self, counts: torch.Tensor, layer: int) -> HeadCells:
        """Cells for the heads of one layer, `counts` [H] each."""
        by_class = [0] * len(self._cells.classes)
        index = self._class_of(layer)
        by_class[index] = int(counts.sum())
        cells = self._cells.allocate(by_class)[index]
        ends = counts.cumsum(0).tolist()
        return [cells[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]

    def _by_class(self, counts: torch.Tensor, *, of_layer: Callable[[torch.Tensor], int]) -> list[int]:
        """Cells needed of each class; `of_layer` makes [layers of the class] sums one number."""
        sums = counts.sum(-1)
        classes = torch.tensor([self._class_of(layer) for layer in range(len(sums))])
        return [of_layer(sums[classes == index]) for index in range(len(self._cells.classes))]

    def _class_of(self, layer: int) -> int:
        place = layer * self._store.cell_grid[1]
        return next(index for index, places in enumerate(self._cells.classes) if place in places)


def _leaving(sequence: Sequence, rows: Rows, blocks: list[int]) -> list[list[dict[int, int]]]:
    """By layer and head: the cells of a sequence's table and of blocks that it gives up, by their column in `rows`."""
    columns = [*range(rows.split), *(rows.split + index for index in blocks)]
    held = torch.ones(rows.cells.shape, dtype=torch.bool)
    if sequence.cells is not None:
        held[..., : rows.split] = sequence.cells.cells >= 0
    return [
        [{at: ids[at] for at in columns if there[at]} for ids, there in zip(layer.tolist(), own.tolist(), strict=True)]
        for layer, own in zip(rows.cells, held, strict=True)
    ]


def _sum(counts: torch.Tensor) -> int:
    return int(counts.sum())


def _most(counts: torch.Tensor) -> int:
    return int(counts.max())
