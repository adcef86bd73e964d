"""Keeps one InferenceService: reconciles when woken, sweeps its agents all the time, writes status on change.

A keeper is an ordinary task without a finalizer on the object: children and records go with their owner through
garbage collection, so a service can be deleted when its agents, or the operator itself, are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ullage_operator.book import ServiceKey
from ullage_operator.certificates import Credentials, client_context
from ullage_operator.errors import Blocked, ClusterError, ManifestError
from ullage_operator.fleet import Fleet, fleet_of
from ullage_operator.gather import AgentClient
from ullage_operator.herald import Herald
from ullage_operator.kube import Object
from ullage_operator.manifest import read_service
from ullage_operator.model import InferenceService, ServiceStatus
from ullage_operator.observation import Observation
from ullage_operator.office import Office
from ullage_operator.pace import astir
from ullage_operator.reconcile import Reconciled, reconcile
from ullage_operator.records import ClusterRecords
from ullage_operator.remediation import SERVICE_LABEL
from ullage_operator.scaler import ClusterScaler
from ullage_operator.status import invalid_status, merge_body, observed_status
from ullage_operator.sweep import Sweeper, SweepResult
from ullage_operator.targets import agent_targets

BLOCKED_RESYNC_S = 5.0
"""Seconds after which it is tried again while somebody else's object stands in the way: its removal wakes nobody."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits after consecutive failed rounds."""

log = logging.getLogger(__name__)


class Keeper:
    """One service's loop. `run` ends when the service is gone."""

    def __init__(self, key: ServiceKey, office: Office, *, seen: Object | None = None) -> None:
        """`seen`: the service as it has just been told of; without it, it is asked for."""
        self._key = key
        self._office = office
        self._seen = seen
        self._herald = Herald(log, str(key), cluster=office.cluster, metrics=office.metrics, clock=office.clock)
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
        self._agents: AgentClient | None = None
        self._observations: tuple[Observation, ...] = ()
        self._astir = False

    def wake(self, *, changed: bool = False) -> None:
        """Reconcile soon: a child of the service changed, or the service itself (`changed`)."""
        self._woken.set()
        if changed:
            self._seen = None

    def knows(self, obj: Object) -> bool:
        """Whether a child was seen in this very version by the last pass."""
        metadata = obj["metadata"]
        version = metadata.get("uid"), metadata.get("resourceVersion")
        return self._children is not None and version in self._children.versions

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
            await self._herald.close()

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
                self._herald.log.warning("%s", error)
            except Exception:  # one broken round must not end the watch over a service
                failures += 1
                self._office.metrics.errors.labels(kind="unexpected").inc()
                self._herald.log.exception("unexpected failure; trying again")
            spent, self._round_began = self.round_seconds, None
            await self._pause(failures, spent)

    async def _pause(self, failures: int, spent_s: float) -> None:
        if failures:
            self._woken.set()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])
            return
        try:
            pause = self._office.pace.pause(self._key, astir=self._astir, spent_s=spent_s)
            async with asyncio.timeout(pause):  # wait_for forgets a cancellation that comes together with the event
                await self._woken.wait()
        except TimeoutError:
            return

    async def _round(self) -> bool:
        """One pass; False when the service is gone."""
        blocked = self._problem is not None and time.monotonic() - self._reconciled_at >= BLOCKED_RESYNC_S
        if self._woken.is_set() or blocked:
            self._woken.clear()
            async with self._office.reconciling:
                if not await self._refresh():
                    return False
            self._reconciled_at = time.monotonic()
        sweep = await self._sweep()
        if not self._invalid:
            await self._write_status(sweep)
        return True

    async def _refresh(self) -> bool:
        """Read the service anew and bring its children to it; False when it is gone."""
        obj = self._seen or await self._office.cluster.get("InferenceService", *self._key)
        self._seen = None
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return False
        self._status = _stored_status(obj)
        try:
            service = read_service(_without_status(obj), stored=True)
        except ManifestError as error:
            await self._refuse(obj, str(error))
            return True
        if not self._office.stock.looked:
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
                stock=self._office.stock,
            )
            self._office.metrics.reconcile_seconds.observe(time.monotonic() - began)
        except Blocked as error:
            problem = str(error)
            if problem != self._problem:
                self._herald.trouble(service, type(error).__name__, problem)
        self._problem = problem
        credentials = self._children.credentials if self._children else None
        renewed = credentials != before or self._agents is None
        if renewed:
            self._agents = self._new_client(credentials)
        if renewed or not _same(service, self._service):
            self._sweeper = self._new_sweeper(service, self._agents)
        self._service = service

    def _new_client(self, credentials: Credentials | None) -> AgentClient | None:
        if credentials is None:
            return None
        return AgentClient(self._office.session, credentials.token, client_context(credentials))

    async def _refuse(self, obj: Object, problem: str) -> None:
        """The spec cannot be used: say so, leave what runs alone, and go on guarding it under the last good spec."""
        self._invalid = True
        self._office.metrics.errors.labels(kind="invalid").inc()
        generation = obj["metadata"].get("generation")
        status = invalid_status(self._status, generation=generation, problem=problem, now=self._office.clock())
        await self._write(status)

    def _new_sweeper(self, service: InferenceService, agents: AgentClient | None) -> Sweeper | None:
        if agents is None:
            return None
        office = self._office
        return Sweeper(
            service=service,
            agents=agents,
            records=ClusterRecords(service, cluster=office.cluster, book=office.records, listed=office.stock.looked),
            clock=office.clock,
            limiter=office.limiter,
            silent_limiter=office.silent_limiter,
            scaler=ClusterScaler(self._key, office.cluster),
            budget=office.budget,
            watched=self._sweeper.watch if self._sweeper else None,
        )

    async def _sweep(self) -> SweepResult | None:
        if self._sweeper is None:
            return None
        targets = agent_targets(known.agent for known in self._office.pods.of(self._key))
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
        if self._service is not None:
            self._herald.decided(self._service, result.decision)
            self._astir = astir(self._service, result, now=now)
        return result

    def _fleet(self) -> Fleet:
        return fleet_of(known.pod for known in self._office.pods.of(self._key))

    async def _rank(self, service: InferenceService) -> None:
        """Before fewer engines are wanted than there are: say whose loss costs the least."""
        staying = self._fleet().staying
        if not service.spec.suspend and len(staying) > service.spec.replicas.effective:
            await ClusterScaler(self._key, self._office.cluster).rank(staying, self._observations)

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


def _same(service: InferenceService, known: InferenceService | None) -> bool:
    """Whether nothing changed but what we or others wrote into its status and metadata."""
    return known is not None and (service.metadata.uid, service.spec) == (known.metadata.uid, known.spec)
