"""One engine: admit, step, emit, evict. Single-threaded; `loop` gives it a thread and a face for other threads.

`step` is the whole engine in one screen: plan, forward, sample, book, emit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ullage_engine.ahead import RunAhead
from ullage_engine.budgets import Retention
from ullage_engine.compute import Compute, Runner
from ullage_engine.eviction import Protection
from ullage_engine.live import LiveRequests, RequestTally
from ullage_engine.pool import BlockPool
from ullage_engine.readings import EngineIdentity, Readings
from ullage_engine.reclaim import Reclaimer
from ullage_engine.request import AdmissionLimit, Destination, GenerationRequest, Sink
from ullage_engine.sampler import Row
from ullage_engine.scheduler import Chunk, Scheduler
from ullage_engine.sequence import Sequence
from ullage_engine.snapshot import CompactionReport, EngineSnapshot, EvictionReport
from ullage_engine.speculation.accept import judge
from ullage_engine.speculation.speculator import Speculator
from ullage_engine.tiers.residency import TieredResidency

log = logging.getLogger(__name__)

STALL_PASSES = 200
"""Passes with waiting requests and no work before the engine gives the oldest up: nothing can free blocks any more."""


class Engine:
    """Sequences in flight, and what happens to them between two steps."""

    def __init__(
        self,
        *,
        identity: EngineIdentity,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        protection: Protection,
        speculator: Speculator | None = None,
        retention: Retention | None = None,
        tiers: TieredResidency | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.pool = pool
        self.scheduler = scheduler
        self.reclaimer = Reclaimer(
            pool=pool,
            scheduler=scheduler,
            store=runner,
            protection=protection,
            retention=retention or Retention(),
            tiers=tiers,
            block_bytes=runner.block_bytes,
            clock=clock,
        )
        self._runner = runner
        self._ahead = RunAhead(runner, scheduler)
        self._speculator = speculator
        self._tiers = tiers
        self._live = LiveRequests(pool, scheduler, runner, speculator)
        self._compute = Compute(runner, scheduler, self._live.fail)
        self._readings = Readings(
            identity=identity,
            runner=runner,
            pool=pool,
            scheduler=scheduler,
            live=self._live,
            reclaimer=self.reclaimer,
            speculator=speculator,
            tiers=tiers,
            clock=clock,
        )
        self._stalled = 0
        self.forked: list[str] = []
        """Requests that the last step started as forks; they are in none of its chunks."""
        self.accepted: list[int] = []
        """Of each draft that the last step verified, how many of its tokens stood."""
        self.steps = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def cutting(self) -> bool:
        """Whether a sequence is being cut, so that there is something to do even if nobody has tokens to compute."""
        return self.reclaimer.budgets.cutting

    @property
    def parked(self) -> int:
        """Forks that wait for their parent's prompt."""
        return len(self._live.parked())

    @property
    def tally(self) -> RequestTally:
        """What became of requests since the start."""
        return self._live.tally

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request that was checked to fit."""
        self._live.add(request, sink)

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more; unknown ids are ignored."""
        self._live.abort(request_id)

    def fail_all(self, error: str) -> None:
        """Tell every request that it has ended; the books, which may be broken, are left as they are."""
        self._live.fail_all(error)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[Chunk]:
        """One forward pass over what the scheduler chose, and what follows from its tokens; returns what it chose."""
        self.tend()
        chunks = self._ahead.flying() or self._plan()
        self.forked, self.accepted = [], []
        # drafts are proposed from the newest token, which a step run ahead does not know
        ahead = self._ahead.results(chunks) if self._speculator is None else None
        for chunk, rows in self._compute.forward(chunks) if ahead is None else ahead:
            self.scheduler.computed(chunk.sequence, chunk.count)
            if rows:
                self._start_forks(chunk.sequence, rows[0])
                self._commit(chunk, rows)
        self._keep_budgets()
        self.steps += 1
        return chunks

    def _plan(self) -> list[Chunk]:
        chunks = self._with_drafts(self.scheduler.plan())
        self._runner.copy_blocks(self.scheduler.take_copies())
        self._end_hopeless()
        self._watch(chunks)
        return chunks

    def tend(self) -> None:
        """Take in what copies between memory tiers have ended and begin others, without waiting for any."""
        for sequence in self._tiers.advance() if self._tiers is not None else ():
            self.scheduler.requeue(sequence)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in any thread, whenever a copy has ended that `tend` or `step` can take in."""
        if self._tiers is not None:
            self._tiers.listen(listener)

    def close(self, *, keep: bool = True) -> None:
        """End the copies between memory tiers, within a few seconds; no step may follow.

        Args:
            keep: copy to disk first what the process would otherwise take with it.
        """
        if self._tiers is not None:
            self._tiers.close(keep=keep)

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        if self._speculator is None:
            return chunks
        return self.scheduler.with_drafts(chunks, self._speculator.propose(chunks))

    def _start_forks(self, parent: Sequence, row: Row) -> None:
        """Forks draw their first token from their parent's logits, each with its own randomness."""
        for child in self._live.forks_of(parent):
            if self.scheduler.fork(parent, child):
                self.forked.append(child.request_id)
                self._live.advance(child, judge(row, None, None, child.request.sampling, child.generator))

    def _keep_budgets(self) -> None:
        for sequence in self.reclaimer.budgets.keep():
            self._live.fail(sequence, "an eviction failed in the middle of this request's keys and values")

    def _watch(self, chunks: list[Chunk]) -> None:
        """End the head of the queue when nothing at all has moved for `STALL_PASSES` passes."""
        moving = self.cutting or (self._tiers is not None and self._tiers.busy)
        self._stalled = 0 if chunks or self.idle or moving else self._stalled + 1
        if self._stalled >= STALL_PASSES:
            head = next(self.scheduler.live())
            log.error("no progress in %d passes: request %s is ended", self._stalled, head.request_id)
            self._live.fail(head, f"no KV blocks became available in {self._stalled} passes of an idle engine")
            self._stalled = 0

    def _end_hopeless(self) -> None:
        """End what was evicted to fit, lost its cache, and is too long to be computed anew."""
        hopeless, self.scheduler.hopeless = self.scheduler.hopeless, []
        for sequence in hopeless:
            self._live.fail(
                sequence,
                f"its {len(sequence.tokens)} tokens do not fit the KV cache of {self.pool.total} blocks any more: it "
                "had been evicted, then preempted, and what was stored of its cache is gone",
            )

    def _commit(self, chunk: Chunk, rows: list[Row]) -> None:
        """What follows from a chunk's logits: one token, and one more for each drafted token that stands.

        Each accepted token is booked as computed before the next one is chosen, as if it had had a step of its own.
        """
        sequence, draft = chunk.sequence, chunk.draft
        accepted = 0
        for drafted, proposed, row in zip((*draft.tokens, None), (*draft.odds, None), rows, strict=True):
            if accepted:
                self.scheduler.computed(sequence, 1)
            verdict = judge(row, drafted, proposed, sequence.request.sampling, sequence.generator)
            accepted += verdict.accepted
            if not self._live.advance(sequence, verdict) or not verdict.accepted:
                break
        if draft.tokens:
            self._settle(chunk, accepted)

    def _settle(self, chunk: Chunk, accepted: int) -> None:
        """Roll back what was not accepted, and book the draft's fate."""
        self.accepted.append(accepted)
        if chunk.sequence in self._live:
            self.scheduler.trim(chunk.sequence)
        if self._speculator is not None:
            self._speculator.observe(chunk.sequence, len(chunk.draft.tokens), accepted)

    # -- memory --------------------------------------------------------------------------------------------------

    def evict(
        self,
        *,
        ratio: float | None,
        bytes_: int | None,
        dry_run: bool,
        target_usage: float | None = None,
        tiers: tuple[Destination, ...] = ("drop",),
    ) -> EvictionReport:
        """Free cold blocks; see `Reclaimer.evict`."""
        return self.reclaimer.evict(ratio=ratio, bytes_=bytes_, target_usage=target_usage, dry_run=dry_run, tiers=tiers)

    def compact(self, budget_ms: float) -> CompactionReport:
        """Make split blocks whole again; see `Reclaimer.compact`."""
        return self.reclaimer.compact(budget_ms)

    def check_integrity(self) -> None:
        """Hold the pools' books against all tables; see `BlockPool.check_integrity` and `CellPool.check_integrity`."""
        live, cells = list(self.scheduler.live()), self.scheduler.cells
        tables = (sequence.table + sequence.incoming for sequence in live)
        self.pool.check_integrity([*tables, cells.blocks])
        if self._tiers is not None:
            self._tiers.check_integrity(live)
        own = [s.cells.held for s in live if s.cells is not None and s.reads is None]
        cells.check_integrity([*own, *(s.coming.held for s in live if s.coming is not None)])
        if self._speculator is not None:
            self._speculator.check_integrity()

    def snapshot(self, limit: AdmissionLimit | None, *, draining: bool) -> EngineSnapshot:
        """The state between two steps, numbered."""
        return self._readings.take(limit, draining=draining, steps=self.steps)
