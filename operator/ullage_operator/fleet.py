"""The pods of a service as decisions see them. Pure.

Readings come from agents; whether a pod exists, is ready, takes traffic or cannot be scheduled comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Object = dict[str, Any]

TRAFFIC_LABEL = "ullage.dev/traffic"
"""Label that the Service selects beside the service's own; taken to OFF before an engine leaves."""
TRAFFIC_ON, TRAFFIC_OFF = "on", "off"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a ReplicaSet chooses whom to remove: the lowest goes first."""
ENDED = ("Succeeded", "Failed")
"""Phases of a pod that runs no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod that has not ended."""

    name: str
    uid: str
    ready: bool = False
    ready_at: float | None = None
    """Unix seconds since which it is ready, as the API server says."""
    serving: bool = True
    """Whether the Service sends requests to it."""
    leaving: bool = False
    """On its way out."""
    problem: str = ""
    """Why it does not come up, where the cluster says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All pods of a service that have not ended."""

    pods: tuple[Pod, ...] = ()

    @property
    def staying(self) -> tuple[Pod, ...]:
        """Pods that are not on their way out."""
        return tuple(pod for pod in self.pods if not pod.leaving)

    @property
    def ready(self) -> tuple[Pod, ...]:
        """Pods that stay and are ready."""
        return tuple(pod for pod in self.staying if pod.ready)

    @property
    def pending(self) -> tuple[Pod, ...]:
        """Pods that stay and are not ready (yet)."""
        return tuple(pod for pod in self.staying if not pod.ready)

    def pod(self, uid: str) -> Pod | None:
        """The pod of that UID."""
        return next((pod for pod in self.pods if pod.uid == uid), None)


def fleet_of(pods: Iterable[Pod | None]) -> Fleet:
    """Of those that have not ended, in the order of their names."""
    live = (pod for pod in pods if pod is not None)
    return Fleet(pods=tuple(sorted(live, key=lambda pod: (pod.name, pod.uid))))


def read_pod(obj: Object) -> Pod | None:
    """From an object of the API; None for one that has ended."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if status.get("phase") in ENDED:
        return None
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    ready = conditions.get("Ready") or {}
    is_ready = ready.get("status") == "True"
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        ready=is_ready,
        ready_at=_seconds(ready.get("lastTransitionTime")) if is_ready else None,
        serving=(metadata.get("labels") or {}).get(TRAFFIC_LABEL) != TRAFFIC_OFF,
        leaving=bool(metadata.get("deletionTimestamp")),
        problem="" if is_ready else _problem(conditions, status),
    )


def _problem(conditions: dict[str, Any], status: Object) -> str:
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'not scheduled')}: {scheduled.get('message', '')}".rstrip(": ")
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] != "ContainerCreating":
            return f"{container['name']}: {waiting['reason']}"
    return ""


def _seconds(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None
