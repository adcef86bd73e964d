"""Runs actions one at a time: checked, bounded in time and rate, and never twice for one idempotency key.

Knows nothing of HTTP. Parameters are checked before anything is remembered or counted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ullage_agent.adapters.base import EngineAdapter
from ullage_agent.clock import Clock
from ullage_agent.errors import BadAction, Busy, EngineError, EngineTimeout
from ullage_agent.idempotency import IdempotencyStore
from ullage_agent.wire import Action, ActionRequest, ActionResult

log = logging.getLogger(__name__)

Listener = Callable[[Action, ActionRequest, str, "ActionResult | str"], None]
"""Action, parameters, origin, and the result or the error that ended it. Must not raise."""

MAX_TIMEOUT_S = 600.0
MAX_KEY_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLimits:
    """How often the engine may be acted on. Repeats under a known key are free."""

    per_minute: float = 60.0
    """Sustained rate."""
    burst: int = 20
    """Actions that may come at once after a quiet time."""


class RateLimiter:
    """Token bucket."""

    def __init__(self, limits: ActionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = float(limits.burst)
        self._filled_at = clock.monotonic()

    def wait_s(self) -> float:
        """Take a token and answer 0, or answer the seconds until there is one and take none."""
        now = self._clock.monotonic()
        per_second = self._limits.per_minute / 60.0
        gained = max(0.0, now - self._filled_at) * per_second
        self._tokens = min(float(self._limits.burst), self._tokens + gained)
        self._filled_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / per_second


class ActionRunner:
    """The only caller of `EngineAdapter.act`. Used from the event loop only."""

    def __init__(self, adapter: EngineAdapter, clock: Clock, limits: ActionLimits | None = None) -> None:
        self._adapter = adapter
        self._limiter = RateLimiter(limits or ActionLimits(), clock)
        self._store = IdempotencyStore(clock)
        self._clock = clock
        self._running: asyncio.Task[ActionResult] | None = None
        self.last_ended_at: float | None = None
        """Monotonic seconds when the last action ended, however it did."""
        self.listeners: list[Listener] = []
        """Told of every action that ended."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """How actions ended, by action and outcome; `Error` where the engine did not answer."""

    async def run(
        self, action: Action, request: ActionRequest, key: str | None, *, origin: str = "request"
    ) -> ActionResult:
        """Do the action, or give the first answer again if `key` is known.

        A caller that goes away does not stop an action that has begun. `origin` is `request`, or `reflex` where the
        agent acts by itself.

        Raises:
            BadAction, KeyReused, Busy: not started.
            EngineError: started, but the engine did not answer; the same key may be tried again.
        """
        check_request(action, request)
        if key is not None:
            check_key(key)
            known = self._store.find(key, (action, request))
            if known is not None:
                return await asyncio.shield(known)
        self._admit(action)
        key = key or uuid.uuid4().hex
        self._running = asyncio.create_task(self._act(action, request, key, origin), name=f"action {action}")
        self._store.remember(key, (action, request), self._running)
        return await asyncio.shield(self._running)

    async def close(self, grace_s: float) -> None:
        """Wait for a running action up to `grace_s`, then cancel it."""
        if self._running is None or self._running.done():
            return
        _, late = await asyncio.wait({self._running}, timeout=grace_s)
        for task in late:
            task.cancel()
            await asyncio.wait({task})

    def _admit(self, action: Action) -> None:
        if self._running is not None and not self._running.done():
            raise Busy(f"{self._running.get_name()} is still running; {action} was not started", retry_after_s=1.0)
        wait = self._limiter.wait_s()
        if wait:
            raise Busy(f"too many actions; {action} was not started", retry_after_s=wait)

    async def _act(self, action: Action, request: ActionRequest, key: str, origin: str) -> ActionResult:
        ended: ActionResult | str = "it did not end"
        try:
            ended = result = await self._act_in_time(action, request, key)
        except EngineError as error:
            ended = str(error)
            raise
        finally:
            self.last_ended_at = self._clock.monotonic()
            for listen in self.listeners:
                listen(action, request, origin, ended)
        return result

    async def _act_in_time(self, action: Action, request: ActionRequest, key: str) -> ActionResult:
        try:
            async with asyncio.timeout(request.timeout_s):
                result = await self._adapter.act(action, request, key)
        except TimeoutError as error:
            self.outcomes[action, "Error"] += 1
            raise EngineTimeout(f"{action} did not end within {request.timeout_s:g} s") from error
        except Exception:
            self.outcomes[action, "Error"] += 1
            raise
        self.outcomes[action, result.outcome] += 1
        log.info("%s: %s, %s (%s)", action, result.outcome, result.message, request.reason or "no reason given")
        return result


def check_request(action: Action, request: ActionRequest) -> None:
    """Raises BadAction if the parameters cannot work for this action."""
    if request.timeout_s > MAX_TIMEOUT_S:
        raise BadAction(f"timeout_s is {request.timeout_s:g}; it must be at most {MAX_TIMEOUT_S:g}")
    if action == "evict" and (request.ratio is None) == (request.bytes is None):
        raise BadAction("evict needs exactly one of ratio and bytes")
    required = {"throttle": ("max_prompt_tokens", "ttl_s"), "compact": ("budget_ms",)}.get(action, ())
    for name in required:
        if getattr(request, name) is None:
            raise BadAction(f"{action} needs {name}")
    if request.dry_run and action != "evict":
        raise BadAction(f"dry_run is offered for evict, not for {action}")


def check_key(key: str) -> None:
    """Raises BadAction unless the key is 1 to 128 visible ASCII characters."""
    if not 0 < len(key) <= MAX_KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise BadAction(f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} visible ASCII characters")
