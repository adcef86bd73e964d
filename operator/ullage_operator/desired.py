"""The Kubernetes objects that an `InferenceService` stands for. Pure: the same arguments give the same objects.

Non-goals: talking to the API server (`kube`), making certificates (`certificates`).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from ullage_operator.arguments import AgentFiles, agent_arguments, engine_arguments
from ullage_operator.certificates import Credentials
from ullage_operator.fleet import TRAFFIC_LABEL, TRAFFIC_ON
from ullage_operator.model import API_VERSION, InferenceService, Resources
from ullage_operator.remediation import SERVICE_LABEL

__all__ = ["Images", "agent_arguments", "desired_objects", "engine_arguments", "owner_reference", "secret_name"]

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "ullage-operator"
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
LOAD_SECONDS = 1800
"""Longest time for a model to load before the engine counts as hung."""
AGENT_DEFAULTS = Resources(requests={"cpu": "20m", "memory": "64Mi"}, limits={"memory": "192Mi"})

_DRAIN = """\
import http.client, json, socket, sys, time
path, wait, timeout = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
time.sleep(wait)
connection = http.client.HTTPConnection("engine", timeout=timeout + 5)
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
body = json.dumps({"timeout_s": timeout})
connection.request("POST", "/admin/v1/drain", body, {"Content-Type": "application/json"})
print(connection.getresponse().read().decode())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Container images for services that name none."""

    engine: str
    agent: str


def desired_objects(service: InferenceService, *, images: Images, credentials: Credentials) -> list[dict[str, Any]]:
    """Secret, Service and Deployment, in the order in which to apply them."""
    return [_secret(service, credentials), _service(service), _deployment(service, images)]


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


def secret_name(service: InferenceService) -> str:
    """Name of the Secret with the agents' token and certificate."""
    return f"{service.metadata.name}-agent"


def credentials_of(secret: dict[str, Any]) -> Credentials:
    """Read a Secret back; what is missing or unreadable comes out empty, and so not valid."""
    data = secret.get("data") or {}

    def text(key: str) -> str:
        try:
            return base64.b64decode(data.get(key, ""), validate=True).decode()
        except ValueError:
            return ""

    return Credentials(token=text("token"), certificate=text("tls.crt"), key=text("tls.key"), trusted=text("ca.crt"))


def pod_labels(service: InferenceService) -> dict[str, str]:
    """Labels that select a service's pods; they never change."""
    return {"app.kubernetes.io/name": "ullage-engine", SERVICE_LABEL: service.metadata.name}


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
    texts = {
        "token": credentials.token,
        "tls.crt": credentials.certificate,
        "tls.key": credentials.key,
        "ca.crt": credentials.trusted,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(service, secret_name(service)),
        "type": "Opaque",
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()},
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


def _deployment(service: InferenceService, images: Images) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, service.metadata.name),
        "spec": {
            "replicas": service.spec.replicas.effective,
            "selector": {"matchLabels": pod_labels(service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": {**pod_labels(service), TRAFFIC_LABEL: TRAFFIC_ON}},
                "spec": _pod(service, images),
            },
        },
    }


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
        "containers": [_engine(service, images), _agent(service, images)],
        "volumes": [
            {"name": "run", "emptyDir": {"medium": "Memory"}},
            {"name": "cache", "emptyDir": {}},
            {"name": "engine-tmp", "emptyDir": {}},
            {"name": "agent-tmp", "emptyDir": {}},
            {"name": "credentials", "secret": {"secretName": secret_name(service), "defaultMode": 0o440}},
        ],
    }


def _engine(service: InferenceService, images: Images) -> dict[str, Any]:
    engine = service.spec.engine
    drain_seconds = GRACE_SECONDS - ENDPOINT_SECONDS - 15
    drain = ["python3", "-c", _DRAIN, ADMIN_SOCKET, str(ENDPOINT_SECONDS), str(drain_seconds)]
    arguments = engine_arguments(
        service, host="0.0.0.0", port=engine.port, admin=f"unix:{ADMIN_SOCKET}", cache_dir=CACHE_DIR
    )
    return {
        **_container("engine", engine.image or images.engine, "ullage-engine", arguments),
        "env": _environment({"HOME": CACHE_DIR, "USER": "ullage", "HF_HOME": f"{CACHE_DIR}/huggingface"}),
        "ports": [_port("http", engine.port)],
        "startupProbe": _probe("/health", "http", period=5, failures=LOAD_SECONDS // 5),
        "livenessProbe": _probe("/health", "http", period=10, failures=6),
        "readinessProbe": _probe("/ready", "http", period=5, failures=2),
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
        "resources": engine.resources.write(),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "cache", "mountPath": CACHE_DIR},
            {"name": "engine-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
        ],
    }


def _agent(service: InferenceService, images: Images) -> dict[str, Any]:
    agent = service.spec.agent
    arguments = agent_arguments(
        service,
        engine_url=f"unix:{ADMIN_SOCKET}",
        host="0.0.0.0",
        metrics_port=agent.metrics_port,
        action_port=agent.action_port,
        files=AgentFiles(certificate=f"{SECRET_DIR}/tls.crt", key=f"{SECRET_DIR}/tls.key", token=f"{SECRET_DIR}/token"),
    )
    resources = agent.resources if agent.resources != Resources() else AGENT_DEFAULTS
    return {
        **_container(AGENT_CONTAINER, agent.image or images.agent, "ullage-agent", arguments),
        "env": _environment({"USER": "ullage"}),
        "ports": [_port("metrics", agent.metrics_port), _port(ACTION_PORT_NAME, agent.action_port)],
        "livenessProbe": _probe("/healthz", "metrics", period=10, failures=6),
        "resources": resources.write(),
        "volumeMounts": [
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "agent-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
            {"name": "credentials", "mountPath": SECRET_DIR, "readOnly": True},
        ],
    }


def _container(name: str, image: str, command: str, arguments: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "command": [command],
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
