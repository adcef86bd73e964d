"""Keeps one InferenceService: reconciles when woken, sweeps its agents all the time, writes status on change.

A keeper is an ordinary task without a finalizer on the object: children and records go with their owner through
garbage collection, so a service can be deleted when its agents, or the operator itself, are gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from ullage_operator.alerts import AlertBoard
from ullage_operator.book import Book, ServiceKey
from ullage_operator.budget import Budget
from ullage_operator.certificates import Credentials, client_context, server_name
from ullage_operator.desired import Features, Images
from ullage_operator.errors import Blocked, ClusterError, ManifestError
from ullage_operator.events import decision_event, event
from ullage_operator.fleet import Fleet, fleet_of
from ullage_operator.gather import AgentClient
from ullage_operator.kube import Cluster, Object
from ullage_operator.logs import Named
from ullage_operator.manifest import read_service
from ullage_operator.metrics import Metrics
from ullage_operator.model import InferenceService, ServiceStatus
from ullage_operator.observation import Observation
from ullage_operator.policy import Decision
from ullage_operator.reconcile import Reconciled, reconcile
from ullage_operator.records import ClusterRecords
from ullage_operator.remediation import SERVICE_LABEL
from ullage_operator.scaler import ClusterScaler
from ullage_operator.status import invalid_status, merge_body, observed_status
from ullage_operator.sweep import Sweeper, SweepResult
from ullage_operator.targets import agent_targets

RESYNC_S = 300.0
"""Seconds after which everything is reconciled without being woken: repairs what a lost watch event hid, and children
that are not watched. Each service's turn comes up to a fifth earlier, so that they do not all come at once."""
BLOCKED_RESYNC_S = 5.0
"""The same while somebody else's object stands in the way: its removal wakes nobody."""
RECONCILES = 8
"""Services reconciled at once."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits after consecutive failed rounds."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Office:
    """What all keepers share. `session` and `cluster` belong to whoever made them."""

    cluster: Cluster
    session: aiohttp.ClientSession
    images: Images
    features: Features
    metrics: Metrics
    clock: Callable[[], float]
    limiter: asyncio.Semaphore
    sweep_seconds: float
    reconciling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECONCILES))
    """Bounds how many services are reconciled at once: a start with thousands must not choke the API server."""
    budget: Budget
    pods: Book = field(default_factory=Book)
    records: Book = field(default_factory=Book)
    alerts: AlertBoard = field(default_factory=AlertBoard)


class Keeper:
    """One service's loop. `run` ends when the service is gone."""

    def __init__(self, key: ServiceKey, office: Office) -> None:
        self._key = key
        self._office = office
        self._posts: set[asyncio.Task[None]] = set()
        self._log = Named(log, str(key))
        self._round_began: float | None = None
        self._woken = asyncio.Event()
        self._woken.set()
        self._reconciled_at = float("-inf")
        self._service: InferenceService | None = None
        self._status: ServiceStatus | None = None
        self._children: Reconciled | None = None
        self._problem: str | None = None
        self._invalid = False
        self._sweeper: Sweeper | None = None
        self._records: ClusterRecords | None = None
        self._last_decision: Decision | None = None
        self._observations: tuple[Observation, ...] = ()

    def wake(self) -> None:
        """Reconcile soon: the service or a child of it changed."""
        self._woken.set()

    @property
    def pending(self) -> bool:
        """Whether it was woken and has not looked yet."""
        return self._woken.is_set()

    @property
    def round_seconds(self) -> float:
        """For how long the present round has been running; 0.0 between two."""
        return 0.0 if self._round_began is None else time.monotonic() - self._round_began

    async def run(self) -> None:
        """Keep the service until it is deleted or this task is cancelled. A failed round is tried again."""
        try:
            await self._rounds()
        finally:
            await asyncio.gather(*self._posts, return_exceptions=True)

    async def _rounds(self) -> None:
        failures = 0
        while True:
            try:
                self._round_began = time.monotonic()
                if not await self._round():
                    return
                failures = 0
            except ClusterError as error:
                failures += 1
                self._office.metrics.errors.labels(kind="cluster").inc()
                self._log.warning("%s", error)
            except Exception:  # noqa: BLE001  one broken round must not end the watch over a service
                failures += 1
                self._office.metrics.errors.labels(kind="unexpected").inc()
                self._log.exception("unexpected failure; trying again")
            self._round_began = None
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        if failures:
            self._woken.set()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])
            return
        try:
            await asyncio.wait_for(self._woken.wait(), self._office.sweep_seconds)
        except TimeoutError:
            return

    async def _round(self) -> bool:
        """One pass; False when the service is gone."""
        resync = BLOCKED_RESYNC_S if self._problem else RESYNC_S
        due = self._woken.is_set() or time.monotonic() - self._reconciled_at >= resync
        if due:
            self._woken.clear()
            async with self._office.reconciling:
                if not await self._refresh():
                    return False
            earlier = 0.0 if self._problem else random.uniform(0, RESYNC_S / 5)  # noqa: S311  no secret
            self._reconciled_at = time.monotonic() - earlier
        sweep = await self._sweep()
        if not self._invalid:
            await self._write_status(sweep)
        return True

    async def _refresh(self) -> bool:
        """Read the service anew and bring its children to it; False when it is gone."""
        obj = await self._office.cluster.get("InferenceService", *self._key)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return False
        self._status = _stored_status(obj)
        try:
            service = read_service(_without_status(obj), stored=True)
        except ManifestError as error:
            await self._refuse(obj, str(error))
            return True
        selector = f"{SERVICE_LABEL}={self._key.name}"
        self._office.pods.replace(self._key, await self._office.cluster.list("Pod", self._key.namespace, selector))
        await self._reconcile(service)
        return True

    async def _reconcile(self, service: InferenceService) -> None:
        self._invalid = False
        before = self._children.credentials if self._children else None
        problem = None
        try:
            await self._rank(service)
            began = time.monotonic()
            self._children = await reconcile(
                service,
                cluster=self._office.cluster,
                images=self._office.images,
                features=self._office.features,
                clock=self._office.clock,
            )
            self._office.metrics.reconcile_seconds.observe(time.monotonic() - began)
        except Blocked as error:
            problem = str(error)
            if problem != self._problem:
                await self._tell(service, type(error).__name__, problem)
        self._problem = problem
        credentials = self._children.credentials if self._children else None
        if credentials != before or service != self._service or self._sweeper is None:
            self._sweeper = self._new_sweeper(service, credentials)
        self._service = service

    async def _refuse(self, obj: Object, problem: str) -> None:
        """The spec cannot be used: say so, leave what runs alone, and go on guarding it under the last good spec."""
        self._invalid = True
        self._office.metrics.errors.labels(kind="invalid").inc()
        generation = obj["metadata"].get("generation")
        status = invalid_status(self._status, generation=generation, problem=problem, now=self._office.clock())
        await self._write(status)

    def _new_sweeper(self, service: InferenceService, credentials: Credentials | None) -> Sweeper | None:
        if credentials is None:
            return None
        office = self._office
        return Sweeper(
            service=service,
            agents=AgentClient(office.session, credentials.token, client_context(credentials)),
            records=ClusterRecords(service, cluster=office.cluster, book=office.records, clock=office.clock),
            clock=office.clock,
            limiter=office.limiter,
            scaler=ClusterScaler(self._key, office.cluster),
            budget=office.budget,
            watched=self._sweeper.watch if self._sweeper else None,
        )

    async def _sweep(self) -> SweepResult | None:
        if self._sweeper is None:
            return None
        name = server_name(self._key.name, self._key.namespace)
        targets = agent_targets(self._office.pods.of(self._key), server_name=name)
        with self._office.metrics.sweep_seconds.time():
            result = await self._sweeper.tick(
                targets, fleet=self._fleet, alerts=lambda: self._office.alerts.of(self._key, now=self._office.clock())
            )
        self._observations = result.observations
        limit = self._service.stale_after_s if self._service else 0.0
        now = self._office.clock()
        stale = sum(not o.fresh(now=now, stale_after_s=limit) for o in result.observations)
        self._office.metrics.count(self._key, result, stale=stale)
        self._office.metrics.in_flight.set(self._office.budget.in_flight)
        await self._tell_decision(result.decision)
        return result

    def _fleet(self) -> Fleet:
        return fleet_of(self._office.pods.of(self._key))

    async def _rank(self, service: InferenceService) -> None:
        """Before fewer engines are wanted than there are: say whose loss costs the least."""
        staying = self._fleet().staying
        if not service.spec.suspend and len(staying) > service.spec.replicas.effective:
            await ClusterScaler(self._key, self._office.cluster).rank(staying, self._observations)

    async def _tell_decision(self, decision: Decision) -> None:
        previous, self._last_decision = self._last_decision, decision
        news = decision.verdict != "Hold" or previous is None or previous.reason != decision.reason
        quiet = decision.verdict == "Hold" and previous is None
        if news and not quiet and self._service is not None:
            told = decision_event(self._service, decision, now=self._office.clock())
            self._log.info("%s: %s: %s", decision.verdict, decision.reason.value, decision.message)
            self._post_soon(told)

    async def _tell(self, service: InferenceService, reason: str, message: str) -> None:
        self._log.warning("%s: %s", reason, message)
        self._post_soon(event(service, kind="Warning", reason=reason, message=message, now=self._office.clock()))

    def _post_soon(self, told: Object) -> None:
        """Events are news: the next sweep does not wait for them."""
        task = asyncio.create_task(self._post(told))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _post(self, told: Object) -> None:
        try:
            await self._office.cluster.create(told)
        except ClusterError as error:  # an Event is news, not a record; the sweep goes on
            self._office.metrics.errors.labels(kind="cluster").inc()
            self._log.warning("event not written: %s", error)

    async def _write_status(self, sweep: SweepResult | None) -> None:
        if self._service is None:
            return
        status = observed_status(
            self._service,
            previous=self._status,
            deployment=self._children.deployment if self._children else None,
            sweep=sweep,
            problem=self._problem,
            now=self._office.clock(),
        )
        await self._write(status)

    async def _write(self, status: ServiceStatus) -> None:
        if status == self._status:
            return
        await self._office.cluster.write_status("InferenceService", *self._key, merge_body(status))
        self._status = status


def _stored_status(obj: Object) -> ServiceStatus | None:
    return ServiceStatus.read(obj["status"], lenient=True) if obj.get("status") else None


def _without_status(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key != "status"}
