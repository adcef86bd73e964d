"""Snapshots of an engine between two steps, put together from the books of its parts."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ullage_engine.compute import Runner
from ullage_engine.live import LiveRequests
from ullage_engine.pool import BlockPool
from ullage_engine.reclaim import Reclaimer
from ullage_engine.request import AdmissionLimit
from ullage_engine.scheduler import Scheduler
from ullage_engine.snapshot import BlockCounts, Counters, EngineSnapshot, TierState
from ullage_engine.speculation.speculator import SpeculationTally, Speculator
from ullage_engine.tiers.residency import TieredResidency


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who this engine is, for its snapshots."""

    model: str
    version: str
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)


class Readings:
    """Reads one engine's parts, and numbers what it reads. Not thread-safe: the step loop alone touches it."""

    def __init__(
        self,
        *,
        identity: EngineIdentity,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        live: LiveRequests,
        reclaimer: Reclaimer,
        speculator: Speculator | None,
        tiers: TieredResidency | None,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._runner = runner
        self._pool = pool
        self._scheduler = scheduler
        self._live = live
        self._reclaimer = reclaimer
        self._speculator = speculator
        self._tiers = tiers
        self._clock = clock
        self._readings = 0

    def take(self, limit: AdmissionLimit | None, *, draining: bool, steps: int) -> EngineSnapshot:
        """The state between two steps, numbered."""
        self._readings += 1
        usage, scheduler = self._pool.usage(), self._scheduler
        reserved, allocated = self._runner.allocator_bytes()
        slots_allocated, slots_filled = self._reclaimer.slots()
        return EngineSnapshot(
            instance=self._identity.instance,
            sequence=self._readings,
            model=self._identity.model,
            engine_version=self._identity.version,
            block_tokens=self._pool.block_tokens,
            block_bytes=self._runner.block_bytes,
            blocks=BlockCounts(
                total=usage.total,
                free=usage.free,
                active=usage.active,
                cached=usage.cached,
                in_flight=usage.in_flight,
                pinned=usage.pinned,
            ),
            cells=self._reclaimer.cell_counts(),
            largest_free_run=self._pool.largest_free_run(),
            largest_allocation=self._pool.available,
            slots_allocated=slots_allocated,
            slots_filled=slots_filled,
            running=sum(sequence.reads is None for sequence in scheduler.running),
            waiting=len(scheduler.waiting) + len(self._live.parked()),
            outstanding_blocks=self._outstanding_blocks(),
            counters=self._counters(),
            dropped_tokens=self._reclaimer.dropped_tokens(),
            allocator_reserved_bytes=reserved,
            allocator_allocated_bytes=allocated,
            host=self._tier("host"),
            disk=self._tier("disk"),
            step=steps,
            stepped_at=self._clock(),
            max_prompt_tokens=limit.max_prompt_tokens if limit else None,
            max_total_blocks=limit.max_total_blocks if limit else None,
            limit_expires_at=limit.expires_at if limit else None,
            draining=draining,
        )

    def _tier(self, name: Literal["host", "disk"]) -> TierState | None:
        return None if self._tiers is None else self._tiers.state(name, self._runner.block_bytes)

    def _outstanding_blocks(self) -> int:
        """Of running and waiting sequences, and of forks what they will not share with their parent."""
        parked = self._live.parked()
        shared = sum(len(child.request.prompt) // self._pool.block_tokens for child in parked)
        ceiling = self._reclaimer.budgets.ceiling
        own = sum(s.outstanding_blocks(ceiling(s)) for s in (*self._scheduler.live(), *parked)) - shared
        return own + self._scheduler.coming_copies()

    def _counters(self) -> Counters:
        mine, queue, freed = self._live.tally, self._scheduler.tally, self._reclaimer.totals()
        drafts = SpeculationTally() if self._speculator is None else self._speculator.tally
        return Counters(
            admitted=mine.admitted,
            finished=mine.finished,
            failed=mine.failed,
            aborted=mine.aborted,
            preemptions=queue.preemptions,
            recomputed_tokens=queue.recomputed_tokens,
            prompt_tokens=mine.prompt_tokens,
            generated_tokens=mine.generated_tokens,
            prefix_query_tokens=queue.prefix_query_tokens,
            prefix_hit_tokens=queue.prefix_hit_tokens,
            evicted_blocks=freed.evicted_blocks,
            evicted_tokens=freed.evicted_entries // self._scheduler.cells.cells_per_block,
            drafted_tokens=drafts.drafted_tokens,
            accepted_tokens=drafts.accepted_tokens,
        )
