"""The watches' life: kopf runs in a thread and a loop of its own, and is begun anew when it ends by itself.

kopf gives up on answers that it does not expect: an API server that has just started says 404 to custom resources, and
rights may be taken away for a while. It then cancels every task of its loop, and may hang while it does. None of that
may end the guard over services, so only events come over, in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import kopf

from ullage_operator.errors import WatchesLost
from ullage_operator.handlers import register, settings
from ullage_operator.keepers import Keepers
from ullage_operator.office import Office

CANCEL_S = 1.0
"""Seconds for kopf to end when asked to; then it is cancelled, because it waits five for questions it has left open."""
STOP_S = 5.0
"""Seconds for kopf to end at all; then its thread is left to itself, and what it still says is not heard."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before the watches are begun anew, by how many of them in a row ended by themselves."""
ROOTS = frozenset(
    {"stop-flag checker", "multidimensional multitasker", "resource observer", "namespace observer", "daemon killer"}
)
"""Names of tasks whose end is kopf's end."""
MAX_LEFT = 8
"""Threads left to themselves at once: each keeps what it had in memory."""
STEADY_S = 60.0
"""Watches that lasted as long as this count as having worked."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Seconds that are waited; see the constants."""

    cancel_s: float = CANCEL_S
    stop_s: float = STOP_S
    backoff_s: Sequence[float] = BACKOFF_S
    steady_s: float = STEADY_S


class Watches:
    """Watches all that the keepers need to hear of."""

    def __init__(
        self,
        keepers: Keepers,
        office: Office,
        namespaces: Sequence[str],
        *,
        operate: Callable[..., Awaitable[None]] = kopf.operator,
        pauses: Pauses | None = None,
    ) -> None:
        """`operate` takes kopf.operator's keywords; no `namespaces`: all of them."""
        self._keepers = keepers
        self._office = office
        self._namespaces = namespaces
        self._operate = operate
        self._pauses = pauses or Pauses()
        self._left: list[threading.Thread] = []
        self.ready = asyncio.Event()
        """Set when kopf has begun to watch; stays set while it is begun anew, because guarding goes on."""

    @property
    def left(self) -> int:
        """Threads that were left to themselves and still run: the interpreter must not be taken down around them."""
        return sum(thread.is_alive() for thread in self._left)

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set; ends within a bound then.

        Raises:
            WatchesLost: kopf did not end `MAX_LEFT` times.
        """
        if stop.is_set():
            return
        stopping = asyncio.create_task(stop.wait(), name="stop watches")
        try:
            await self._watch(stopping)
        finally:
            stopping.cancel()

    async def _watch(self, stopping: asyncio.Task[Any]) -> None:
        failures, begun = 0, False
        while True:
            began = time.monotonic()
            ended = await self._once(stopping, again=begun)
            begun = True
            if stopping.done():
                return
            failures = 1 if time.monotonic() - began >= self._pauses.steady_s else failures + 1
            pause = self._pauses.backoff_s[min(failures, len(self._pauses.backoff_s)) - 1]
            self._office.metrics.errors.labels(kind="watch").inc()
            log.error("the watches ended: %s; they begin anew in %g s, what is kept stays guarded", ended, pause)
            await asyncio.wait({stopping}, timeout=pause)
            if stopping.done():
                return

    async def _once(self, stopping: asyncio.Task[Any], *, again: bool) -> str:
        """One life of kopf; why it ended."""
        watch = _Watch(self._started_anew if again else self.ready.set, self._pauses.cancel_s)
        thread = threading.Thread(target=watch.main, args=(self._begin,), name="watches", daemon=True)
        thread.start()
        ending = asyncio.create_task(watch.ending.wait())
        ended = asyncio.create_task(watch.ended.wait())
        try:
            await asyncio.wait({stopping, ending, ended}, return_when=asyncio.FIRST_COMPLETED)
            watch.stop()
            await asyncio.wait({ended}, timeout=self._pauses.stop_s)
        finally:
            watch.stop()  # also where this was cancelled
            watch.close()
            ending.cancel()
            ended.cancel()
        if not watch.ended.is_set():
            self._left.append(thread)
            if self.left >= MAX_LEFT and not stopping.done():
                raise WatchesLost(
                    f"{self.left} watches that ended by themselves did not stop; a new process begins anew"
                )
            return f"kopf did not stop within {self._pauses.stop_s:g} s"
        return watch.outcome

    def _started_anew(self) -> None:
        log.warning("the watches began anew; looking at everything, for what happened meanwhile")
        self.ready.set()
        self._keepers.look_again()

    async def _begin(self, watch: _Watch, ready: asyncio.Event, stop: asyncio.Event) -> None:
        """In kopf's thread."""
        registry, options = kopf.OperatorRegistry(), settings()
        options.scanning.disabled = bool(self._namespaces)  # then no rights beyond those namespaces are needed
        register(registry, self._keepers, self._office, tell=watch.tell, ending=watch.begin_to_end)
        await self._operate(
            registry=registry,
            settings=options,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=tuple(self._namespaces),
            ready_flag=ready,
            stop_flag=stop,
        )


class _Watch:
    """One life of kopf. All but `main` and `tell` belongs to the loop that made it."""

    def __init__(self, started: Callable[[], None], cancel_s: float) -> None:
        self._home = asyncio.get_running_loop()
        self._started = started
        self._cancel_s = cancel_s
        self._closed = False
        self._stopped = False
        self._stop_there: Callable[[], object] | None = None
        self.ending = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcome = ""

    def stop(self) -> None:
        """Ask kopf to end."""
        self._stopped = True
        if self._stop_there is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._stop_there()

    def close(self) -> None:
        """Hear nothing more of it."""
        self._closed = True

    def tell(self, receive: Callable[..., object], *arguments: Any) -> None:
        """Have `receive` called in the home loop; from kopf's thread."""
        if not self._closed:
            # In an empty context: kopf's holds the event, and what begins there would keep it.
            with suppress(RuntimeError):  # the home loop has ended
                self._home.call_soon_threadsafe(self._hear, receive, arguments, context=Context())

    def begin_to_end(self) -> None:
        """kopf stops, for whatever reason; from its thread."""
        self.tell(self.ending.set)

    def main(self, begin: Callable[[_Watch, asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]) -> None:
        """The thread."""
        outcome = "kopf stopped"
        try:
            asyncio.run(self._operate(begin))
        except BaseException as error:
            log.debug("kopf ended", exc_info=True)
            outcome = f"{type(error).__name__}: {error}"
        finally:
            self.tell(self._end, outcome)

    async def _operate(
        self, begin: Callable[[_Watch, asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
    ) -> None:
        ready, stop, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        operating = asyncio.create_task(begin(self, ready, stop))
        announcing = asyncio.create_task(self._announce(ready))
        noticing = asyncio.create_task(self._notice(ready))

        def end() -> None:
            stop.set()
            loop.call_later(self._cancel_s, operating.cancel)

        self.tell(self._connect, lambda: loop.call_soon_threadsafe(end))
        try:
            await operating
        finally:
            announcing.cancel()
            noticing.cancel()

    async def _announce(self, ready: asyncio.Event) -> None:
        await ready.wait()
        self.tell(self._started)

    async def _notice(self, ready: asyncio.Event) -> None:
        """kopf ends with the first of its tasks; what it does then may hang before it says so."""
        await ready.wait()
        tasks = [task for task in asyncio.all_tasks() if task.get_name() in ROOTS]
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.begin_to_end()

    def _connect(self, stop_there: Callable[[], object]) -> None:
        self._stop_there = stop_there
        if self._stopped:
            self.stop()

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.ended.set()

    def _hear(self, receive: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if not self._closed:
            receive(*arguments)
