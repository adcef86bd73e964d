"""One engine: admit, step, emit, evict. Single-threaded; `loop` gives it a thread and a face for other threads.

`step` is the whole engine in one screen: plan, forward, sample, book, emit.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

import torch

from ullage_engine.ahead import RunAhead
from ullage_engine.budgets import Retention, Store
from ullage_engine.decode_graphs import Flight
from ullage_engine.eviction import Protection
from ullage_engine.pool import BlockPool
from ullage_engine.reclaim import Reclaimer
from ullage_engine.request import AdmissionLimit, Destination, FinishReason, GenerationRequest, Sink, TokenOutput
from ullage_engine.sampler import Row, Sampled, rows_of
from ullage_engine.scheduler import Chunk, Scheduler
from ullage_engine.sequence import Sequence
from ullage_engine.snapshot import BlockCounts, CompactionReport, Counters, EngineSnapshot, EvictionReport, TierState
from ullage_engine.speculation.accept import Verdict, judge
from ullage_engine.speculation.speculator import SpeculationTally, Speculator
from ullage_engine.tiers.residency import TieredResidency

log = logging.getLogger(__name__)

STALL_PASSES = 200
"""Passes with waiting requests and no work before the engine gives the oldest up: nothing can free blocks any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who this engine is, for its snapshots."""

    model: str
    version: str
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class RequestTally:
    """Totals since the start."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Runner(Store, Protocol):
    """The model as the engine sees it: `runner.ModelRunner`, or `fake_runner.FakeRunner` in tests."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def allocator_bytes(self) -> tuple[int, int]:
        """Bytes that the allocator has reserved and, of those, handed out."""
        ...

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Write the chunks' keys and values; logits [n, V] float32: in order, for each chunk that completes, a row of
        its last token and one of each drafted token.

        May raise anything: repeating the call with fewer chunks must be safe.
        """
        ...

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None) -> Flight | None:
        """See `ahead.Launcher`."""
        ...

    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Copy whole blocks, source by target; all sources are read before any target is written."""
        ...

    def erase(self, slots: list[int]) -> None:
        """Zero single tokens whose content may be unfit to lie beside others."""
        ...

    def scrub(self, blocks: list[int], cells: list[int]) -> None:
        """Zero blocks and cells (ids) whose content may be unfit for others."""
        ...


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
        self._clock = clock
        self._live: dict[str, Sequence] = {}
        self._parked: dict[str, list[Sequence]] = {}
        """Forks by parent, until the parent's prompt is computed."""
        self._stalled = 0
        self.forked: list[str] = []
        """Requests that the last step started as forks; they are in none of its chunks."""
        self.accepted: list[int] = []
        """Of each draft that the last step verified, how many of its tokens stood."""
        self._arrivals = 0
        self._readings = 0
        self.steps = 0
        self.tally = RequestTally()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def parked(self) -> int:
        """Forks that wait for their parent's prompt."""
        return sum(map(len, tuple(self._parked.values())))

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request that was checked to fit."""
        sequence = Sequence(
            request, sink, self._arrivals, list(request.prompt), self.pool.block_tokens, _generator(request)
        )
        self._arrivals += 1
        self._live[request.request_id] = sequence
        self.tally.admitted += 1
        self.tally.prompt_tokens += len(request.prompt)
        parent = self._live.get(request.fork_of or "")
        if parent is not None and _same_prompt(parent, request) and not parent.generated:
            self._parked.setdefault(parent.request_id, []).append(sequence)
        else:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.tally.aborted += 1
            self._end(sequence)

    def fail_all(self, error: str) -> None:
        """Tell every request that it has ended; the books, which may be broken, are left as they are."""
        live, self._live = list(self._live.values()), {}
        for sequence in live:
            self._tell(sequence, _failure(sequence, error))

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[Chunk]:
        """One forward pass over what the scheduler chose, and what follows from its tokens; returns what it chose."""
        self.tend()
        chunks = self._ahead.flying() or self._plan()
        self.forked, self.accepted = [], []
        # drafts are proposed from the newest token, which a step run ahead does not know
        ahead = self._ahead.results(chunks) if self._speculator is None else None
        for chunk, rows in self._forward(chunks) if ahead is None else ahead:
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
        for child in self._parked.pop(parent.request_id, []):
            if self.scheduler.fork(parent, child):
                self.forked.append(child.request_id)
                self._advance(child, judge(row, None, None, child.request.sampling, child.generator))

    def _keep_budgets(self) -> None:
        for sequence in self.reclaimer.budgets.keep():
            self._fail(sequence, "an eviction failed in the middle of this request's keys and values")

    def _watch(self, chunks: list[Chunk]) -> None:
        """End the head of the queue when nothing at all has moved for `STALL_PASSES` passes."""
        moving = self._tiers is not None and self._tiers.busy
        self._stalled = 0 if chunks or self.idle or moving else self._stalled + 1
        if self._stalled >= STALL_PASSES:
            head = next(self.scheduler.live())
            log.error("no progress in %d passes: request %s is ended", self._stalled, head.request_id)
            self._fail(head, f"no KV blocks became available in {self._stalled} passes of an idle engine")
            self._stalled = 0

    def _end_hopeless(self) -> None:
        """End what was evicted to fit, lost its cache, and is too long to be computed anew."""
        hopeless, self.scheduler.hopeless = self.scheduler.hopeless, []
        for sequence in hopeless:
            self._fail(
                sequence,
                f"its {len(sequence.tokens)} tokens do not fit the KV cache of {self.pool.total} blocks any more: it "
                "had been evicted, then preempted, and what was stored of its cache is gone",
            )

    def _forward(self, chunks: list[Chunk]) -> list[tuple[Chunk, list[Row]]]:
        """Chunks computed, each with its rows of logits (none for those that don't complete).

        A pass that raises is repeated chunk by chunk, and at last without a draft, so that only the request that can't
        be computed fails: writing the same keys and values to the same slots again does no harm.
        """
        if not chunks:
            return []
        try:
            rows = iter(rows_of(self._runner.forward(chunks)))
        except Exception as error:
            if len(chunks) > 1:
                return [pair for chunk in chunks for pair in self._forward([chunk])]
            if chunks[0].draft.tokens:
                return self._forward([self._without_draft(chunks[0])])
            log.exception("request %s failed in the model", chunks[0].sequence.request_id)
            self._fail(chunks[0].sequence, f"the model failed on this request: {type(error).__name__}")
            return []
        counts = [1 + len(chunk.draft.tokens) if chunk.completes else 0 for chunk in chunks]
        return [self._sound(chunk, list(islice(rows, count))) for chunk, count in zip(chunks, counts, strict=True)]

    def _sound(self, chunk: Chunk, rows: list[Row]) -> tuple[Chunk, list[Row]]:
        """The chunk and its rows, without a draft that the model has no finite answer to."""
        if all(row.finite for row in rows[1:]):
            return chunk, rows
        self._runner.erase(chunk.sequence.slots(chunk.width)[chunk.count :])
        return self._without_draft(chunk), rows[:1]

    def _without_draft(self, chunk: Chunk) -> Chunk:
        self.scheduler.trim(chunk.sequence, chunk.count)
        return Chunk(chunk.sequence, chunk.count)

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
            if not self._advance(sequence, verdict) or not verdict.accepted:
                break
        if draft.tokens:
            self._settle(chunk, accepted)

    def _settle(self, chunk: Chunk, accepted: int) -> None:
        """Roll back what was not accepted, and book the draft's fate."""
        self.accepted.append(accepted)
        if chunk.sequence.request_id in self._live:
            self.scheduler.trim(chunk.sequence)
        if self._speculator is not None:
            self._speculator.observe(chunk.sequence, len(chunk.draft.tokens), accepted)

    def _advance(self, sequence: Sequence, verdict: Verdict) -> bool:
        """Take the next token; False: the sequence has ended."""
        chosen = verdict.chosen
        if chosen is None:
            self._fail(sequence, "the model produced NaN or infinity for this request")
            return False
        sequence.tokens.append(chosen.token)
        kept = math.ceil(sequence.kept_tokens)
        self.tally.generated_tokens += 1
        reason = _finish_reason(sequence, chosen)
        if reason is not None:
            self._end(sequence)
            self.tally.finished += 1
        self._emit(sequence, _output(sequence, chosen, reason, kept))
        return sequence.request_id in self._live

    def _fail(self, sequence: Sequence, error: str) -> None:
        if sequence.reads is not None:
            log.error("a reader failed; its sequence is not cut")
            self.scheduler.finish(sequence)
            return
        own = [block for block in sequence.table if self.pool.references(block) == 1]
        for block in own:
            self.pool.withdraw(block)
        self._runner.scrub(own, sequence.cells.held if sequence.cells is not None else [])
        self._end(sequence)
        self.tally.failed += 1
        self._emit(sequence, _failure(sequence, error))

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request_id]
        if self._speculator is not None:
            self._speculator.forget(sequence)
        for siblings in self._parked.values():
            if sequence in siblings:
                siblings.remove(sequence)
                return
        for orphan in self._parked.pop(sequence.request_id, []):
            self.scheduler.add(orphan)
        self.scheduler.finish(sequence)

    def _emit(self, sequence: Sequence, output: TokenOutput) -> None:
        if not self._tell(sequence, output):
            self.abort(sequence.request_id)

    def _tell(self, sequence: Sequence, output: TokenOutput) -> bool:
        """Hand an output to its receiver, whose own faults end its request and never the loop."""
        try:
            sequence.sink(output)
        except Exception:
            log.exception("the receiver of request %s failed", sequence.request_id)
            return False
        return True

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
        cells.check_integrity(s.cells.held for s in live if s.cells is not None and s.reads is None)
        if self._speculator is not None:
            self._speculator.check_integrity()

    # -- state ---------------------------------------------------------------------------------------------------

    def snapshot(self, limit: AdmissionLimit | None, *, draining: bool) -> EngineSnapshot:
        """The state between two steps, numbered."""
        self._readings += 1
        usage, scheduler = self.pool.usage(), self.scheduler
        reserved, allocated = self._runner.allocator_bytes()
        slots_allocated, slots_filled = self.reclaimer.slots()
        return EngineSnapshot(
            instance=self.identity.instance,
            sequence=self._readings,
            model=self.identity.model,
            engine_version=self.identity.version,
            block_tokens=self.pool.block_tokens,
            block_bytes=self._runner.block_bytes,
            blocks=BlockCounts(
                total=usage.total,
                free=usage.free,
                active=usage.active,
                cached=usage.cached,
                in_flight=usage.in_flight,
                pinned=usage.pinned,
            ),
            cells=self.reclaimer.cell_counts(),
            largest_free_run=self.pool.largest_free_run(),
            largest_allocation=self.pool.available,
            slots_allocated=slots_allocated,
            slots_filled=slots_filled,
            running=sum(sequence.reads is None for sequence in scheduler.running),
            waiting=len(scheduler.waiting) + self.parked,
            outstanding_blocks=self._outstanding_blocks(),
            counters=self._counters(),
            dropped_tokens=self.reclaimer.dropped_tokens(),
            allocator_reserved_bytes=reserved,
            allocator_allocated_bytes=allocated,
            host=self._tier("host"),
            disk=self._tier("disk"),
            step=self.steps,
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
        parked = [child for children in self._parked.values() for child in children]
        shared = sum(len(child.request.prompt) // self.pool.block_tokens for child in parked)
        own = sum(s.outstanding_blocks for s in (*self.scheduler.live(), *parked)) - shared
        return own + self.scheduler.coming_copies()

    def _counters(self) -> Counters:
        mine, queue, freed = self.tally, self.scheduler.tally, self.reclaimer.totals()
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
            evicted_tokens=freed.evicted_entries // self.scheduler.cells.cells_per_block,
            drafted_tokens=drafts.drafted_tokens,
            accepted_tokens=drafts.accepted_tokens,
        )


def _same_prompt(parent: Sequence, request: GenerationRequest) -> bool:
    return (parent.request.prompt, parent.request.tenant) == (request.prompt, request.tenant)


def _generator(request: GenerationRequest) -> torch.Generator | None:
    if request.sampling.temperature == 0:
        return None
    generator = torch.Generator()
    if request.sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.sampling.seed % (1 << 63))
    return generator


def _failure(sequence: Sequence, error: str) -> TokenOutput:
    return TokenOutput(request_id=sequence.request_id, token=None, finish_reason="error", error=error)


def _finish_reason(sequence: Sequence, chosen: Sampled) -> FinishReason | None:
    if chosen.token in sequence.request.sampling.stop_token_ids:
        return "stop"
    return "length" if sequence.remaining <= 0 else None


def _output(sequence: Sequence, chosen: Sampled, reason: FinishReason | None, kept: int) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request_id,
        token=chosen.token,
        logprob=chosen.logprob,
        top_logprobs=chosen.top,
        finish_reason=reason,
        cached_tokens=sequence.cached_tokens,
        kept_tokens=kept,
        dropped_tokens=sequence.computed - kept,
    )
