"""From pods to what is kept of them: the agent to call, and the pod as decisions see it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ullage_operator.book import service_of
from ullage_operator.certificates import server_name
from ullage_operator.desired import ACTION_PORT_NAME, AGENT_CONTAINER
from ullage_operator.fleet import ENDED, Pod, read_pod
from ullage_operator.observation import AgentTarget

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownPod:
    """What is kept of a pod."""

    pod: Pod | None
    """None: it has ended."""
    agent: AgentTarget | None
    """None: its agent cannot be called (yet, or any more)."""


def known_pod(obj: Object) -> KnownPod:
    """Read a pod that is labelled with its service."""
    service = service_of(obj)
    name = "" if service is None else server_name(service.name, service.namespace)
    return KnownPod(read_pod(obj), read_target(obj, server_name=name))


def agent_targets(targets: Iterable[AgentTarget | None]) -> list[AgentTarget]:
    """Agents that can be called now, in the order of their pods' names."""
    return sorted((target for target in targets if target is not None), key=lambda t: (t.pod, t.uid))


def read_target(pod: Object, *, server_name: str) -> AgentTarget | None:
    """The agent in a pod; None without an address yet, on its way out, or ended."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    address, port = status.get("podIP"), _action_port(pod)
    ended = status.get("phase") in ENDED
    if not address or port is None or ended or metadata.get("deletionTimestamp"):
        return None
    host = f"[{address}]" if ":" in address else address
    return AgentTarget(pod=metadata["name"], uid=metadata["uid"], url=f"https://{host}:{port}", server_name=server_name)


def _action_port(pod: Object) -> int | None:
    """The port that this very pod was made with: it may be older than the service's present spec."""
    for container in pod.get("spec", {}).get("containers") or []:
        if container.get("name") == AGENT_CONTAINER:
            for port in container.get("ports") or []:
                if port.get("name") == ACTION_PORT_NAME:
                    return int(port["containerPort"])
    return None
