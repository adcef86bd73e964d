"""The Kubernetes objects that an `InferenceService` stands for. Pure: the same arguments give the same objects.

Non-goals: talking to the API server (`kube`), making certificates (`certificates`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ullage_operator.certificates import Credentials
from ullage_operator.features import LEADER_WORKER_SET, Features
from ullage_operator.fleet import TRAFFIC_LABEL, TRAFFIC_ON
from ullage_operator.model import API_VERSION, InferenceService
from ullage_operator.pods import (
    ACTION_PORT_NAME,
    AGENT_CONTAINER,
    Images,
    pod_labels,
    pod_template,
    secret_name,
    worker_template,
)
from ullage_operator.secret import credentials_of, secret_data
from ullage_operator.surroundings import surroundings

__all__ = [
    "ACTION_PORT_NAME",
    "AGENT_CONTAINER",
    "Features",
    "Images",
    "credentials_of",
    "desired_objects",
    "owner_reference",
    "pod_labels",
    "secret_name",
    "workload_kind",
]

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "ullage-operator"
HASH_ANNOTATION = "ullage.dev/desired"
"""Digest of what was applied: tells a pass that nothing of ours is to be taken away."""


def desired_objects(
    service: InferenceService, *, images: Images, credentials: Credentials, features: Features | None = None
) -> list[dict[str, Any]]:
    """All children, in the order in which to apply them: the workload is the third."""
    known = features or Features()
    children = [_secret(service, credentials), _service(service), _workload(service, images)]
    name = service.metadata.name
    for version, kind, spec in surroundings(service, known):
        child: dict[str, Any] = {
            "apiVersion": version,
            "kind": kind,
            "metadata": _metadata(service, name),
            "spec": spec,
        }
        if version.startswith("monitoring."):
            child["metadata"]["labels"] |= service.spec.monitoring.labels
        children.append(child)
    return [_digested(child) for child in children]


def workload_kind(service: InferenceService) -> str:
    """Kind of the object that runs the engines."""
    return "Deployment" if service.spec.engine.nodes == 1 else "LeaderWorkerSet"


def owner_reference(service: InferenceService) -> dict[str, Any]:
    """Makes an object vanish with its service. Needs the UID that only a stored service has."""
    return {
        "apiVersion": API_VERSION,
        "kind": "InferenceService",
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def covers(existing: Any, wanted: Any) -> bool:
    """Whether an object holds all that is wanted; what others added in objects does not matter.

    The API server leaves empty objects and lists out.
    """
    if isinstance(wanted, dict):
        return isinstance(existing or {}, dict) and all(covers((existing or {}).get(k), v) for k, v in wanted.items())
    if isinstance(wanted, list):
        same = isinstance(existing or [], list) and len(existing or []) == len(wanted)
        return same and all(covers(a, b) for a, b in zip(existing or [], wanted, strict=True))
    return bool(existing == wanted)


def _digested(child: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()[:16]
    child["metadata"]["annotations"] = {HASH_ANNOTATION: digest}
    return child


def _metadata(service: InferenceService, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": {**pod_labels(service), MANAGED_BY_LABEL: MANAGED_BY},
    }
    if service.metadata.uid is not None:
        metadata["ownerReferences"] = [owner_reference(service)]
    return metadata


def _secret(service: InferenceService, credentials: Credentials) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(service, secret_name(service)),
        "type": "Opaque",
        "data": secret_data(credentials),
    }


def _service(service: InferenceService) -> dict[str, Any]:
    ports = {"http": service.spec.engine.port, "metrics": service.spec.agent.metrics_port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, service.metadata.name),
        "spec": {
            "type": "ClusterIP",
            "selector": {**pod_labels(service), TRAFFIC_LABEL: TRAFFIC_ON},
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def _workload(service: InferenceService, images: Images) -> dict[str, Any]:
    return _deployment(service, images) if service.spec.engine.nodes == 1 else _leader_worker_set(service, images)


def _deployment(service: InferenceService, images: Images) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, service.metadata.name),
        "spec": {
            "replicas": service.spec.replicas.effective,
            "selector": {"matchLabels": pod_labels(service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod_template(service, images),
        },
    }


def _leader_worker_set(service: InferenceService, images: Images) -> dict[str, Any]:
    return {
        "apiVersion": LEADER_WORKER_SET,
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(service, service.metadata.name),
        "spec": {
            "replicas": service.spec.replicas.effective,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "leaderWorkerTemplate": {
                "size": service.spec.engine.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod_template(service, images),
                "workerTemplate": worker_template(service, images),
            },
        },
    }
