"""Ctrl-C, SIGTERM and SIGHUP as an orderly end, at any moment.

The first signal asks whoever waits to stop; each further one also calls the impatient handler, which makes the end
come at once. Either way the caller's contexts are left in order, so nothing stays behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


class Stopped(Exception):
    """A signal came before the work was done."""


class StopSignals:
    """A context in which the signals are ours."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._impatient: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # all is clean; let the last words out

    def on_second(self, handler: Callable[[], None]) -> None:
        """What to do at the second signal and each further one."""
        self._impatient = handler

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._asked.wait()

    async def or_finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            Stopped: a signal came first; the work was cancelled and has ended.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(stop)
            was_done = task.done()
            await end_tasks(task)
        if not was_done:
            raise Stopped
        return task.result()

    def _on_signal(self) -> None:
        if self._asked.is_set():
            self._impatient()
        self._asked.set()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; their own errors are left in them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
