"""Closes the engine to new requests, and opens it again.

Purpose: the one place that knows why nothing is admitted: because the admin interface asked, which it may take back,
or because the server is stopping, which nothing takes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.api.core import EngineCore
from ullage_engine.errors import LoopUnavailable

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Drained:
    """The outcome of a drain."""

    drained: bool
    in_flight: int


class Door:
    """The engine's admission, shared by all that close it. Belongs to one event loop."""

    def __init__(self, core: EngineCore, open_sequences: Callable[[], int]) -> None:
        self._core = core
        self._open_sequences = open_sequences
        self._closed = False
        self._stopping = False

    async def drain(self, timeout_s: float) -> Drained:
        """Stop admitting and wait up to `timeout_s` for what is in flight. One that is ended by `resume` has not
        drained.

        Raises:
            LoopUnavailable: the loop has ended.
        """
        self._closed = True
        self._core.set_draining(True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._closed and self._in_flight():  # noqa: ASYNC110 - another thread's state
                    await asyncio.sleep(POLL_SECONDS)
        left = self._in_flight()
        return Drained(self._closed and not left, left)

    async def stop(self, timeout_s: float) -> Drained:
        """Drain for good: the server is stopping."""
        self._stopping = True
        return await self.drain(timeout_s)

    async def resume(self, timeout_s: float) -> bool:
        """End a drain. Whether the engine is closed even so: a server that is stopping stays it. Answers when the
        snapshot shows it, so that whoever reads next sees what was answered.

        Raises:
            LoopUnavailable: it does not show it within `timeout_s`, or the loop has ended.
        """
        if self._stopping:
            return True
        self._closed = False
        self._core.set_draining(False)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closed and self._core.snapshot().draining:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise LoopUnavailable(f"the step loop did not show the end of the drain in {timeout_s:g} s") from None
        return self._closed

    def _in_flight(self) -> int:
        """Sequences under way: by the core's last snapshot, which may lag, or by the HTTP side's own count."""
        snapshot = self._core.snapshot()
        return max(snapshot.running + snapshot.waiting, self._open_sequences())
