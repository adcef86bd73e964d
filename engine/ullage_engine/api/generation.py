"""Runs the sequences of one call: into the core's thread and back into the event loop.

Purpose: submit all or none, hand out pieces as they come, abort what is unfinished when the call ends for any
reason, and count what is in flight. Non-goals: HTTP, JSON, and what the text means.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ullage_engine.api.answer import Answer, Piece
from ullage_engine.api.core import EngineCore
from ullage_engine.errors import LoopUnavailable, QueueTimeout
from ullage_engine.metrics import HttpMetrics
from ullage_engine.request import GenerationRequest, Sink, TokenOutput

TIMEOUT_RETRY_S = 5.0
"""When to try again after waiting in vain: the queue moves, or this engine is no good for now."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence to run, and the answer that it fills."""

    request: GenerationRequest
    answer: Answer


class Generations:
    """Starts batches and knows how many sequences are in flight. Belongs to one event loop.

    Args:
        max_wait_s: a call that no step has worked on after so long ends with QueueTimeout; infinity: never.
    """

    def __init__(
        self,
        core: EngineCore,
        metrics: HttpMetrics,
        *,
        max_wait_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.metrics = metrics
        self.max_wait_s = max_wait_s
        self.clock = clock
        self.in_flight = 0
        self._open: set[Batch] = set()

    def start(self, plans: Sequence[Plan]) -> Batch:
        """Submit all sequences, or none.

        Raises:
            RequestRejected: the core refused one of them.
        """
        batch = Batch(self, plans)
        self._open.add(batch)
        try:
            batch.submit()
        except BaseException:
            batch.close()
            raise
        return batch

    def give_up(self, reason: str) -> None:
        """End every sequence in flight; their clients are told `reason`."""
        for batch in tuple(self._open):
            batch.give_up(reason)

    def forget(self, batch: Batch) -> None:
        """A batch has been closed."""
        self._open.discard(batch)


class Batch:
    """The sequences of one call. Use it as a context manager: leaving it aborts what is unfinished."""

    def __init__(self, owner: Generations, plans: Sequence[Plan]) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, TokenOutput] | QueueTimeout] = asyncio.Queue()
        self._wait_limit: asyncio.TimerHandle | None = None
        self._unfinished: set[int] = set()
        self._submitted_at = 0.0
        self._kept = False
        self._last_token_at: dict[int, float] = {}
        self.plans = tuple(plans)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._kept:
            self.close()

    def keep(self) -> None:
        """Leave the sequences running when the context is left: another has taken over closing."""
        self._kept = True

    def submit(self) -> None:
        """Hand every sequence to the core."""
        self._submitted_at = self._owner.clock()
        for index, plan in enumerate(self.plans):
            self._owner.core.submit(plan.request, self._sink(index))
            self._unfinished.add(index)
            self._owner.in_flight += 1
        if math.isfinite(self._owner.max_wait_s):
            self._wait_limit = self._loop.call_later(self._owner.max_wait_s, self._end_if_queued)

    async def next(self) -> tuple[int, Piece] | None:
        """The next piece and its sequence's index; None when all sequences have ended.

        Raises:
            RequestFailed: the core gave a sequence up.
            QueueTimeout: no sequence was begun in time.
        """
        while self._unfinished:
            item = await self._outputs.get()
            if isinstance(item, QueueTimeout):
                raise item
            index, output = item
            if index in self._unfinished:
                return index, self._take(index, output)
        return None

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        if self._wait_limit is not None:
            self._wait_limit.cancel()
        for index in tuple(self._unfinished):
            self._abort(index)
        self._owner.forget(self)

    def give_up(self, reason: str) -> None:
        """End what is unfinished as if the core had."""
        for index in self._unfinished:
            request_id = self.plans[index].request.request_id
            ended = TokenOutput(request_id=request_id, token=None, finish_reason="abort", error=reason)
            self._outputs.put_nowait((index, ended))

    def _end_if_queued(self) -> None:
        """End a call of which nothing was begun. It does not need the step loop, which may be what is stuck."""
        core, seconds = self._owner.core, self._owner.max_wait_s
        if all(core.queued(plan.request.request_id) for plan in self.plans):
            self._owner.metrics.queue_timeouts.inc()
            message = f"the request waited {seconds:g} s in the queue and was not begun; try again later"
            self._outputs.put_nowait(QueueTimeout(message, retry_after_s=TIMEOUT_RETRY_S))

    def _sink(self, index: int) -> Sink:
        def sink(output: TokenOutput) -> None:
            try:
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))
            except RuntimeError:
                # The server's loop has been closed, so nobody waits for this output any more.
                return

        return sink

    def _take(self, index: int, output: TokenOutput) -> Piece:
        if output.finish_reason == "abort":
            self._abort(index)
        elif output.finish_reason is not None:
            self._end(index)
        answer = self.plans[index].answer
        piece = answer.feed(output)
        self._observe(index, output, ended=piece.ending is not None)
        if piece.ending is not None and index in self._unfinished:  # a stop string: the core does not know
            self._abort(index)
        return piece

    def _abort(self, index: int) -> None:
        self._end(index)
        # A loop that has ended has no sequences left: there is nothing to abort.
        with contextlib.suppress(LoopUnavailable):
            self._owner.core.abort(self.plans[index].request.request_id)

    def _end(self, index: int) -> None:
        self._unfinished.discard(index)
        self._owner.in_flight -= 1

    def _observe(self, index: int, output: TokenOutput, *, ended: bool) -> None:
        now, metrics = self._owner.clock(), self._owner.metrics
        last = self._last_token_at.get(index)
        if output.token is not None:
            if last is None:
                metrics.first_token.observe(now - self._submitted_at)
            else:
                metrics.inter_token.observe(now - last)
            self._last_token_at[index] = now
        if ended:
            metrics.end_to_end.observe(now - self._submitted_at)
