"""kopf may fail, hang or say things too late: watching begins anew, what is kept stays guarded, a stop is a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kopf import OperatorRegistry, spawn_tasks
from prometheus_client import CollectorRegistry

from ullage_operator import watches as module
from ullage_operator.desired import Features
from ullage_operator.errors import WatchesLost
from ullage_operator.handlers import settings
from ullage_operator.metrics import Metrics
from ullage_operator.watches import ROOTS, Pauses, Watches

PAUSES = Pauses(cancel_s=0.1, stop_s=0.2, backoff_s=(0.01,), steady_s=60.0)


class Kept:
    """In place of the keepers: what they were told, and in which thread."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.threads: set[int] = set()
        self.looks = 0

    def service_seen(self, event_type: str | None, obj: Any) -> None:
        self.seen.append(obj)
        self.threads.add(threading.get_ident())

    def child_seen(self, event_type: str | None, obj: Any) -> None: ...

    def look_again(self) -> None:
        self.looks += 1


class Office:
    """The part of it that watches touch."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.features = Features()
        self.pods = self.records = self

    def observe(self, event_type: str | None, obj: Any) -> None: ...

    @property
    def failures(self) -> float:
        return self.metrics.registry.get_sample_value("ullage_operator_errors_total", {"kind": "watch"}) or 0.0


Life = Callable[["Kopf"], Awaitable[None]]


class Kopf:
    """In place of kopf.operator: lives as it is told to, one life after another, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lives: Life) -> None:
        self._lives = list(lives)
        self.begun = 0
        self.threads: set[int] = set()
        self.tell: Callable[..., None]
        self.ending: Callable[[], None]
        self.stop: asyncio.Event
        self.ready: asyncio.Event
        monkeypatch.setattr(module, "register", self._register)

    def _register(self, registry: Any, keepers: Any, office: Any, *, tell: Any, ending: Any) -> None:
        self.tell, self.ending, self.keepers = tell, ending, keepers

    async def operator(self, *, ready_flag: asyncio.Event, stop_flag: asyncio.Event, **_: Any) -> None:
        self.stop, self.ready = stop_flag, ready_flag
        self.threads.add(threading.get_ident())
        life = self._lives[min(self.begun, len(self._lives) - 1)]
        self.begun += 1
        await life(self)

    def say(self, word: object) -> None:
        self.tell(self.keepers.service_seen, "ADDED", word)


async def working(kopf: Kopf) -> None:
    kopf.ready.set()
    kopf.say(f"life {kopf.begun}")
    await kopf.stop.wait()
    kopf.ending()


async def failing(kopf: Kopf) -> None:
    kopf.ready.set()
    await asyncio.sleep(0.05)  # it has begun to watch
    raise LookupError("404 page not found")


async def cancelled(kopf: Kopf) -> None:
    raise asyncio.CancelledError


async def returning(kopf: Kopf) -> None: ...


async def hanging(kopf: Kopf) -> None:
    """Fails, and then hears neither a stop nor a cancellation; says something much later."""
    kopf.ready.set()
    tell, seen, end = kopf.tell, kopf.keepers.service_seen, time.monotonic() + 1.0
    await asyncio.sleep(0.05)
    kopf.ending()
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    tell(seen, "ADDED", "too late")


@asynccontextmanager
async def watching(kopf: Kopf, kept: Kept, office: Office) -> AsyncIterator[tuple[Watches, asyncio.Event]]:
    stop = asyncio.Event()
    watches = Watches(kept, office, ["prod"], operate=kopf.operator, pauses=PAUSES)  # type: ignore[arg-type]
    task = asyncio.create_task(watches.run(stop))
    try:
        yield watches, stop
    finally:
        stop.set()
        async with asyncio.timeout(30):
            await task


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  another thread's doing
            await asyncio.sleep(0.005)


async def test_events_come_over_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talking(kopf: Kopf) -> None:
        for number in range(1000):
            kopf.say(number)
        await working(kopf)

    kopf, kept, office = Kopf(monkeypatch, talking), Kept(), Office()
    async with watching(kopf, kept, office) as (watches, _):
        await until(watches.ready.is_set)
        await until(lambda: len(kept.seen) == 1001)
        assert kept.seen[:1000] == list(range(1000))
        assert kept.threads == {threading.get_ident()}
        assert threading.get_ident() not in kopf.threads
    assert (kopf.begun, office.failures, kept.looks) == (1, 0, 0)


@pytest.mark.parametrize("life", [failing, cancelled, returning, hanging])
async def test_watching_begins_anew_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    kopf, kept, office = Kopf(monkeypatch, failing, life, life, working), Kept(), Office()
    async with watching(kopf, kept, office) as (watches, _):
        await until(lambda: "life 4" in kept.seen)
        await until(lambda: kept.looks == (3 if life in (failing, hanging) else 1))
        assert watches.ready.is_set()
        assert office.failures == 3
    assert "LookupError: 404 page not found" in caplog.text


async def test_what_a_hung_watch_says_later_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    kopf, kept, office = Kopf(monkeypatch, hanging, working), Kept(), Office()
    async with watching(kopf, kept, office):
        await until(lambda: "life 2" in kept.seen)
        await asyncio.sleep(1.5)
        assert kept.seen == ["life 2"]


async def test_watches_that_hang_again_and_again_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEFT", 2)
    kopf, kept, office = Kopf(monkeypatch, hanging), Kept(), Office()
    watches = Watches(kept, office, (), operate=kopf.operator, pauses=PAUSES)  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        with pytest.raises(WatchesLost, match="2 watches"):
            await watches.run(asyncio.Event())
    await until(lambda: watches.left == 0)  # they end at last


async def test_an_end_that_hangs_before_kopf_says_so_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(kopf: Kopf) -> None:
        root = asyncio.create_task(asyncio.sleep(0.1), name="multidimensional multitasker")
        kopf.ready.set()
        await root
        await kopf.stop.wait()  # nobody else says that it ends

    kopf, kept, office = Kopf(monkeypatch, stuck, working), Kept(), Office()
    async with watching(kopf, kept, office):
        await until(lambda: "life 2" in kept.seen)
        await until(lambda: kept.looks == 1)


async def test_kopf_has_the_tasks_that_are_looked_for() -> None:
    """Of the version that is installed: their names are no promise of its."""
    options = settings()
    options.scanning.disabled = True
    tasks = await spawn_tasks(registry=OperatorRegistry(), settings=options, standalone=True, clusterwide=True)
    try:
        assert {task.get_name() for task in tasks} >= ROOTS
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stop_between_two_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    kopf, kept, office = Kopf(monkeypatch, failing), Kept(), Office()
    stop = asyncio.Event()
    slow = Pauses(stop_s=0.2, backoff_s=(3600.0,), steady_s=60.0)
    watches = Watches(kept, office, (), operate=kopf.operator, pauses=slow)  # type: ignore[arg-type]
    task = asyncio.create_task(watches.run(stop))
    await until(lambda: office.failures == 1)
    stop.set()
    async with asyncio.timeout(30):
        await task
    assert kopf.begun == 1


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_stop_before_kopf_s_loop_has_begun(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    kopf, kept, office = Kopf(monkeypatch, working), Kept(), Office()
    stop = asyncio.Event()
    watches = Watches(kept, office, (), operate=kopf.operator, pauses=Pauses(stop_s=30.0))  # type: ignore[arg-type]
    task = asyncio.create_task(watches.run(stop))
    for _ in range(turns):
        await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(20):
        await task
    assert office.failures == 0
    assert kopf.begun <= 1


async def test_a_watch_that_waits_for_something_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(kopf: Kopf) -> None:
        kopf.ready.set()
        await asyncio.sleep(3600)

    kopf, kept, office, stop = Kopf(monkeypatch, slow), Kept(), Office(), asyncio.Event()
    pauses = Pauses(cancel_s=0.1, stop_s=60.0)
    watches = Watches(kept, office, (), operate=kopf.operator, pauses=pauses)  # type: ignore[arg-type]
    task = asyncio.create_task(watches.run(stop))
    await until(watches.ready.is_set)
    stop.set()
    async with asyncio.timeout(30):
        await task
    assert not watches.left


async def test_a_hung_watch_does_not_hold_up_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(kopf: Kopf) -> None:
        kopf.ready.set()
        await hanging(kopf)

    kopf, kept, office = Kopf(monkeypatch, deaf), Kept(), Office()
    async with watching(kopf, kept, office) as (watches, _):
        await until(watches.ready.is_set)
    assert watches.left


async def test_it_waits_longer_after_failures_in_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kopf, kept, office = Kopf(monkeypatch, failing), Kept(), Office()
    stop = asyncio.Event()
    growing = Pauses(stop_s=0.2, backoff_s=(0.01, 0.02, 0.03), steady_s=60.0)
    watches = Watches(kept, office, (), operate=kopf.operator, pauses=growing)  # type: ignore[arg-type]
    task = asyncio.create_task(watches.run(stop))
    await until(lambda: office.failures >= 4)
    stop.set()
    await task
    waits = [r.getMessage().split("anew in ")[1].split(" s")[0] for r in caplog.records if "anew in" in r.getMessage()]
    assert waits[:4] == ["0.01", "0.02", "0.03", "0.03"]
