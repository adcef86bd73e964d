"""Which blocks to give up when asked to free memory: cached ones first, then cold tokens of live sequences.

Policies only choose (`plan_eviction` is pure reading); `evict` then acts through the pool, all of a plan in one go
between two steps. Positions are never renumbered, and a block that another sequence shares is never touched.

`recency`: of a live sequence, whole blocks between its protected first tokens and its recent window are cold, the
oldest first; sequences give in turn, so that no one loses all its middle to save another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ullage_engine.pool import BlockPool
from ullage_engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Tokens of each sequence that eviction never drops."""

    first_tokens: int
    recent_tokens: int


@dataclass(frozen=True, slots=True)
class Cold:
    """Blocks of one live sequence to drop, as indices into its table."""

    sequence: Sequence
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """What an eviction would do."""

    requested: int
    cached: int
    """Unreferenced blocks to reclaim."""
    cold: list[Cold] = field(default_factory=list)
    eligible: int
    """All blocks that could be given up."""

    @property
    def live_blocks(self) -> int:
        return sum(len(part.indices) for part in self.cold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What an eviction did."""

    cached: int
    live: int
    sequences: int
    tokens: int


def share_of(blocks: int, ratio: float) -> int:
    """`ratio` of `blocks`, rounded up; 20 % of 10 is 2, whatever floating point makes of it."""
    return math.ceil(blocks * ratio - 1e-9)


def cold_indices(sequence: Sequence, pool: BlockPool, protection: Protection) -> list[int]:
    """Indices into the table of droppable blocks, coldest (oldest) first; none while it is still prefilling."""
    if not sequence.decoding:
        return []
    size = sequence.block_tokens
    end = (sequence.kept - protection.recent_tokens) // size
    return [
        index
        for index in range(min(end, len(sequence.table)))
        if sequence.starts[index] >= protection.first_tokens and pool.references(sequence.table[index]) == 1
    ]


def plan_eviction(pool: BlockPool, sequences: Iterable[Sequence], wanted: int, protection: Protection) -> EvictionPlan:
    """Choose `wanted` blocks, or as many as there are."""
    candidates = [(sequence, cold_indices(sequence, pool, protection)) for sequence in sequences]
    eligible = pool.cached + sum(len(indices) for _, indices in candidates)
    cached = min(wanted, pool.cached)
    taken = _in_turn([len(indices) for _, indices in candidates], wanted - cached)
    cold = [
        Cold(sequence, indices[:count]) for (sequence, indices), count in zip(candidates, taken, strict=True) if count
    ]
    return EvictionPlan(requested=wanted, cached=cached, cold=cold, eligible=eligible)


def evict(pool: BlockPool, plan: EvictionPlan) -> Freed:
    """Carry a plan out; it must have been made since the last step."""
    cached = pool.reclaim(plan.cached)
    live = tokens = 0
    for part in plan.cold:
        for index in part.indices:
            cached += pool.withdraw(part.sequence.table[index])
        blocks = part.sequence.drop_blocks(part.indices)
        live += pool.release(blocks)
        tokens += len(blocks) * part.sequence.block_tokens
    return Freed(cached=cached, live=live, sequences=len(plan.cold), tokens=tokens)


def _in_turn(sizes: list[int], wanted: int) -> list[int]:
    """Split `wanted` over holders of `sizes`, one each in turn."""
    taken = [0] * len(sizes)
    while wanted > 0 and any(have < size for have, size in zip(taken, sizes, strict=True)):
        for i, size in enumerate(sizes):
            if wanted > 0 and taken[i] < size:
                taken[i] += 1
                wanted -= 1
    return taken
