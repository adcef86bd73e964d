"""Checks of one InferenceService and its children: status, labels, network, credentials, agents, remediations. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ullage_operator.certificates import server_name
from ullage_operator.fleet import TRAFFIC_LABEL, TRAFFIC_OFF

from ..api import Object
from ..exposition import AgentMetrics
from .checks_install import certificate_finding, pod_problem
from .facts import SERVICE_LABEL, Facts, ServiceFacts, pem
from .findings import Finding, error, info, ok, unknown, warning

RECENT = 3
"""Remediations that must all have failed to be called a pattern."""


def check_status(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Does the operator look after it, and what does it say?"""
    subject, status = service.title, service.obj.get("status") or {}
    generation = service.obj["metadata"].get("generation")
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    if not status:
        yield error(subject, "no operator has looked at it", "start the operator, or give it this --namespace")
        return
    if status.get("observedGeneration") != generation:
        yield warning(subject, "its last change was not acted on yet", "wait, then see the operator's log")
    if (invalid := conditions.get("InvalidSpec")) and invalid["status"] == "True":
        yield error(subject, f"spec is invalid: {invalid['message']}", f"kubectl edit infsvc {service.name}")
        return
    if (service.obj.get("spec") or {}).get("suspend"):
        yield info(subject, "is suspended: nothing is repaired or remedied")
    for kind, fix in _FIXES.items():
        condition = conditions.get(kind)
        if condition is not None and condition["status"] == "False":
            said = condition.get("message") or condition.get("reason")
            yield warning(subject, f"{kind} is False: {said}", fix)
    progressing = conditions.get("Progressing") or {}
    if progressing.get("reason") == "ReconcileFailed":
        yield error(subject, f"its objects cannot be made: {progressing.get('message')}", "remove what is in the way")
    risk = status.get("risk")
    if status.get("phase") == "Ready":
        yield ok(subject, f"is ready; risk {risk['score']:.0f}" if risk else "is ready; no risk is known")


_FIXES = {
    "Ready": "kubectl describe pods -l ullage.dev/service=NAME",
    "EngineReachable": "see the checks of agents and network below",
    "MetricsContract": "the engine's version names its metrics otherwise; use one that the agent's docs name",
    "RemediationEffective": "kubectl get remed, then ullage explain NAME",
}


def check_labels(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Do Service and pods find each other?"""
    subject = f"labels of {service.namespace}/{service.name}"
    if reason := service.unread.get("pods"):
        yield unknown(subject, reason, "run this as somebody who may list pods")
        return
    if service.service is None:
        if (service.obj.get("spec") or {}).get("suspend") or not service.obj.get("status"):
            return
        yield error(subject, "the Service does not exist", "see Progressing in the status")
        return
    selector = (service.service.get("spec") or {}).get("selector") or {}
    if selector.get(SERVICE_LABEL) != service.name:
        yield error(
            subject,
            f"the Service selects {_words(selector)}, not the pods of this service",
            "remove the change: kubectl edit service " + service.name,
        )
        return
    found = [pod for pod in service.pods if _matches(selector, pod)]
    off = [pod for pod in service.pods if _labels(pod).get(TRAFFIC_LABEL) == TRAFFIC_OFF]
    leaving = any(
        record["spec"]["action"] == "scaleDown" and (record.get("status") or {}).get("phase") == "Running"
        for record in service.remediations
    )
    if off and not leaving:
        names = ", ".join(pod["metadata"]["name"] for pod in off)
        yield warning(
            subject,
            f"{names} gets no requests ({TRAFFIC_LABEL}={TRAFFIC_OFF}), and no scaleDown is under way",
            f"kubectl label pod NAME {TRAFFIC_LABEL}=on --overwrite",
        )
    if service.pods and not found:
        yield error(subject, "the Service selects none of the pods: no request arrives", "compare their labels")
    elif service.pods and not off:
        yield ok(subject, f"the Service selects {len(found)} of {len(service.pods)} pods")


def check_pods(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Do the pods come up?"""
    for pod in service.pods:
        if problem := pod_problem(pod):
            name = pod["metadata"]["name"]
            yield error(f"pod {service.namespace}/{name}", problem, f"kubectl describe pod {name}")


def check_credentials(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Is the agents' certificate good?"""
    subject = f"certificate of {service.namespace}/{service.name}"
    if reason := service.unread.get("Secret"):
        yield unknown(subject, reason, "run this as somebody who may read this Secret")
    elif service.secret is None:
        if service.service is not None:
            yield error(subject, f"Secret {service.name}-agent does not exist", "see Progressing in the status")
    else:
        data = service.secret.get("data") or {}
        dns_name = server_name(service.name, service.namespace)
        yield certificate_finding(subject, pem(data.get("tls.crt")), facts.now, dns_name)
        if not data.get("token"):
            yield error(subject, "the Secret has no token", "delete the Secret: the operator makes a new one")


def check_agents(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Does each agent read its engine, and keep what its metrics promise?"""
    for pod, found in service.agents.items():
        subject = f"agent {service.namespace}/{pod}"
        if isinstance(found, str):
            yield unknown(
                subject,
                f"its metrics cannot be read through the API server ({found})",
                f"kubectl port-forward pod/{pod} 9400, then ullage doctor --agent http://127.0.0.1:9400",
            )
        else:
            yield from agent_findings(subject, found, facts.own_version)


def agent_findings(subject: str, found: AgentMetrics, own_version: str) -> Iterator[Finding]:
    """What one agent's metrics tell of its health."""
    problems = list(_agent_problems(subject, found))
    yield from problems
    beside = [source for source, up in found.sources.items() if not up and source != "engine"]
    if beside:
        yield info(subject, f"reads no {', '.join(beside)} memory: normal where there is no accelerator or driver")
    if found.agent_version and found.agent_version != own_version:
        yield warning(
            subject,
            f"is version {found.agent_version}, while this program is {own_version}",
            "use the same version of program, agent and operator",
        )
    if not problems:
        risk = "unknown" if found.risk is None else f"{found.risk:.0f}"
        yield ok(subject, f"reads {found.engine} {found.engine_version} ({found.model}); risk {risk}")


def _agent_problems(subject: str, found: AgentMetrics) -> Iterator[Finding]:
    if not found.sources.get("engine", True):
        yield error(subject, "cannot read its engine", "see its log; is the engine up, is --engine-url right?")
    for metric, problem in found.violations:
        yield warning(
            subject,
            f"the engine's {metric} is {problem}: it counts as unknown",
            "use a version of the engine that the agent's docs name, or report this one",
        )
    if found.certificate_valid is False:
        yield error(subject, "serves with a certificate that clients refuse", "restart the pod; then see the Secret")
    if found.liveness in ("stalled", "dead"):
        yield error(subject, f"the engine is {found.liveness}", "restart the engine; the runbook says what to look at")
    if found.risk is None and not found.violations:
        yield warning(subject, "the engine says too little for a risk", "see its log and the metrics it exports")


def check_action_ports(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Does each agent's action port speak TLS and ask for the token?"""
    for pod, found in service.actions.items():
        subject = f"actions of {service.namespace}/{pod}"
        if found == "guarded":
            yield ok(subject, "answer over TLS, and to nobody without the token")
        elif found == "open":
            yield error(subject, "answer without a token", "this is no agent of ours; see what listens on that port")
        else:
            yield unknown(subject, f"cannot be asked through the API server ({found})")


def check_remediations(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Does anything wait for a person, and does what is done help?"""
    waiting = [r for r in service.remediations if (r.get("status") or {}).get("phase") == "Proposed"]
    for record in waiting:
        name = record["metadata"]["name"]
        yield info(f"Remediation {service.namespace}/{name}", f"waits for approval: ullage approve {name}")
    ended = [r for r in service.remediations if (r.get("status") or {}).get("finishedAt")]
    ended = [r for r in ended if r["status"]["phase"] in ("Succeeded", "Ineffective", "Failed")]
    last = sorted(ended, key=lambda r: str(r["status"]["finishedAt"]))[-RECENT:]
    if len(last) == RECENT and all(r["status"]["phase"] != "Succeeded" for r in last):
        name = last[-1]["metadata"]["name"]
        yield warning(service.title, f"the last {RECENT} remediations brought nothing", f"ullage explain {name}")


def check_monitoring(facts: Facts, service: ServiceFacts) -> Iterator[Finding]:
    """Is it scraped?"""
    monitoring = (service.obj.get("spec") or {}).get("monitoring") or {}
    subject = f"monitoring of {service.namespace}/{service.name}"
    if not monitoring.get("enabled", True):
        yield info(subject, "is turned off")
    elif "monitoring.coreos.com/v1" not in facts.groups:
        yield info(subject, "no Prometheus Operator here; scrape the pods as docs/quickstart.md shows")
    elif service.monitor is None and "PodMonitor" not in service.unread and service.service is not None:
        yield warning(
            subject, "the PodMonitor is missing", "restart the operator: it looked for the kind when it began"
        )


def _labels(obj: Object) -> dict[str, str]:
    return dict(obj["metadata"].get("labels") or {})


def _matches(selector: Mapping[str, str], pod: Object) -> bool:
    return bool(selector) and all(_labels(pod).get(key) == value for key, value in selector.items())


def _words(selector: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in selector.items()) or "nothing"
