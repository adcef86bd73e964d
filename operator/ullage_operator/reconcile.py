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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What exists after a pass."""

    credentials: Credentials | None
    """None only where a suspended service has no valid ones."""
    deployment: Object | None


async def reconcile(
    service: InferenceService, *, cluster: Cluster, images: Images, features: Features, clock: Callable[[], float]
) -> Reconciled:
    """Apply all children that are not as they should be, and look at what the workload is now.

    Valid credentials are kept. Of a suspended service nothing is written.

    Raises:
        NameTaken: an object of that name belongs to someone else; nothing was written.
        NotServed: the cluster lacks a kind that the spec needs; nothing was written.
        ClusterError: the API refused or did not answer; what was written so far stays.
    """
    name, namespace = service.metadata.name, service.metadata.namespace
    secret = await cluster.get("Secret", namespace, secret_name(service))
    stored = credentials_of(secret) if secret else None
    dns_name = server_name(name, namespace)
    usable = stored is not None and valid(stored, dns_name, now=clock())
    if service.spec.suspend:
        deployment = await cluster.get(workload_kind(service), namespace, name)
        return Reconciled(credentials=stored if usable else None, deployment=deployment)
    if workload_kind(service) == "LeaderWorkerSet" and not features.leader_worker_set:
        raise NotServed(
            f"engine.nodes: {service.spec.engine.nodes} needs the LeaderWorkerSet API, which this cluster lacks;"
            " install it or set 1"
        )
    credentials = stored if stored and usable else issue(dns_name, now=clock(), previous=stored)
    objects = desired_objects(service, images=images, credentials=credentials, features=features)
    existing = [
        await cluster.get(obj["kind"], namespace, obj["metadata"]["name"], version=obj["apiVersion"]) for obj in objects
    ]
    for wanted, found in zip(objects, existing, strict=True):
        _require_ours(service, wanted, found)
    applied = [
        found if found is not None and covers(found, wanted) else await cluster.apply(wanted)
        for wanted, found in zip(objects, existing, strict=True)
    ]
    return Reconciled(credentials=credentials, deployment=applied[2])


def _require_ours(service: InferenceService, wanted: Object, existing: Object | None) -> None:
    if existing is None:
        return
    owners = existing["metadata"].get("ownerReferences") or []
    if not any(owner.get("uid") == service.metadata.uid for owner in owners):
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        raise NameTaken(f"{kind}/{name} exists and is not of this service; delete it or rename the service")
