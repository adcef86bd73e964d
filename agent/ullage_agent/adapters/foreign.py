"""Engines that are read by their Prometheus exposition and steered by what routes they happen to have.

`ForeignAdapter` does the talking, the same for every such engine; a `Dialect` holds what differs and is pure.
Routes are detected, not assumed, once per engine process: OPTIONS answers 405 where a route exists and 404 where
not, and acts on nothing. Throttling and draining go through the admission gate where one is configured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ullage_agent.adapters.base import Reading
from ullage_agent.adapters.gatefile import GateFile, admission_of, describe, supply_of
from ullage_agent.adapters.transport import Answer, EngineHttp
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineError, EngineProtocolError, EngineRefused, EngineTimeout
from ullage_agent.wire import Action, ActionRequest, ActionResult, Outcome, Snapshot, Violation

METRICS_PATH = "/metrics"
MAX_ANSWER_BYTES = 8 << 20
PROBE_SHARE = 0.25
"""Share of the read timeout that looking for one route may take."""
DRAIN_SHARE = 0.8
"""Share of an action's time spent waiting for requests to end; the rest is for the answer."""
DRAIN_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call of an engine."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """What an engine said of a reset of its prefix cache."""

    done: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What differs between engines."""

    name: str
    title: str
    parse: Callable[[bytes, float], Reading]
    reset: Call
    judge_reset: Callable[[Answer], Reset]
    pause: Call
    """Stops admission and lets requests in flight end, or where the engine has no such mode, `pause_drains` False."""
    resume: Call
    pause_drains: bool
    counts_cached: bool
    """Whether the engine tells cached from free blocks, so that a reset can be seen to have freed any."""
    canary: Callable[[str | None], Call]
    """A request of one token for a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How an action ended."""

    outcome: Outcome
    message: str
    blocks_freed: int = 0
    after: Snapshot | None = None


class ForeignAdapter:
    """Reads and steers one engine. Implements `EngineAdapter` and `Canary`."""

    def __init__(
        self,
        dialect: Dialect,
        http: EngineHttp,
        clock: Clock,
        *,
        read_timeout_s: float = 2.0,
        gate: GateFile | None = None,
    ) -> None:
        self._dialect = dialect
        self._http = http
        self._clock = clock
        self._read_timeout_s = read_timeout_s
        self._gate = gate
        self._routes: frozenset[str] = frozenset()
        self._probed_instance: str | None = None
        self._model: str | None = None
        self._acts: dict[Action, Callable[[ActionRequest, str, Snapshot], Awaitable[Done]]] = {
            "evict": self._evict,
            "throttle": self._throttle,
            "release": self._release,
            "drain": self._drain,
        }

    async def read(self) -> Reading:
        reading = await self._read_metrics()
        if reading.identity.instance != self._probed_instance:
            await self._probe(reading.identity.instance)
        return reading

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        if not self._offers(action):
            return ActionResult(action=action, outcome="Unsupported", message=self._why_not(action))
        before = (await self._read_metrics()).snapshot
        done = await self._acts[action](request, idempotency_key, before)
        block_bytes = before.block_bytes or 0
        return ActionResult(
            action=action,
            outcome=done.outcome,
            message=done.message,
            blocks_freed=done.blocks_freed,
            bytes_freed=done.blocks_freed * block_bytes,
            dropped_blocks=done.blocks_freed,
            dry_run=request.dry_run,
            before=before,
            after=done.after or await self._snapshot_or_none(),
        )

    def capabilities(self) -> tuple[Action, ...]:
        planned = [action for action in self._acts if self._offers(action)]
        if not self._dialect.counts_cached:  # a reset makes no room that the engine did not count as free already
            planned = [action for action in planned if action != "evict"]
        return tuple(planned)

    def features(self) -> tuple[str, ...]:
        found = {
            "pause": self._dialect.pause.path in self._routes,
            "reset_prefix_cache": self._dialect.reset.path in self._routes,
            "canary": True,
        }
        return tuple(name for name, offered in found.items() if offered)

    async def canary(self, timeout_s: float) -> bool:
        """Ask for one token. True: answered; False: refused, so nothing is known.

        Raises:
            EngineError: no answer; a process that answers `/metrics` but not this is not serving.
        """
        call = self._dialect.canary(self._model)
        answer = await self._send(call, "canary", timeout_s)
        if answer.status >= 500 and answer.status != 503:
            raise EngineRefused(f"{call.method} {call.path} answered {answer.status}", status=answer.status)
        return answer.status == 200

    async def close(self) -> None:
        await self._http.close()

    async def _read_metrics(self) -> Reading:
        sampled_at = self._clock.wall()
        answer = await self._http.get(METRICS_PATH, timeout_s=self._read_timeout_s)
        if answer.status != 200:
            raise EngineRefused(f"GET {METRICS_PATH} answered {answer.status}", status=answer.status)
        reading = self._dialect.parse(answer.body, sampled_at)
        self._model = reading.identity.model
        if self._gate is None:
            return reading
        return self._with_admission(reading, self._gate, sampled_at)

    @staticmethod
    def _with_admission(reading: Reading, gate: GateFile, now: float) -> Reading:
        """What the gate does is unknown where its file makes no sense; the engine's own figures are not."""
        try:
            admission: dict[str, Any] = admission_of(gate.current(), now)
        except EngineProtocolError as error:
            broken = Violation(metric="admission gate", problem="wrong_type", detail=str(error)[:256])
            return replace(reading, violations=(*reading.violations, broken))
        return replace(reading, snapshot=replace(reading.snapshot, **admission))

    async def _snapshot_or_none(self) -> Snapshot | None:
        """The state after an action; its loss must not make a done action look failed."""
        try:
            return (await self._read_metrics()).snapshot
        except EngineError:
            return None

    async def _probe(self, instance: str) -> None:
        found: set[str] = set()
        for call in (self._dialect.reset, self._dialect.pause, self._dialect.resume):
            try:
                path = call.path.partition("?")[0]
                answer = await self._http.options(path, timeout_s=self._read_timeout_s * PROBE_SHARE)
            except EngineTimeout:
                break  # looking again at every reading would make each of them late
            except EngineError:
                return  # unknown: the next reading looks again
            if answer.status == 405:
                found.add(call.path)
        self._routes = frozenset(found)
        self._probed_instance = instance

    def _offers(self, action: Action) -> bool:
        pauses = self._dialect.pause_drains and {self._dialect.pause.path, self._dialect.resume.path} <= self._routes
        return {
            "evict": self._dialect.reset.path in self._routes,
            "throttle": self._gate is not None,
            "release": self._gate is not None or pauses,
            "drain": self._gate is not None or pauses,
        }.get(action, False)

    def _why_not(self, action: Action) -> str:
        title, dialect = self._dialect.title, self._dialect
        reasons = {
            "evict": f"this {title} has no route {dialect.reset.path}; it can drop no cached block on demand",
            "compact": f"{title} pages its cache; it has nothing to compact",
            "throttle": f"{title} is throttled by the admission gate only; load it and give --gate-file",
        }
        return reasons.get(action, f"this {title} offers no {action}; load the admission gate and give --gate-file")

    async def _send(self, call: Call, key: str, timeout_s: float) -> Answer:
        if call.method == "GET":
            return await self._http.get(call.path, timeout_s=timeout_s)
        return await self._http.post(call.path, call.body, key=key, timeout_s=timeout_s)

    async def _evict(self, request: ActionRequest, key: str, before: Snapshot) -> Done:
        cached = before.reclaimable_blocks
        if request.dry_run:
            outcome: Outcome = "Succeeded" if cached else "Ineffective"
            freed = cached or 0
            return Done(outcome=outcome, message=f"a reset would drop {freed} cached blocks", blocks_freed=freed)
        reset = self._dialect.judge_reset(await self._send(self._dialect.reset, key, request.timeout_s))
        if not reset.done:
            return Done(outcome="Ineffective", message=reset.message)
        after = await self._snapshot_or_none()
        left = None if after is None else after.reclaimable_blocks
        freed = max(0, cached - left) if cached is not None and left is not None else 0
        if freed:
            message = f"the prefix cache was reset, all of it: {freed} cached blocks dropped"
            return Done(outcome="Succeeded", message=message, blocks_freed=freed, after=after)
        message = "the prefix cache was reset, but no block was seen to become free"
        return Done(outcome="Ineffective", message=message, after=after)

    async def _throttle(self, request: ActionRequest, key: str, before: Snapshot) -> Done:
        assert self._gate is not None  # noqa: S101 - `_offers` looked
        state = self._gate.throttle(request, supply_of(before), before.block_tokens)
        return Done(outcome="Succeeded", message=describe(state, request.ttl_s))

    async def _release(self, request: ActionRequest, key: str, before: Snapshot) -> Done:
        if self._gate is not None:
            self._gate.release()
        if self._dialect.pause_drains and self._dialect.resume.path in self._routes:
            answer = await self._send(self._dialect.resume, key, request.timeout_s)
            if answer.status != 200:
                message = f"{self._dialect.resume.path} answered {answer.status}"
                raise EngineRefused(message, status=answer.status)
        return Done(outcome="Succeeded", message="requests of any length are admitted")

    async def _drain(self, request: ActionRequest, key: str, before: Snapshot) -> Done:
        left = before.running, before.waiting
        try:
            async with asyncio.timeout(request.timeout_s * DRAIN_SHARE):
                await self._close_admission(key, request.timeout_s * DRAIN_SHARE)
                while left != (0, 0):
                    snapshot = (await self._read_metrics()).snapshot
                    left = snapshot.running, snapshot.waiting
                    if left != (0, 0):
                        await asyncio.sleep(DRAIN_LOOK_S)
        except (TimeoutError, EngineTimeout):
            known = [count for count in left if count is not None]
            count = sum(known) if known else "an unknown number of"
            return Done(outcome="Ineffective", message=f"{count} requests are still in flight; none is admitted")
        return Done(outcome="Succeeded", message="no request is in flight; none is admitted")

    async def _close_admission(self, key: str, timeout_s: float) -> None:
        if self._gate is not None:
            self._gate.drain()
            return
        answer = await self._send(self._dialect.pause, key, timeout_s)
        if answer.status != 200:
            raise EngineRefused(f"{self._dialect.pause.path} answered {answer.status}", status=answer.status)
