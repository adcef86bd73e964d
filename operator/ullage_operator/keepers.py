"""Which services are kept: begins a keeper for each that is seen, wakes it when something of its changes.

Knows nothing of kopf: `handlers` feeds it with events, `patrol` with lists, because a watch can miss things.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any

from ullage_operator.book import ServiceKey, service_of
from ullage_operator.discovery import discover
from ullage_operator.errors import ClusterError
from ullage_operator.keeper import Keeper
from ullage_operator.office import Office
from ullage_operator.receiver import Told

PATROL_S = 60.0
RESYNC_S = 300.0
"""Seconds between two looks at everything: repairs what a lost watch event hid, and children that are not watched."""
SPREAD_S = 30.0
"""Seconds over which services are reconciled after such a look, so that they do not all come at once."""
STUCK_S = 300.0
"""A round that takes longer than all its calls together may take has hung."""

log = logging.getLogger(__name__)


class Keepers:
    """The tasks that keep services, one for each."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._closed = False
        self._keepers: dict[ServiceKey, Keeper] = {}
        self._tasks: dict[ServiceKey, asyncio.Task[None]] = {}
        self._generations: dict[ServiceKey, tuple[str, int]] = {}
        self._missed = asyncio.Event()

    def service_seen(self, event_type: str | None, obj: dict[str, Any]) -> None:
        """An InferenceService was listed, created, changed or deleted."""
        metadata = obj["metadata"]
        key = ServiceKey(metadata["namespace"], metadata["name"])
        version = (metadata["uid"], metadata.get("generation", 0))
        ending = event_type == "DELETED" or metadata.get("deletionTimestamp")
        if self._generations.get(key) == version and key in self._keepers and not ending:
            return  # our own status
        self._generations[key] = version
        if key in self._keepers:
            self._keepers[key].wake(changed=True)
        elif not ending and not self._closed:
            self._begin(key, obj)

    def child_seen(self, event_type: str | None, obj: dict[str, Any]) -> None:
        """A child of a service was listed, created, changed or deleted."""
        self._office.stock.changed(obj)
        keeper = self._keepers.get(key) if (key := service_of(obj)) else None
        if keeper is not None and (event_type == "DELETED" or not keeper.knows(obj)):
            keeper.wake()

    async def look(self, namespaces: Sequence[str]) -> bool:
        """List everything of all services at once; False when that failed, and each keeper must ask for its own."""
        office = self._office
        try:
            await office.stock.fill(
                office.cluster, namespaces, features=office.features, pods=office.pods, records=office.records
            )
        except ClusterError as error:
            office.metrics.errors.labels(kind="cluster").inc()
            log.warning("not everything was listed: %s", error)
            return False
        return True

    def look_again(self) -> None:
        """Events were missed: the patrol looks at everything at once, not only when its time has come."""
        self._missed.set()

    def tell(self, told: Told) -> bool:
        """Take an alert in and have its service looked at soon; False when no such service is kept."""
        kept = told.service in self._keepers
        kind = ("firing" if told.firing else "resolved") if kept else "ignored"
        self._office.metrics.alerts.labels(kind=kind).inc()
        if kept and told.firing:
            self._office.alerts.fire(told.service, told.alert)
        elif kept:
            self._office.alerts.resolve(told.service, told.alert.fingerprint)
        return kept

    @property
    def healthy(self) -> bool:
        """Whether every service's rounds come to an end: a stuck one is a dead guard."""
        return all(keeper.round_seconds < STUCK_S for keeper in self._keepers.values())

    async def patrol(self, namespaces: Sequence[str], *, every_s: float = PATROL_S, resync_s: float = RESYNC_S) -> None:
        """For ever: list all services now and then, and begin to keep those that no event told of; now and then look
        at everything else, for the first time at the first round, because the watches began after the first look."""
        looked = float("-inf")
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._missed.wait()
            missed = self._missed.is_set()
            self._missed.clear()
            try:
                await self._look_at_features()
                scopes: Sequence[str | None] = namespaces or [None]
                for namespace in scopes:
                    await self._list_services(namespace)
                if missed or time.monotonic() - looked >= resync_s:
                    # what was missed may go on being missed until the watches have begun: the next round looks again
                    done = await self._resync(namespaces)
                    looked = float("-inf") if missed else time.monotonic() if done else looked
            except Exception:  # one broken round must not end the patrol
                self._office.metrics.errors.labels(kind="unexpected").inc()
                log.exception("unexpected failure of the patrol; trying again")

    async def _list_services(self, namespace: str | None) -> None:
        try:
            services = await self._office.cluster.list("InferenceService", namespace)
        except ClusterError as error:
            self._office.metrics.errors.labels(kind="cluster").inc()
            log.warning("services were not listed: %s", error)
            return
        for obj in services:
            self.service_seen(None, obj)

    async def _resync(self, namespaces: Sequence[str]) -> bool:
        keys = list(self._keepers)
        if not await self.look(namespaces):
            return False  # a thousand single questions would not help a server that does not answer
        for key in keys:
            if key in self._keepers:
                self._keepers[key].wake()
            await asyncio.sleep(SPREAD_S / len(keys))
        return True

    async def _look_at_features(self) -> None:
        try:
            self._office.features = await discover(self._office.cluster)
        except ClusterError as error:
            log.warning("optional kinds were not looked up: %s", error)

    async def close(self) -> None:
        """End all keepers and wait for them; what they had begun is in their records."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: ServiceKey, seen: dict[str, Any] | None = None) -> None:
        keeper = Keeper(key, self._office, seen=seen)
        # In a context of its own: the caller's holds the event that brought us here, for as long as the task lives.
        task = asyncio.create_task(keeper.run(), name=f"keeper {key}", context=Context())
        self._keepers[key], self._tasks[key] = keeper, task
        task.add_done_callback(lambda _: self._ended(key))
        self._office.metrics.services.set(len(self._keepers))

    def _ended(self, key: ServiceKey) -> None:
        del self._tasks[key]
        again = self._keepers.pop(key).pending
        self._generations.pop(key, None)
        self._office.pods.forget(key)
        self._office.records.forget(key)
        self._office.budget.forget(key)
        self._office.alerts.forget(key)
        self._office.pace.forget(key)
        self._office.metrics.forget(key)
        self._office.metrics.services.set(len(self._keepers))
        if again and not self._closed:
            self._begin(key)  # a service of that name came back while the keeper was leaving
