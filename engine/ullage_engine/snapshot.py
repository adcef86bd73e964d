"""The engine's published state: immutable, taken after a step, read by any thread.

`EngineSnapshot.to_json` is the body of `GET /admin/v1/kv`, to which the HTTP side adds its latencies; its shape is part
of the contract in `docs/contracts.md`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; the first four sum to `total`."""

    total: int
    free: int
    active: int
    """Referenced by at least one sequence."""
    cached: int
    """Referenced by none, kept for prefix reuse: reclaimable at once."""
    in_flight: int
    """Being stored to or loaded from a lower tier."""
    pinned: int
    """Of the active ones, those that may not be evicted now, because a copy to a lower tier reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the process started."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_blocks: int = 0
    evicted_tokens: int = 0
    """Tokens of live sequences whose keys and values were dropped."""
    drafted_tokens: int = 0
    """Tokens proposed by speculation that were verified."""
    accepted_tokens: int = 0
    """Of those, tokens that stood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """A lower memory tier, in bytes."""

    total_bytes: int
    used_bytes: int
    stored_blocks: int = 0
    """Blocks copied into it since the process started, as are all below."""
    loaded_blocks: int = 0
    """Blocks copied out of it, towards the pool."""
    evicted_blocks: int = 0
    """Pushed out to make room."""
    failed_copies: int = 0
    """Failed, or too late."""
    hit_tokens: int = 0
    """Tokens that sequences needn't compute because this tier had them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCounts:
    """Cells of split blocks, which hold what content eviction kept. Split blocks are among the active ones."""

    split_blocks: int = 0
    total: int = 0
    """Cells that the split blocks have in all."""
    used: int = 0
    """Of those, cells that a sequence holds; the others serve later evictions, and compaction makes blocks of them."""
    spare_blocks: int = 0
    """Split blocks that compaction would make whole: those above what the used cells of the fullest class need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of pool, queue and counters between two steps."""

    instance: str
    sequence: int
    model: str
    engine_version: str
    block_tokens: int
    block_bytes: int
    blocks: BlockCounts
    cells: CellCounts
    largest_free_run: int
    largest_allocation: int
    """Most blocks that one allocation can have now. Block tables reach any block, so neighbours or not, free or cached,
    each that is available counts."""
    slots_allocated: int
    """Token slots of active blocks; of split blocks only those of used cells, divided by layers times heads."""
    slots_filled: int
    running: int
    waiting: int
    outstanding_blocks: int
    """Blocks that running and waiting requests may still ask for, by prompt left and `max_tokens`."""
    counters: Counters
    dropped_tokens: dict[str, int]
    """Tokens that each eviction policy dropped for the sake of budgets."""
    allocator_reserved_bytes: int
    allocator_allocated_bytes: int
    host: TierState | None
    disk: TierState | None
    step: int
    stepped_at: float
    """Monotonic seconds of the last completed pass of the loop, working or idle."""
    max_prompt_tokens: int | None
    max_total_blocks: int | None
    limit_expires_at: float | None
    """Monotonic seconds; None when no limit is in force."""
    draining: bool

    def to_json(self, now: float) -> dict[str, Any]:
        """The wire form; `now` is monotonic seconds."""
        remaining = None if self.limit_expires_at is None else max(0.0, self.limit_expires_at - now)
        return {
            "version": SNAPSHOT_VERSION,
            "instance": self.instance,
            "sequence": self.sequence,
            "model": self.model,
            "engine_version": self.engine_version,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "blocks": asdict(self.blocks),
            "cells": asdict(self.cells),
            "largest_free_run": self.largest_free_run,
            "largest_allocation": self.largest_allocation,
            "slots": {"allocated": self.slots_allocated, "filled": self.slots_filled},
            "requests": {
                "running": self.running,
                "waiting": self.waiting,
                "outstanding_blocks": self.outstanding_blocks,
            },
            "counters": asdict(self.counters),
            "allocator": {
                "reserved_bytes": self.allocator_reserved_bytes,
                "allocated_bytes": self.allocator_allocated_bytes,
            },
            "host": None if self.host is None else asdict(self.host),
            "disk": None if self.disk is None else asdict(self.disk),
            "step": {"number": self.step, "age_s": max(0.0, now - self.stepped_at)},
            "admission": {
                "max_prompt_tokens": self.max_prompt_tokens,
                "max_total_blocks": self.max_total_blocks,
                "expires_in_s": remaining,
                "draining": self.draining,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionReport:
    """What an eviction really freed: the body of the answer to `POST /admin/v1/kv/evict`."""

    blocks_freed: int
    bytes_freed: int
    dropped: int
    """Blocks whose content is gone."""
    demoted: int
    """Blocks whose content moved to a lower tier."""
    cached_blocks: int
    """Of those freed, the ones nobody referenced."""
    sequences_touched: int
    tokens_dropped: int
    eligible_blocks: int
    """Blocks that could have been freed, wanted or not."""
    requested_blocks: int
    duration_ms: float
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Memory that is taken and holds nothing; shares in 0..1, 0.0 where nothing is taken."""

    internal: float
    """Of the token slots of held blocks and cells, those without a token."""
    external: float
    """Of the cells of split blocks, those that nobody holds."""
    split_blocks: int
    largest_free_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What a compaction did: the body of the answer to `POST /admin/v1/kv/compact`."""

    cells_moved: int
    blocks_freed: int
    """Split blocks that became whole, and so free."""
    bytes_freed: int
    remaining_blocks: int
    """Split blocks that more time would have freed."""
    before: Fragmentation
    after: Fragmentation
    duration_ms: float
