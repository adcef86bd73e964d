"""Which blocks to give up when asked to free memory, from what costs nothing to what costs answers most.

1. cached blocks, which nobody reads now: those that a lower tier holds too, then others;
2. split blocks that moving cells makes whole, without any loss;
3. cold blocks of live sequences: whole ones between their protected first tokens and their recent window, the oldest
   first;
4. cells of sequences evicted before, which are what their policy thought best: each head's oldest first.

Sequences give in turn, so that no one loses all its middle to save another. `plan_eviction` is pure reading; all of a
plan is carried out in one go between two steps. Positions are never renumbered, and a block that another sequence
shares is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ullage_engine.cells import CellPool
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence

FIRST_SHARE, RECENT_SHARE = 16, 8
"""Of a budget one part in so many at most is for the first tokens, and for the last, whatever they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Tokens of each sequence that eviction never drops."""

    first_tokens: int
    recent_tokens: int

    def within(self, budget: float) -> Protection:
        """What a budget of so many tokens protects: a sixteenth of it at most at the start, an eighth at the end.

        Else a small budget would be all protection, and its policy would have nothing to choose (docs/adr/0009). The
        first token, to which attention goes that has nowhere else to go, and the last always count.
        """
        first, recent = max(1, int(budget / FIRST_SHARE)), max(1, int(budget / RECENT_SHARE))
        return Protection(first_tokens=min(self.first_tokens, first), recent_tokens=min(self.recent_tokens, recent))


@dataclass(frozen=True, slots=True)
class Cold:
    """Blocks of one live sequence to drop, as indices into its table."""

    sequence: Sequence
    indices: list[int]


@dataclass(frozen=True, slots=True)
class Thinned:
    """An evicted sequence whose heads all give up their first (oldest) `columns` cells."""

    sequence: Sequence
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """What an eviction would do."""

    requested: int
    below: list[PrefixEntry]
    """Content of unreferenced blocks to free while a lower tier keeps it."""
    cached: int
    """Unreferenced blocks to drop."""
    mended: int
    """Split blocks to make whole, after cells were given up."""
    cold: list[Cold]
    thinned: list[Thinned]
    eligible: int
    """All blocks that could be given up."""

    @property
    def blocks(self) -> int:
        return len(self.below) + self.cached + self.mended + sum(len(part.indices) for part in self.cold)

    @property
    def sequences(self) -> int:
        """Live sequences that lose tokens."""
        return len({id(s) for s in (*(c.sequence for c in self.cold), *(t.sequence for t in self.thinned))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What an eviction did or would do."""

    demoted: int
    """Blocks that nobody referred to, and whose content a lower tier keeps."""
    cached: int
    """Others that nobody referred to."""
    live: int
    tokens: int
    """Tokens dropped, whole ones of all layers and heads."""

    @property
    def blocks(self) -> int:
        return self.demoted + self.cached + self.live


def share_of(blocks: int, ratio: float) -> int:
    """`ratio` of `blocks`, rounded up; 20 % of 10 is 2, whatever floating point makes of it."""
    return math.ceil(blocks * ratio - 1e-9)


def cold_indices(sequence: Sequence, pool: BlockPool, protection: Protection) -> list[int]:
    """Indices into the table of droppable blocks, coldest (oldest) first; none while it prefills or is loaded.

    A load that was given up may still write to blocks of a sequence that waits for nothing any more: those stay.
    """
    if not sequence.decoding or sequence.loading:
        return []
    size = sequence.block_tokens
    end = (sequence.kept - protection.recent_tokens) // size
    return [
        index
        for index in range(min(end, len(sequence.table)))
        if sequence.starts[index] >= protection.first_tokens and pool.private(sequence.table[index])
    ]


def plan_eviction(
    pool: BlockPool,
    cells: CellPool,
    sequences: Iterable[Sequence],
    wanted: int,
    protection: Protection,
    below: list[PrefixEntry],
) -> EvictionPlan:
    """Choose `wanted` blocks, or as many as there are.

    Args:
        below: cached content that a lower tier holds and may keep, the coldest first.
    """
    live = list(sequences)
    candidates = [_free_of_copies(sequence, pool, protection) for sequence in live]
    coming = [cell for sequence in live if sequence.coming is not None for cell in sequence.coming.held]
    split = cells.spare_blocks(cells.count(coming))  # of these nothing can be given
    dense = sum(map(len, candidates))
    idle = min(wanted, pool.cached)
    spare = min(wanted - idle, cells.spare_blocks())
    taken = _in_turn([len(indices) for indices in candidates], wanted - idle - spare)
    missing = min(wanted - idle - spare - sum(taken), split - spare)
    return EvictionPlan(
        requested=wanted,
        below=below[:idle],
        cached=idle - len(below[:idle]),
        mended=spare + missing,
        cold=[
            Cold(sequence, indices[:count])
            for sequence, indices, count in zip(live, candidates, taken, strict=True)
            if count
        ],
        thinned=_thinned(cells, live, spare + missing) if missing else [],
        eligible=pool.cached + dense + split,
    )


def plan_demotion(wanted: int, below: list[PrefixEntry]) -> EvictionPlan:
    """Free `wanted` blocks, or as many as a lower tier keeps; nothing is dropped."""
    return EvictionPlan(
        requested=wanted, below=below[:wanted], cached=0, mended=0, cold=[], thinned=[], eligible=len(below)
    )


def _free_of_copies(sequence: Sequence, pool: BlockPool, protection: Protection) -> list[int]:
    """Cold blocks that are free as soon as they are dropped: no copy to a lower tier reads them."""
    return [i for i in cold_indices(sequence, pool, protection) if not pool.pinned(sequence.table[i])]


def _thinned(cells: CellPool, sequences: list[Sequence], goal: int) -> list[Thinned]:
    """The fewest columns of cells, a sequence at a time in turn, without which `goal` split blocks are spare."""
    holders = [
        (sequence, sequence.cells.cells)
        for sequence in sequences
        if sequence.cells is not None and sequence.reads is None
    ]
    used, taken = cells.used_by_class(), [0] * len(holders)
    while cells.spare_blocks(used) < goal:
        for at, (_, table) in enumerate(holders):
            if taken[at] < table.shape[-1] and cells.spare_blocks(used) < goal:
                column = table[..., taken[at]]
                given = cells.count(column[column >= 0].tolist())
                used = [have - less for have, less in zip(used, given, strict=True)]
                taken[at] += 1
    return [Thinned(sequence, count) for (sequence, _), count in zip(holders, taken, strict=True) if count]


def _in_turn(sizes: list[int], wanted: int) -> list[int]:
    """Split `wanted` over holders of `sizes`, one each in turn."""
    taken = [0] * len(sizes)
    while wanted > 0 and any(have < size for have, size in zip(taken, sizes, strict=True)):
        for i, size in enumerate(sizes):
            if wanted > 0 and taken[i] < size:
                taken[i] += 1
                wanted -= 1
    return taken
