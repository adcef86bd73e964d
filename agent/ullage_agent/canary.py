"""Asks a quiet engine for one token now and then, by option: the only evidence against one that claims to be idle.

A canary that is answered, or refused, clears the last verdict; so do counters that move. One runs at a time.
"""

from __future__ import annotations

import asyncio
import logging

from ullage_agent.adapters.base import HasCanary
from ullage_agent.errors import EngineError, EngineRefused, EngineTimeout
from ullage_agent.wire import Liveness

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""A token takes this long only behind a long prefill, and then counters move."""


class CanaryKeeper:
    """Decides when to ask, and keeps the answer."""

    def __init__(self, adapter: HasCanary, every_s: float, *, timeout_s: float = TIMEOUT_S) -> None:
        self._adapter = adapter
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._asked_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self.error: str | None = None
        """Why the last canary got no answer; None when it did, or none was sent."""

    def look(self, liveness: Liveness, now: float) -> None:
        """Take in how quiet the engine is; starts a canary where it is time. Never waits."""
        running = self._task is not None and not self._task.done()
        if liveness.quiet_s < self._every_s and not running:
            self.error = None
            return
        due = self._asked_at is None or now - self._asked_at >= self._every_s
        if due and not running:
            self._asked_at = now
            self._task = asyncio.create_task(self._ask(), name="canary")

    async def close(self) -> None:
        """Give up a canary under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self) -> None:
        try:
            await self._adapter.canary(self._timeout_s)
        except (EngineTimeout, EngineRefused) as error:
            if self.error is None:
                log.error("the engine answers its metrics but no request: %s", error)
            self.error = str(error)
        except EngineError as error:
            log.info("the canary says nothing: %s", error)  # no connection: the reading itself will say so
        else:
            self.error = None
