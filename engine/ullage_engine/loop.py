"""The step loop's thread, and the engine's face to all other threads.

Requests, aborts and commands are handed over under a lock and carried out between two steps; state goes the other
way as immutable snapshots. If a step breaks the books, every request is told and the loop ends: the step clock then
stands still, which `/ready` and `/health` show.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ullage_engine.api.core import BlockMap
from ullage_engine.engine import Engine
from ullage_engine.errors import Draining, LoopUnavailable, Overloaded, RequestTooLong
from ullage_engine.request import AdmissionLimit, Destination, GenerationRequest, Sink, TokenOutput
from ullage_engine.scheduler import Chunk
from ullage_engine.snapshot import CompactionReport, EngineSnapshot, EvictionReport
from ullage_engine.steps import StepListener, StepStats

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_PASS_S = 0.05
"""An idle loop completes a pass this often, so that its clock tells it from a stuck one."""
QUEUE_RETRY_S = 1.0
DRAIN_RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Fixed bounds on what is admitted."""

    max_model_len: int
    max_queue: int
    max_sequences: int


class EngineLoop:
    """Runs an `Engine` in a thread of its own; implements `ullage_engine.api.core.EngineCore`."""

    def __init__(
        self,
        engine: Engine,
        limits: LoopLimits,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = limits.max_model_len
        self.eos_token_ids = eos_token_ids
        self.model_name = engine.identity.model
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._incoming = 0
        self._queued_at: dict[str, float] = {}
        """When each request that no step has worked on yet was submitted."""
        self._ended: list[str] = []
        """Requests that ended since the last step."""
        self._listeners: list[StepListener] = []
        self._limit: AdmissionLimit | None = None
        self._draining = False
        self._stopping = False
        self._broken = False
        self._snapshot = engine.snapshot(None, draining=False)
        engine.listen(self._wake)
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell every request, end the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _wake(self) -> None:
        """A copy between memory tiers has ended: have the next pass take it in."""
        with self._changed:
            if not self._stopping:
                self._hand_over(lambda: None)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        self._check_size(request)
        with self._changed:
            self._check_open(request)
            self._incoming += 1
            self._queued_at[request.request_id] = self._clock()
            self._hand_over(lambda: self._admit(request, sink))

    def abort(self, request_id: str) -> None:
        with self._changed:
            if not self._stopping:  # else every request has been or is being told
                self._hand_over(lambda: self._abort(request_id))

    def queued(self, request_id: str) -> bool:
        running = tuple(self._engine.scheduler.running)  # the copy is atomic, and a step's choice shows at once
        return request_id in self._queued_at and all(sequence.request_id != request_id for sequence in running)

    def _abort(self, request_id: str) -> None:
        self._queued_at.pop(request_id, None)
        self._engine.abort(request_id)

    def _admit(self, request: GenerationRequest, sink: Sink) -> None:
        with self._changed:
            self._incoming -= 1

        def telling(output: TokenOutput) -> None:
            if output.finish_reason is not None:
                self._ended.append(request.request_id)
            sink(output)

        self._engine.add(request, telling)

    def _check_size(self, request: GenerationRequest) -> None:
        total = len(request.prompt) + request.sampling.max_tokens
        if total > self.max_model_len:
            raise RequestTooLong(
                f"{len(request.prompt)} prompt tokens + max_tokens {request.sampling.max_tokens} = {total} is above "
                f"this engine's context of {self.max_model_len} tokens; shorten the prompt or lower max_tokens",
                param="messages",
            )

    def _check_open(self, request: GenerationRequest) -> None:
        if self._broken:
            raise LoopUnavailable("the step loop has failed; see the engine's log")
        if self._draining or self._stopping:
            raise Draining("the engine is draining and admits no request", retry_after_s=DRAIN_RETRY_S)
        self._check_limit(request)
        queued = self._incoming + len(self._engine.scheduler.waiting) + self._engine.parked
        room = self._limits.max_sequences - len(self._engine.scheduler.running)
        if queued >= max(self._limits.max_queue, room):
            raise Overloaded(
                f"{queued} requests are waiting, the limit is {self._limits.max_queue}; try again later",
                retry_after_s=QUEUE_RETRY_S,
            )

    def _check_limit(self, request: GenerationRequest) -> None:
        limit = self._limit_in_force()
        if limit is None:
            return
        retry = max(1.0, limit.expires_at - self._clock())
        tokens = len(request.prompt)
        if limit.max_prompt_tokens is not None and tokens > limit.max_prompt_tokens:
            raise Overloaded(
                f"prompts are limited to {limit.max_prompt_tokens} tokens for now, this one has {tokens}",
                retry_after_s=retry,
                param="messages",
            )
        blocks = -(-(tokens + request.sampling.max_tokens) // self._engine.pool.block_tokens)
        if limit.max_total_blocks is not None and blocks > limit.max_total_blocks:
            raise Overloaded(
                f"requests are limited to {limit.max_total_blocks} KV blocks for now, this one projects to {blocks}",
                retry_after_s=retry,
                param="max_tokens",
            )

    # -- figures -------------------------------------------------------------------------------------------------

    def on_step(self, listener: StepListener) -> None:
        with self._changed:
            self._listeners.append(listener)

    def _step(self) -> bool:
        """One step of the engine; whether there is anything to do without waiting."""
        began, cutting = self._clock(), self._engine.cutting
        chunks = self._engine.step()
        stats = StepStats(
            tokens=sum(chunk.width for chunk in chunks),
            sequences=len(chunks),
            duration_s=self._clock() - began,
            queued_s=self._first_worked_on(chunks, began),
            accepted=tuple(self._engine.accepted),
        )
        for listener in self._listeners:
            listener(stats)
        return bool(chunks) or cutting or self._engine.cutting

    def _first_worked_on(self, chunks: list[Chunk], began: float) -> tuple[float, ...]:
        names = [*(chunk.sequence.request_id for chunk in chunks), *self._engine.forked]
        begun = [self._queued_at.pop(name, None) for name in names]
        for request_id in self._ended:  # not all that end were begun
            self._queued_at.pop(request_id, None)
        self._ended.clear()
        return tuple(max(0.0, began - submitted) for submitted in begun if submitted is not None)

    # -- state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    def step_age_s(self) -> float:
        """Seconds since the last pass; infinite once the loop has failed, so that probes see it at once."""
        return math.inf if self._broken else max(0.0, self._clock() - self._snapshot.stepped_at)

    def block_map(self) -> BlockMap:
        """Read between two steps.

        Raises:
            LoopUnavailable: the loop did not come to it in 5 s.
        """
        return self._call(self._block_map, timeout_s=5.0)

    def _block_map(self) -> BlockMap:
        pool, cells = self._engine.pool, self._engine.scheduler.cells
        filled = pool.fills()
        for block in cells.blocks:
            filled[block] = cells.used_in(block) * pool.block_tokens // cells.cells_per_block
        return BlockMap(
            sequence=self._snapshot.sequence,
            block_tokens=pool.block_tokens,
            states=pool.states(),
            filled=tuple(filled),
            refs=tuple(pool.counts()),
        )

    # -- control -------------------------------------------------------------------------------------------------

    def evict(
        self,
        *,
        ratio: float | None,
        bytes_: int | None,
        dry_run: bool,
        timeout_s: float,
        target_usage: float | None = None,
        tiers: tuple[Destination, ...] = ("drop",),
    ) -> EvictionReport:
        return self._call(
            lambda: self._engine.evict(
                ratio=ratio, bytes_=bytes_, target_usage=target_usage, dry_run=dry_run, tiers=tiers
            ),
            timeout_s=timeout_s,
        )

    def compact(self, *, budget_ms: float, timeout_s: float) -> CompactionReport:
        return self._call(lambda: self._engine.compact(budget_ms), timeout_s=timeout_s)

    def set_admission(self, limit: AdmissionLimit | None) -> None:
        with self._changed:
            self._limit = limit
            self._hand_over(lambda: None)

    def set_draining(self, draining: bool) -> None:
        with self._changed:
            self._draining = draining
            if not self._stopping:
                self._hand_over(lambda: None)

    def _limit_in_force(self) -> AdmissionLimit | None:
        limit = self._limit
        return limit if limit is not None and limit.expires_at > self._clock() else None

    def _call(self, action: Callable[[], T], *, timeout_s: float) -> T:
        """Run `action` in the loop's thread; what has not begun in time is cancelled and will not happen."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
                future.set_exception(error)

        with self._changed:
            self._hand_over(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.cancel():
                raise LoopUnavailable(
                    f"the step loop did not come to it in {timeout_s:g} s; it was cancelled"
                ) from None
        return future.result()  # begun just now: it takes microseconds

    def _hand_over(self, action: Callable[[], None]) -> None:
        """Queue for the loop's thread; the lock is held."""
        if self._stopping:
            raise LoopUnavailable("the step loop has ended")
        self._inbox.append(action)
        self._changed.notify_all()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = "the engine stopped"
        try:
            while not self._stopping:
                self._pass()
        except Exception:
            log.exception("the step loop broke")
            self._broken = True
            error = "the engine failed; see its log"
        with self._changed:
            self._stopping = True
        self._engine.fail_all(error)
        self._run_last(error)
        self._engine.close(keep=not self._broken)

    def _pass(self) -> None:
        self._run_inbox()
        if self._engine.idle:
            self._engine.tend()
            worked = False
        else:
            worked = self._step()
        self._snapshot = self._engine.snapshot(self._limit_in_force(), draining=self._draining)
        if not worked:
            with self._changed:
                if not self._inbox and not self._stopping:
                    self._changed.wait(IDLE_PASS_S)

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _run_last(self, error: str) -> None:
        """What was handed over before the end: admissions are told, calls get their answer or error."""
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                log.exception("handed over too late")
        self._engine.fail_all(error)


def build_engine(config: Any) -> Any:
    """Load a model and start its loop; see `ullage_engine.build.build_engine`."""
    from ullage_engine.build import build_engine as build

    return build(config)
