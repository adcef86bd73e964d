"""Bring a service's children to what its spec says. One idempotent pass; safe to repeat at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage_operator.certificates import Credentials, issue, server_name, valid
from ullage_operator.desired import (
    Features,
    Images,
    covers,
    credentials_of,
    desired_objects,
    secret_name,
    workload_kind,
)
from ullage_operator.errors import NameTaken, NotServed
from ullage_operator.kube import Cluster, Object
from ullage_operator.model import InferenceService
from ullage_operator.stock import Stock


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What exists after a pass."""

    credentials: Credentials | None
    """None only where a suspended service has no valid ones."""
    deployment: Object | None
    """The workload: generations, number wanted, counts."""
    versions: frozenset[tuple[str | None, str | None]] = frozenset()
    """UID and resource version of each child: an event about one of these is no news."""


async def reconcile(
    service: InferenceService,
    *,
    cluster: Cluster,
    images: Images,
    features: Features,
    clock: Callable[[], float],
    stock: Stock | None = None,
) -> Reconciled:
    """Apply all children that are not as they should be, and look at what the workload is now.

    Valid credentials are kept. Of a suspended service nothing is written. What is in `stock` is not asked for.

    Raises:
        NameTaken: an object of that name belongs to someone else; nothing was written.
        NotServed: the cluster lacks a kind that the spec needs; nothing was written.
        ClusterError: the API refused or did not answer; what was written so far stays.
    """
    name, namespace = service.metadata.name, service.metadata.namespace

    async def present(kind: str, name: str, version: str = "") -> Object | None:
        found = stock.take(kind, namespace, name) if stock else None
        return found or await cluster.get(kind, namespace, name, version=version)

    secret = await present("Secret", secret_name(service))
    stored = credentials_of(secret) if secret else None
    dns_name = server_name(name, namespace)
    usable = stored is not None and valid(stored, dns_name, now=clock())
    if service.spec.suspend:
        workload = await present(workload_kind(service), name)
        return Reconciled(credentials=stored if usable else None, deployment=_counts(workload))
    if workload_kind(service) == "LeaderWorkerSet" and not features.leader_worker_set:
        raise NotServed(
            f"engine.nodes: {service.spec.engine.nodes} needs the LeaderWorkerSet API, which this cluster lacks;"
            " install it or set 1"
        )
    credentials = stored if stored and usable else issue(dns_name, now=clock(), previous=stored)
    objects = desired_objects(service, images=images, credentials=credentials, features=features)
    existing = [secret]
    existing += [await present(obj["kind"], obj["metadata"]["name"], obj["apiVersion"]) for obj in objects[1:]]
    for wanted, found in zip(objects, existing, strict=True):
        _require_ours(service, wanted, found)
    applied = [
        found if found is not None and covers(found, wanted) else await cluster.apply(wanted)
        for wanted, found in zip(objects, existing, strict=True)
    ]
    versions = frozenset((obj["metadata"].get("uid"), obj["metadata"].get("resourceVersion")) for obj in applied)
    return Reconciled(credentials=credentials, deployment=_counts(applied[2]), versions=versions)


def _counts(workload: Object | None) -> Object | None:
    """Of a workload what its service's status is made from: thousands are kept."""
    if workload is None:
        return None
    return {
        "metadata": {"generation": workload["metadata"].get("generation", 0)},
        "spec": {"replicas": workload.get("spec", {}).get("replicas", 1)},
        "status": {k: v for k, v in (workload.get("status") or {}).items() if isinstance(v, int)},
    }


def _require_ours(service: InferenceService, wanted: Object, existing: Object | None) -> None:
    if existing is None:
        return
    owners = existing["metadata"].get("ownerReferences") or []
    if not any(owner.get("uid") == service.metadata.uid for owner in owners):
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        raise NameTaken(f"{kind}/{name} exists and is not of this service; delete it or rename the service")
