"""Leader election by a Lease, so that several operators may run and one decides.

Like the ecosystem's own: a lease counts as held until its record has not changed for its duration by *our* monotonic
clock; two machines' clocks are never compared. Writes carry the resourceVersion that was read, so of two claims one
fails. A leader that cannot renew in time must stop at once: `hold` returns, and whoever runs it ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from ullage_operator.errors import ClusterError
from ullage_operator.fields import moment
from ullage_operator.kube import Cluster, Object

LEASE_S = 15
"""Seconds after its last renewal for which a lease keeps others away."""
RENEW_S = 2.0
GIVE_UP_S = 10.0
"""Seconds without a renewal after which a leader stops: well before others may begin."""

log = logging.getLogger(__name__)


class Elector:
    """One candidate."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._wall = wall
        self._monotonic = monotonic
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self.leading = False

    async def acquire(self, *, every_s: float = RENEW_S) -> None:
        """Return once this candidate leads."""
        while not await self.attempt():  # noqa: ASYNC110  the lease is on another machine
            await asyncio.sleep(every_s)

    async def hold(self, *, every_s: float = RENEW_S) -> None:
        """Renew; returns when the lead is lost."""
        renewed = self._monotonic()
        while self._monotonic() - renewed < GIVE_UP_S:
            await asyncio.sleep(every_s)
            began = self._monotonic()
            if await self.attempt():
                renewed = began
            elif self._seen is not None and self._seen[0] not in (self._identity, "", None):
                break
        self.leading = False

    async def attempt(self) -> bool:
        """Claim or renew once; whether this candidate leads now. An API that fails means no."""
        try:
            self.leading = await self._claim()
        except ClusterError as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return False
        return self.leading

    async def release(self) -> None:
        """Give the lead up, so that the next need not wait."""
        if not self.leading:
            return
        self.leading = False
        try:
            await self._cluster.patch("Lease", self._namespace, self._name, {"spec": {"holderIdentity": ""}})
        except ClusterError as error:
            log.warning("lease %s/%s not released: %s", self._namespace, self._name, error)

    async def _claim(self) -> bool:
        lease = await self._cluster.get("Lease", self._namespace, self._name)
        if lease is None:
            return await self._write(None, {"holderIdentity": self._identity, "leaseTransitions": 0})
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder not in (self._identity, "", None) and not self._lapsed(spec):
            return False
        transitions = spec.get("leaseTransitions") or 0
        taken = holder != self._identity
        return await self._write(
            lease, {"holderIdentity": self._identity, "leaseTransitions": transitions + (1 if taken else 0)}
        )

    def _lapsed(self, spec: Object) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen:
            self._seen, self._seen_at = record, self._monotonic()
        return self._monotonic() - self._seen_at >= (spec.get("leaseDurationSeconds") or LEASE_S)

    async def _write(self, lease: Object | None, spec: Object) -> bool:
        stamp = moment(self._wall()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**spec, "renewTime": stamp, "leaseDurationSeconds": LEASE_S}
        if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
            spec["acquireTime"] = stamp
        metadata = {"name": self._name, "namespace": self._namespace}
        try:
            if lease is None:
                body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
                await self._cluster.create(body)
            else:
                version = lease["metadata"]["resourceVersion"]
                body = {"metadata": {"resourceVersion": version}, "spec": spec}
                await self._cluster.patch("Lease", self._namespace, self._name, body)
        except ClusterError as error:
            if error.status == 409:
                return False
            raise
        self._seen = None
        return True
