"""From pods to the agents in them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ullage_operator.desired import ACTION_PORT_NAME, AGENT_CONTAINER
from ullage_operator.observation import AgentTarget

Object = dict[str, Any]


def agent_targets(pods: Iterable[Object], *, server_name: str) -> list[AgentTarget]:
    """Agents that can be called now, in the order of their pods' names.

    Left out: pods without an address yet, pods on their way out, pods that have ended.
    """
    found = (_target(pod, server_name) for pod in pods)
    return sorted((target for target in found if target is not None), key=lambda t: (t.pod, t.uid))


def _target(pod: Object, server_name: str) -> AgentTarget | None:
    metadata, status = pod["metadata"], pod.get("status") or {}
    address, port = status.get("podIP"), _action_port(pod)
    ended = status.get("phase") in ("Succeeded", "Failed")
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
