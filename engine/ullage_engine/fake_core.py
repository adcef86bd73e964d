"""An engine core that follows a script instead of a model: for tests of everything around the core.

It keeps the whole `EngineCore` contract, its own thread included, with a pool that is only counted.
Non-goals: computing anything, and being fast.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ullage_engine.api.core import BlockMap
from ullage_engine.errors import Draining, LoopUnavailable, Overloaded, RequestTooLong
from ullage_engine.request import AdmissionLimit, Destination, GenerationRequest, Sink, TokenOutput
from ullage_engine.snapshot import (
    BlockCounts,
    CellCounts,
    CompactionReport,
    Counters,
    EngineSnapshot,
    EvictionReport,
    Fragmentation,
    TierState,
)
from ullage_engine.steps import StepListener, StepStats

STEP_S = 0.0005
"""Pause between two passes, in which other threads get the lock."""


class Gate:
    """A point in a script at which a sequence waits until the gate is opened."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.is_open = False

    def open(self) -> None:
        """Let every sequence pass, for good."""
        with self._changed:
            self.is_open = True
            self._changed.notify_all()


Script = Callable[[GenerationRequest], Iterable[TokenOutput | Gate]]


def echo(request: GenerationRequest) -> Iterator[TokenOutput]:
    """Generate the prompt again, up to `max_tokens`, and stop when it is at its end."""
    tokens = request.prompt[: request.sampling.max_tokens]
    reason = "length" if len(tokens) < len(request.prompt) else "stop"
    for token in tokens:
        yield TokenOutput(request_id=request.request_id, token=token)
    yield TokenOutput(request_id=request.request_id, token=None, finish_reason=reason)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Live:
    sink: Sink
    outputs: Iterator[TokenOutput | Gate]
    blocks: int
    gate: Gate | None = None
    queued: bool = True


@dataclass(slots=True, kw_only=True)
class FakePool:
    """Counts of an imagined pool. `cached` blocks are reclaimable; running sequences add active ones."""

    total: int = 256
    cached: int = 0
    sparse: int = 0
    """Active blocks that compaction would free: split ones of two cells each, of which nobody holds one."""
    block_tokens: int = 16
    block_bytes: int = 1024


@dataclass(slots=True)
class FakeCore:
    """A scripted `EngineCore`. Call `start` before use and `close` after; fields may be set between steps."""

    script: Script = echo
    max_model_len: int = 1024
    eos_token_ids: frozenset[int] = frozenset()
    model_name: str = "fake"
    pool: FakePool = field(default_factory=FakePool)
    host: TierState | None = None
    """A lower tier that takes whatever is evicted to it."""
    age_s: float = 0.0
    """What `step_age_s` answers."""
    queue_full: bool = False
    """Refuse the next requests with Overloaded."""
    busy: bool = False
    """Leave requests that were not begun in the queue."""
    hung: bool = False
    """Answer no eviction and no compaction."""
    submitted: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    evictions: list[tuple[float | None, int | None, bool]] = field(default_factory=list)
    compactions: list[float] = field(default_factory=list)
    limit: AdmissionLimit | None = None
    draining: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _live: dict[str, _Live] = field(default_factory=dict)
    _listeners: list[StepListener] = field(default_factory=list)
    _closed: bool = False
    _steps: int = 0
    _finished: int = 0
    _thread: threading.Thread | None = None

    def start(self) -> FakeCore:
        """Begin stepping in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="fake-core", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread; sequences still live get no further output."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def gate(self) -> Gate:
        """A new closed gate to put into a script."""
        return Gate(self._changed)

    def wait_for(self, condition: Callable[[FakeCore], bool], timeout_s: float = 60.0) -> bool:
        """Wait until a condition on this core holds; False when it did not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout_s)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests in flight."""
        return tuple(self._live)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """See `EngineCore`."""
        blocks = -(-(len(request.prompt) + request.sampling.max_tokens) // self.pool.block_tokens)
        with self._changed:
            self._admit(request, blocks)
            self.submitted.append(request)
            self._live[request.request_id] = _Live(sink, iter(self.script(request)), blocks)
            self._changed.notify_all()

    def _admit(self, request: GenerationRequest, blocks: int) -> None:
        limit = self.limit
        if self.draining:
            raise Draining("the engine is draining", retry_after_s=5.0)
        if blocks > self.pool.total:
            raise RequestTooLong(f"needs {blocks} blocks, the pool has {self.pool.total}", param="max_tokens")
        if self.queue_full:
            raise Overloaded("the queue is full", retry_after_s=1.0)
        if limit and limit.max_prompt_tokens is not None and len(request.prompt) > limit.max_prompt_tokens:
            raise Overloaded("the prompt exceeds the limit in force", retry_after_s=7.2, param="prompt")

    def abort(self, request_id: str) -> None:
        """See `EngineCore`."""
        with self._changed:
            if self._live.pop(request_id, None) is not None:
                self.aborted.append(request_id)
                self._changed.notify_all()

    def queued(self, request_id: str) -> bool:
        """See `EngineCore`."""
        with self._changed:
            return request_id in self._live and self._live[request_id].queued

    def on_step(self, listener: StepListener) -> None:
        """See `EngineCore`. Durations are what this core takes, and nobody waits in its queue but while `busy`."""
        with self._changed:
            self._listeners.append(listener)

    def snapshot(self) -> EngineSnapshot:
        """See `EngineCore`."""
        with self._changed:
            return self._snapshot()

    def _snapshot(self) -> EngineSnapshot:
        pool, limit = self.pool, self.limit
        active = min(sum(live.blocks for live in self._live.values()) + pool.sparse, pool.total - pool.cached)
        free = pool.total - pool.cached - active
        return EngineSnapshot(
            instance="fake",
            sequence=self._steps,
            model=self.model_name,
            engine_version="0",
            block_tokens=pool.block_tokens,
            block_bytes=pool.block_bytes,
            blocks=BlockCounts(total=pool.total, free=free, active=active, cached=pool.cached, in_flight=0, pinned=0),
            cells=CellCounts(
                split_blocks=pool.sparse, total=2 * pool.sparse, used=pool.sparse, spare_blocks=pool.sparse
            ),
            largest_free_run=free,
            largest_allocation=free + pool.cached,
            slots_allocated=active * pool.block_tokens,
            slots_filled=active * pool.block_tokens,
            running=sum(not live.queued for live in self._live.values()),
            waiting=sum(live.queued for live in self._live.values()),
            outstanding_blocks=0,
            counters=Counters(admitted=len(self.submitted), finished=self._finished, aborted=len(self.aborted)),
            dropped_tokens={},
            allocator_reserved_bytes=0,
            allocator_allocated_bytes=0,
            host=self.host,
            disk=None,
            step=self._steps,
            stepped_at=time.monotonic() - self.age_s,
            max_prompt_tokens=limit.max_prompt_tokens if limit else None,
            max_total_blocks=limit.max_total_blocks if limit else None,
            limit_expires_at=limit.expires_at if limit else None,
            draining=self.draining,
        )

    def block_map(self) -> BlockMap:
        """See `EngineCore`."""
        with self._changed:
            blocks = self._snapshot().blocks
            states = "A" * blocks.active + "C" * blocks.cached + "F" * blocks.free
            filled = tuple(0 if state == "F" else self.pool.block_tokens for state in states)
            refs = tuple(int(state == "A") for state in states)
            return BlockMap(
                sequence=self._steps,
                block_tokens=self.pool.block_tokens,
                states=states,
                filled=filled,
                refs=refs,
            )

    def evict(
        self,
        *,
        ratio: float | None,
        bytes_: int | None,
        dry_run: bool,
        timeout_s: float,
        tiers: tuple[Destination, ...] = ("drop",),
        target_usage: float | None = None,
    ) -> EvictionReport:
        """See `EngineCore`: cached blocks are freed, never active ones."""
        with self._changed:
            if self.hung:
                raise LoopUnavailable(f"the step loop did not answer within {timeout_s:g} s")
            pool, blocks = self.pool, self._snapshot().blocks
            occupied = blocks.active + blocks.cached
            wanted = -(-bytes_ // pool.block_bytes) if bytes_ is not None else round((ratio or 0) * occupied)
            if target_usage is not None:
                wanted = max(0, occupied - int(target_usage * pool.total))
            freed = min(wanted, pool.cached)
            demoted = freed if "host" in tiers else 0
            self.evictions.append((ratio, bytes_, dry_run))
            eligible = pool.cached
            if not dry_run:
                pool.cached -= freed
            return EvictionReport(
                blocks_freed=freed,
                bytes_freed=freed * pool.block_bytes,
                dropped=freed - demoted,
                demoted=demoted,
                cached_blocks=freed,
                sequences_touched=0,
                tokens_dropped=0,
                eligible_blocks=eligible,
                requested_blocks=wanted,
                duration_ms=0.1,
                dry_run=dry_run,
            )

    def compact(self, *, budget_ms: float, timeout_s: float) -> CompactionReport:
        """See `EngineCore`: takes 1 ms a block."""
        with self._changed:
            if self.hung:
                raise LoopUnavailable(f"the step loop did not answer within {timeout_s:g} s")
            before = self._fragmentation()
            freed = min(self.pool.sparse, int(budget_ms))
            self.pool.sparse -= freed
            self.compactions.append(budget_ms)
            return CompactionReport(
                cells_moved=freed,
                blocks_freed=freed,
                bytes_freed=freed * self.pool.block_bytes,
                remaining_blocks=self.pool.sparse,
                before=before,
                after=self._fragmentation(),
                duration_ms=float(freed),
            )

    def _fragmentation(self) -> Fragmentation:
        split = self.pool.sparse
        return Fragmentation(
            internal=0.0,
            external=0.5 if split else 0.0,
            split_blocks=split,
            largest_free_run=self._snapshot().largest_free_run,
        )

    def set_admission(self, limit: AdmissionLimit | None) -> None:
        """See `EngineCore`. The limit does not expire by itself here."""
        with self._changed:
            self.limit = limit

    def set_draining(self, draining: bool) -> None:
        """See `EngineCore`."""
        with self._changed:
            self.draining = draining
            self._changed.notify_all()

    def step_age_s(self) -> float:
        """See `EngineCore`."""
        return self.age_s

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._steps += 1
                began = time.monotonic()
                progress = [self._step(request_id) for request_id in tuple(self._live)]
                self._tell(sum(progress), time.monotonic() - began)
                if any(progress):
                    self._changed.notify_all()  # whoever waits for a condition looks again
                self._changed.wait(STEP_S if any(progress) else None)

    def _tell(self, tokens: int, duration_s: float) -> None:
        for listener in self._listeners if tokens else ():
            listener(StepStats(tokens=tokens, sequences=tokens, duration_s=duration_s))

    def _step(self, request_id: str) -> bool:
        """Emit one output of a sequence; False when it waits in the queue or at a gate."""
        live = self._live[request_id]
        live.queued = live.queued and self.busy
        if live.queued:
            return False
        if live.gate is not None and not live.gate.is_open:
            return False
        ended = TokenOutput(request_id=request_id, token=None, finish_reason="error", error="the script ended early")
        item = next(live.outputs, ended)
        if isinstance(item, Gate):
            live.gate = item
            return True
        live.sink(item)
        if item.finish_reason is not None:
            del self._live[request_id]
            self._finished += 1
            self._changed.notify_all()
        return True
