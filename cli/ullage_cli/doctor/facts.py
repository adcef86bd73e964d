"""Everything that the checks look at, read once. What may not be read is noted down, not guessed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from ..api import GROUP, Api, ApiFailed, Object, Where, path_of
from ..exposition import AgentMetrics, read_agent
from .rights import RIGHTS, Right, review

OPERATOR = "app.kubernetes.io/name=ullage-operator"
SERVICE_LABEL = "ullage.dev/service"
ENDPOINT_SECRET = "ullage-operator-endpoint"  # noqa: S105  a name, not a secret
METRICS_PORT, ACTION_PORT = 9400, 9401
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The operator's Deployment and what belongs to it."""

    deployment: Object
    pods: list[Object]
    leases: list[Object]
    endpoint_ca: str | None
    """`ca.crt` of its endpoint, base64; None: no such Secret, or it may not be read."""
    endpoint_certificate: str | None
    denied: tuple[tuple[Right, str], ...] | None
    """Rights and verbs that its account lacks; None: it could not be asked."""

    @property
    def namespace(self) -> str:
        return str(self.deployment["metadata"]["namespace"])

    @property
    def account(self) -> str:
        """Its service account, as the API server names it."""
        spec = self.deployment["spec"]["template"]["spec"]
        return f"system:serviceaccount:{self.namespace}:{spec.get('serviceAccountName') or 'default'}"

    @property
    def container(self) -> Object:
        containers: list[Object] = self.deployment["spec"]["template"]["spec"]["containers"]
        return containers[0]

    @property
    def arguments(self) -> list[str]:
        return [*(self.container.get("command") or []), *(self.container.get("args") or [])]

    @property
    def namespaces(self) -> list[str]:
        """Those it is limited to; none: all."""
        words, found = self.arguments, []
        for index, word in enumerate(words):
            if word.startswith("--namespace="):
                found.append(word.partition("=")[2])
            elif word == "--namespace" and index + 1 < len(words):
                found.append(words[index + 1])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """One InferenceService and its children."""

    obj: Object
    pods: list[Object]
    service: Object | None
    secret: Object | None
    policies: list[Object]
    monitor: Object | None
    remediations: list[Object]
    agents: dict[str, AgentMetrics | str] = field(default_factory=dict)
    """By pod: what its agent's metrics say, or why they could not be read through the API server."""
    actions: dict[str, str] = field(default_factory=dict)
    """By pod: what its action port answers to a call without a token: `guarded`, `open`, or why nothing can be said."""
    unread: dict[str, str] = field(default_factory=dict)
    """What may not be read, and why."""

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"]["namespace"])

    @property
    def title(self) -> str:
        return f"InferenceService {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The whole installation as it was seen."""

    server: str
    version: str
    minor: int
    """Of the API server's version 1.x; 0: not told."""
    crds: dict[str, Object | None]
    operators: list[Operator]
    webhook: Object | None
    webhook_services: dict[str, bool]
    """Services that the webhook names as `namespace/name`, and whether they exist."""
    groups: frozenset[str]
    """API groups with version that the server has."""
    services: list[ServiceFacts]
    unread: dict[str, str]
    now: float
    """Unix seconds, by this machine."""
    own_version: str


class Reader:
    """Reads and keeps a list of what it may not."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}

    async def __call__(self, what: str, reading: Awaitable[T], instead: T) -> T:
        """The result, or `instead` with a note."""
        try:
            return await reading
        except ApiFailed as error:
            if error.status is None:
                raise
            self.unread[what] = str(error)
            return instead


async def read_facts(api: Api, where: Where, *, now: float, own_version: str) -> Facts:
    """Read everything.

    Raises:
        ApiFailed: the API server does not answer.
    """
    read = Reader()
    version = await api.get("/version") or {}
    crds = {
        name: await read(
            f"CustomResourceDefinition {name}",
            api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"),
            None,
        )
        for name in ("inferenceservices.ullage.dev", "remediations.ullage.dev")
    }
    webhook = await read(
        "webhook",
        api.get("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/ullage-operator"),
        None,
    )
    deployments = await read("operator Deployments", api.list("/apis/apps/v1/deployments", OPERATOR), [])
    operators = [await _operator(api, deployment, read) for deployment in deployments]
    found: list[Object] = []
    if all(crds.values()) or read.unread:
        found = await read("InferenceServices", api.list(path_of(where, api, "inferenceservices")), [])
    groups = await read("API groups", api.get("/apis"), None)
    return Facts(
        server=api.server,
        version=str(version.get("gitVersion", "")),
        minor=int("".join(filter(str.isdigit, str(version.get("minor", "0")))) or 0),
        crds=crds,
        operators=operators,
        webhook=webhook,
        webhook_services=await _webhook_services(api, webhook, read),
        groups=frozenset(v["groupVersion"] for g in (groups or {}).get("groups", []) for v in g.get("versions", [])),
        services=[await _service(api, obj) for obj in found],
        unread=read.unread,
        now=now,
        own_version=own_version,
    )


async def _operator(api: Api, deployment: Object, read: Reader) -> Operator:
    namespace = deployment["metadata"]["namespace"]
    core = f"/api/v1/namespaces/{namespace}"
    secret = await read("the endpoint's Secret", api.get(f"{core}/secrets/{ENDPOINT_SECRET}"), None)
    data = (secret or {}).get("data") or {}
    bare = Operator(
        deployment=deployment,
        pods=await read("the operator's pods", api.list(f"{core}/pods", OPERATOR), []),
        leases=await read("leases", api.list(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"), []),
        endpoint_ca=data.get("ca.crt"),
        endpoint_certificate=data.get("tls.crt"),
        denied=None,
    )
    try:
        denied = await _denied(api, bare)
    except ApiFailed as error:
        if error.status is None:
            raise
        read.unread["rights of the operator"] = str(error)
        return bare
    return Operator(
        deployment=bare.deployment,
        pods=bare.pods,
        leases=bare.leases,
        endpoint_ca=bare.endpoint_ca,
        endpoint_certificate=bare.endpoint_certificate,
        denied=denied,
    )


async def _denied(api: Api, operator: Operator) -> tuple[tuple[Right, str], ...]:
    namespaces: list[str | None] = list(operator.namespaces) or [None]
    asked = [(right, verb, namespace) for right in RIGHTS for verb in right.verbs for namespace in namespaces]
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answers = await asyncio.gather(
        *(api.post(path, review(right, verb, operator.account, namespace)) for right, verb, namespace in asked)
    )
    denied = [
        (right, verb)
        for (right, verb, _), answer in zip(asked, answers, strict=True)
        if not (answer.get("status") or {}).get("allowed")
    ]
    return tuple(dict.fromkeys(denied))


async def _webhook_services(api: Api, webhook: Object | None, read: Reader) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for hook in (webhook or {}).get("webhooks") or []:
        service = (hook.get("clientConfig") or {}).get("service")
        if service:
            path = f"/api/v1/namespaces/{service['namespace']}/services/{service['name']}"
            found[f"{service['namespace']}/{service['name']}"] = (
                await read("the webhook's Service", api.get(path), {}) is not None
            )
    return found


async def _service(api: Api, obj: Object) -> ServiceFacts:
    read = Reader()
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    selector, core = f"{SERVICE_LABEL}={name}", f"/api/v1/namespaces/{namespace}"
    pods = await read("pods", api.list(f"{core}/pods", selector), [])
    network = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    monitors = f"/apis/monitoring.coreos.com/v1/namespaces/{namespace}/podmonitors/{name}"
    remediations = f"{GROUP}/namespaces/{namespace}/remediations"
    agent = (obj.get("spec") or {}).get("agent") or {}
    port, action_port = agent.get("metricsPort", METRICS_PORT), agent.get("actionPort", ACTION_PORT)
    running = [pod for pod in pods if (pod.get("status") or {}).get("podIP")]
    texts = await asyncio.gather(*(agent_text(api, namespace, pod["metadata"]["name"], port) for pod in running))
    guards = await asyncio.gather(*(guard(api, namespace, pod["metadata"]["name"], action_port) for pod in running))
    return ServiceFacts(
        obj=obj,
        actions={pod["metadata"]["name"]: found for pod, found in zip(running, guards, strict=True)},
        pods=pods,
        service=await read("Service", api.get(f"{core}/services/{name}"), None),
        secret=await read("Secret", api.get(f"{core}/secrets/{name}-agent"), None),
        policies=await read("NetworkPolicies", api.list(network), []),
        monitor=await read("PodMonitor", api.get(monitors), None),
        remediations=await read("Remediations", api.list(remediations, selector), []),
        agents={pod["metadata"]["name"]: found for pod, found in zip(running, texts, strict=True)},
        unread=read.unread,
    )


async def agent_text(api: Api, namespace: str, pod: str, port: int) -> AgentMetrics | str:
    """An agent's metrics through the API server's proxy, or why they cannot be had that way."""
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics"
    try:
        return read_agent(await api.text(path))
    except (ApiFailed, ValueError) as error:
        return str(error)


async def guard(api: Api, namespace: str, pod: str, port: int) -> str:
    """What the action port answers over TLS to somebody without a token; the API server passes none on."""
    try:
        await api.text(f"/api/v1/namespaces/{namespace}/pods/https:{pod}:{port}/proxy/v1/risk")
    except ApiFailed as error:
        return "guarded" if error.status == 401 else str(error)
    return "open"


def pem(data: str | None) -> bytes:
    """PEM bytes out of a Secret's or a caBundle's base64; empty where there is none or it makes no sense."""
    try:
        return base64.b64decode(data or "", validate=True)
    except ValueError:
        return b""
