"""The pod of an engine with its agent: what is ours to inject, and the user's template merged over it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ullage_operator import hooks
from ullage_operator.arguments import AgentFiles, agent_arguments, engine_arguments, engine_command, worker_arguments
from ullage_operator.fleet import TRAFFIC_LABEL, TRAFFIC_ON
from ullage_operator.model import InferenceService, Resources
from ullage_operator.remediation import SERVICE_LABEL
from ullage_operator.strategic import merge

Object = dict[str, Any]

NAME_LABEL = "app.kubernetes.io/name"
SHARING_LABEL = "ullage.dev/gpu-sharing"
GATE_DIR = "/run/ullage-gate"
"""Where the admission gate's module lies beside an engine that loads it as middleware."""
GATE_FILE = "/run/ullage/gate.json"
AGENT_CONTAINER = "agent"
ACTION_PORT_NAME = "actions"

RUN_DIR = "/run/ullage"
ADMIN_SOCKET = f"{RUN_DIR}/admin.sock"
CACHE_DIR = "/var/cache/ullage"
SECRET_DIR = "/etc/ullage/agent"  # noqa: S105  a path, not a secret
USER_ID = 65532
"""User and group of both containers; any number works that is not root."""
GRACE_SECONDS = 120
"""From the beginning of a pod's end to the kill: in-flight answers are finished within it."""
ENDPOINT_SECONDS = 5
"""Wait before draining until the load balancers have dropped the pod."""
END_SECONDS = 15
"""Part of that which the hooks leave for the engine to end in order."""
LOAD_SECONDS = 1800
"""Longest time for a model to load before the engine counts as hung."""
AGENT_DEFAULTS = Resources(requests={"cpu": "20m", "memory": "64Mi"}, limits={"memory": "192Mi"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Container images for services that name none."""

    engine: str
    agent: str


def pod_labels(service: InferenceService) -> dict[str, str]:
    """Labels that select a service's pods; they never change."""
    return {NAME_LABEL: "ullage-engine", SERVICE_LABEL: service.metadata.name}


def secret_name(service: InferenceService) -> str:
    """Name of the Secret with the agents' token and certificate."""
    return f"{service.metadata.name}-agent"


def pod_template(service: InferenceService, images: Images) -> dict[str, Any]:
    """Template of an engine's (first) pod. The labels by which it is found cannot be overridden."""
    sharing = {SHARING_LABEL: "shared"} if service.spec.engine.gpu_sharing == "Shared" else {}
    own = {"metadata": {"labels": {**sharing}}, "spec": _pod(service, images)}
    merged = merge(own, service.spec.pod_template or {})
    labels = {**merged["metadata"].get("labels", {}), **pod_labels(service), TRAFFIC_LABEL: TRAFFIC_ON}
    merged["metadata"]["labels"] = labels
    return dict(merged)


def worker_template(service: InferenceService, images: Images) -> dict[str, Any]:
    """Template of the other pods of an engine on several nodes: the engine alone, and no part of the service."""
    spec = _pod(service, images)
    engine = {k: v for k, v in spec["containers"][0].items() if not k.endswith("Probe") and k != "lifecycle"}
    engine["args"] = [*engine["args"], *worker_arguments(service)]
    mounts = {mount["name"] for mount in engine["volumeMounts"]}
    volumes = [volume for volume in spec["volumes"] if volume["name"] in mounts]
    own = {"metadata": {"labels": {}}, "spec": {**spec, "containers": [engine], "volumes": volumes}}
    merged = dict(merge(own, service.spec.pod_template or {}))
    merged["metadata"]["labels"] |= {NAME_LABEL: "ullage-engine-worker"}
    return merged


def _pod(service: InferenceService, images: Images) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"initContainers": [_gate(service, images)]} if _gated(service) else {}),
        "containers": [_engine(service, images), _agent(service, images)],
        "volumes": [
            *([{"name": "gate", "emptyDir": {}}] if _gated(service) else []),
            {"name": "run", "emptyDir": {"medium": "Memory"}},
            {"name": "cache", "emptyDir": {}},
            {"name": "engine-tmp", "emptyDir": {}},
            {"name": "agent-tmp", "emptyDir": {}},
            {"name": "credentials", "secret": {"secretName": secret_name(service), "defaultMode": 0o440}},
        ],
    }


def _engine(service: InferenceService, images: Images) -> dict[str, Any]:
    engine = service.spec.engine
    arguments = engine_arguments(
        service, host="0.0.0.0", port=engine.port, admin=f"unix:{ADMIN_SOCKET}", cache_dir=CACHE_DIR
    )
    environment = {"HOME": CACHE_DIR, "USER": "ullage", "HF_HOME": f"{CACHE_DIR}/huggingface"}
    if _gated(service):
        environment |= {"PYTHONPATH": GATE_DIR, "ULLAGE_GATE_FILE": GATE_FILE}
    gate = [{"name": "gate", "mountPath": GATE_DIR, "readOnly": True}] if _gated(service) else []
    ready = "/ready" if engine.type == "ullage" else "/health"
    return {
        **_container("engine", engine.image or images.engine, engine_command(service), arguments),
        "env": _environment(environment),
        "ports": [_port("http", engine.port)],
        "startupProbe": _probe("/health", "http", period=5, failures=LOAD_SECONDS // 5),
        "livenessProbe": _probe("/health", "http", period=10, failures=6),
        "readinessProbe": _probe(ready, "http", period=5, failures=2),
        "lifecycle": _leave(service),
        "resources": engine.resources.write(),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "cache", "mountPath": CACHE_DIR},
            {"name": "engine-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
            *gate,
        ],
    }


def _leave(service: InferenceService) -> Object:
    """Runs before the engine is told to stop: holds that up until the agent's hook has drained it."""
    metrics = f"http://127.0.0.1:{service.spec.engine.port}/metrics"
    return _pre_stop("leave", RUN_DIR, _drain_seconds(service), metrics)


def _drain(service: InferenceService) -> Object:
    """Runs beside that, before the agent is told to stop: has the agent drain the engine."""
    port, longest = service.spec.agent.action_port, _drain_seconds(service)
    return _pre_stop("drain", RUN_DIR, SECRET_DIR, port, ENDPOINT_SECONDS, longest)


def _drain_seconds(service: InferenceService) -> int:
    """Longest time that the hooks hold a pod's end up, also where the user gave it another grace."""
    pod = (service.spec.pod_template or {}).get("spec") or {}
    return max(1, int(pod.get("terminationGracePeriodSeconds") or GRACE_SECONDS) - END_SECONDS)


def _pre_stop(hook: str, *arguments: object) -> Object:
    return {"preStop": {"exec": {"command": [*hooks.command(hook), *map(str, arguments)]}}}


def _gated(service: InferenceService) -> bool:
    """Whether long prompts are refused by a middleware that we bring along."""
    return service.spec.engine.type == "vllm"


def _gate(service: InferenceService, images: Images) -> dict[str, Any]:
    agent = service.spec.agent
    copy = [*hooks.command("copy_gate"), GATE_DIR]
    return {
        **_container("gate", agent.image or images.agent, copy, []),
        "volumeMounts": [{"name": "gate", "mountPath": GATE_DIR}],
    }


def _agent(service: InferenceService, images: Images) -> dict[str, Any]:
    agent = service.spec.agent
    own = service.spec.engine.type == "ullage"
    arguments = agent_arguments(
        service,
        engine_url=f"unix:{ADMIN_SOCKET}" if own else f"http://127.0.0.1:{service.spec.engine.port}",
        gate_file=GATE_FILE if _gated(service) else None,
        host="0.0.0.0",
        metrics_port=agent.metrics_port,
        action_port=agent.action_port,
        files=AgentFiles(certificate=f"{SECRET_DIR}/tls.crt", key=f"{SECRET_DIR}/tls.key", token=f"{SECRET_DIR}/token"),
    )
    resources = agent.resources if agent.resources != Resources() else AGENT_DEFAULTS
    return {
        **_container(AGENT_CONTAINER, agent.image or images.agent, ["ullage-agent"], arguments),
        "env": _environment({"USER": "ullage"}),
        "ports": [_port("metrics", agent.metrics_port), _port(ACTION_PORT_NAME, agent.action_port)],
        "livenessProbe": _probe("/healthz", "metrics", period=10, failures=6),
        "lifecycle": _drain(service),
        "resources": resources.write(),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "agent-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
            {"name": "credentials", "mountPath": SECRET_DIR, "readOnly": True},
        ],
    }


def _container(name: str, image: str, command: list[str], arguments: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "command": command,
        "args": arguments,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _environment(variables: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, port: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
