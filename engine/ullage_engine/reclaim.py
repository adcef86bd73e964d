"""Everything that gives memory back from sequences that go on: eviction on demand, budgets, and compaction.

Runs between two steps. What to give up is chosen elsewhere (`eviction`, `retention`, `policies`); this carries it out,
keeps the totals and says what was really freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.budgets import BudgetKeeper, Retention, Store
from ullage_engine.eviction import EvictionPlan, Freed, Protection, plan_demotion, plan_eviction, share_of
from ullage_engine.evictor import Evictor
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.request import Destination
from ullage_engine.scheduler import Scheduler
from ullage_engine.snapshot import CellCounts, CompactionReport, EvictionReport, Fragmentation
from ullage_engine.tiers.residency import TieredResidency


@dataclass(slots=True)
class ReclaimTally:
    """Totals since the start."""

    evicted_blocks: int = 0
    evicted_entries: int = 0
    """Rows of single heads that were dropped."""


class Reclaimer:
    """Gives memory back. Not thread-safe: the step loop alone touches it."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        scheduler: Scheduler,
        store: Store,
        protection: Protection,
        retention: Retention,
        block_bytes: int,
        clock: Callable[[], float],
        tiers: TieredResidency | None = None,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._scheduler = scheduler
        self._protection = protection
        self._block_bytes = block_bytes
        self._clock = clock
        self._cells = scheduler.cells
        layers, heads = store.cell_grid
        if layers * heads != scheduler.cells.cells_per_block:
            raise ValueError(
                f"the scheduler's blocks have {scheduler.cells.cells_per_block} cells, the store's {layers} x {heads}"
            )
        self._evictor = Evictor(pool, scheduler.cells, store, protection, lambda: scheduler.running)
        self.budgets = BudgetKeeper(scheduler, self._evictor, store, retention)
        self.tally = ReclaimTally()

    # -- on demand -----------------------------------------------------------------------------------------------

    def evict(
        self,
        *,
        ratio: float | None = None,
        bytes_: int | None = None,
        target_usage: float | None = None,
        dry_run: bool,
        tiers: tuple[Destination, ...] = ("drop",),
    ) -> EvictionReport:
        """Free cold blocks: `ratio` of the occupied, `bytes_`, or down to `target_usage` of all; one of them is given.

        By age and not by score, which would take a pass over the keys: cached blocks first, then whole blocks of live
        sequences, then the oldest cells of those that were evicted before.

        Args:
            tiers: where content may go: `host` keeps that of cached blocks findable there, waiting a moment for what is
                not there yet; `drop` gives it up.
        """
        began = self._clock()
        wanted = self._wanted(ratio, bytes_, target_usage)
        below = self._below(wanted, dry_run=dry_run) if "host" in tiers else []
        if "drop" in tiers:
            plan = plan_eviction(self._pool, self._cells, self._scheduler.running, wanted, self._protection, below)
        else:
            plan = plan_demotion(wanted, below)
        freed = self._foreseen(plan) if dry_run else self._carry_out(plan)
        return EvictionReport(
            blocks_freed=freed.blocks,
            bytes_freed=freed.blocks * self._block_bytes,
            dropped=freed.cached + freed.live,
            demoted=freed.demoted,
            cached_blocks=freed.cached + freed.demoted,
            sequences_touched=plan.sequences,
            tokens_dropped=freed.tokens,
            eligible_blocks=plan.eligible,
            requested_blocks=plan.requested,
            duration_ms=(self._clock() - began) * 1e3,
            dry_run=dry_run,
        )

    def _wanted(self, ratio: float | None, bytes_: int | None, usage: float | None) -> int:
        """Blocks asked for, of those that are occupied."""
        occupied = self._pool.total - self._pool.free
        if bytes_ is not None:
            return min(-(-bytes_ // self._block_bytes), occupied)
        if usage is not None:
            return max(0, occupied - int(self._pool.total * usage + 1e-9))
        return min(share_of(occupied, ratio or 0.0), occupied)

    def _below(self, wanted: int, *, dry_run: bool) -> list[PrefixEntry]:
        """Content of the coldest cached blocks that a lower tier holds."""
        if self._tiers is None:
            return []
        return self._tiers.held(wanted) if dry_run else self._tiers.demote(wanted)

    def _carry_out(self, plan: EvictionPlan) -> Freed:
        demoted = sum(self._pool.demote(entry) for entry in plan.below)
        cached = self._pool.reclaim(plan.cached, demote=False).freed
        entries = live = 0
        for cold in plan.cold:
            cached += sum(self._pool.withdraw(cold.sequence.table[index]) for index in cold.indices)
            live += self._pool.release(cold.sequence.drop_blocks(cold.indices))
            entries += len(cold.indices) * self._pool.block_tokens * self._cells.cells_per_block
        mended = 0
        for thinned in plan.thinned:
            dropped, whole = self._evictor.thin(thinned.sequence, thinned.columns)
            entries, mended = entries + dropped, mended + whole
        for moves in self._cells.mending()[: max(0, plan.mended - mended)]:
            mended += self._evictor.mend(moves)
        self.tally.evicted_blocks += demoted + cached + live + mended
        self.tally.evicted_entries += entries
        tokens = entries // self._cells.cells_per_block
        return Freed(demoted=demoted, cached=cached, live=live + mended, tokens=tokens)

    def _foreseen(self, plan: EvictionPlan) -> Freed:
        size = self._pool.block_tokens
        cold = sum(len(part.indices) for part in plan.cold)
        entries = sum(part.sequence.cells.first(part.columns, size) for part in plan.thinned if part.sequence.cells)
        tokens = cold * size + entries // self._cells.cells_per_block
        return Freed(demoted=len(plan.below), cached=plan.cached, live=cold + plan.mended, tokens=tokens)

    # -- compaction ----------------------------------------------------------------------------------------------

    def compact(self, budget_ms: float) -> CompactionReport:
        """Move cells out of the least used split blocks until no more become whole, or the time is up."""
        began, before = self._clock(), self.fragmentation()
        moved = freed = 0
        rounds = self._cells.mending()
        for moves in rounds:
            if (self._clock() - began) * 1e3 >= budget_ms:
                break
            freed += self._evictor.mend(moves)
            moved += len(moves)
        return CompactionReport(
            cells_moved=moved,
            blocks_freed=freed,
            bytes_freed=freed * self._block_bytes,
            remaining_blocks=len(rounds) - freed,
            before=before,
            after=self.fragmentation(),
            duration_ms=(self._clock() - began) * 1e3,
        )

    # -- figures -------------------------------------------------------------------------------------------------

    def totals(self) -> ReclaimTally:
        """What was evicted on demand and by budgets."""
        budgets = self.budgets.tally
        return ReclaimTally(
            self.tally.evicted_blocks + budgets.blocks, self.tally.evicted_entries + sum(budgets.entries.values())
        )

    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that budgets cost, by policy."""
        return {name: count // self._cells.cells_per_block for name, count in self.budgets.tally.entries.items()}

    def slots(self) -> tuple[int, int]:
        """Token slots of held blocks and cells, and how many hold a token; cells count by layers times heads."""
        usage, cells, size = self._pool.usage(), self._cells.usage(), self._pool.block_tokens
        grid = self._cells.cells_per_block
        running = self._scheduler.running
        tables = [s.coming if s.reads is not None else s.cells for s in running]
        entries = sum(table.entries for table in tables if table is not None)
        allocated = (usage.active - cells.blocks) * size + cells.used * size // grid
        return allocated, min(allocated, usage.slots_filled + entries // grid)

    def cell_counts(self) -> CellCounts:
        usage = self._cells.usage()
        return CellCounts(
            split_blocks=usage.blocks, total=usage.cells, used=usage.used, spare_blocks=self._cells.spare_blocks()
        )

    def fragmentation(self) -> Fragmentation:
        allocated, filled = self.slots()
        usage = self._cells.usage()
        return Fragmentation(
            internal=1.0 - filled / allocated if allocated else 0.0,
            external=usage.waste,
            split_blocks=usage.blocks,
            largest_free_run=self._pool.largest_free_run(),
        )
