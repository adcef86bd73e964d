"""`ullage doctor`: every check on made-up facts, sound and broken in one way each."""

from __future__ import annotations

import base64
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_cli.doctor import checks_install as install
from ullage_cli.doctor import checks_network as network
from ullage_cli.doctor import checks_service as per_service
from ullage_cli.doctor import report
from ullage_cli.doctor.checks import examine
from ullage_cli.doctor.facts import Facts, Operator, ServiceFacts
from ullage_cli.doctor.findings import Finding, error, ok, unknown, warning
from ullage_cli.doctor.rights import RIGHTS, review
from ullage_cli.exposition import AgentMetrics
from ullage_operator.certificates import issue, server_name
from ullage_operator.crd import crds
from ullage_operator.secret import secret_data

MANIFESTS = Path(__file__).parents[2] / "manifests"
NOW = 1_800_000_000.0
DAY = 86_400.0


def certificates(now: float = NOW, name: str = "web") -> dict[str, str]:
    return secret_data(issue(server_name(name, "prod"), now=now))


def crd_objects() -> dict[str, Any]:
    found = {}
    for text in crds().values():
        crd = yaml.safe_load(text)
        crd["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
        found[crd["metadata"]["name"]] = crd
    return found


def operator() -> Operator:
    deployment = yaml.safe_load((MANIFESTS / "operator" / "deployment.yaml").read_text())
    deployment["status"] = {"readyReplicas": 2}
    lease = {
        "metadata": {"name": "ullage-operator"},
        "spec": {"holderIdentity": "pod-1", "renewTime": "2027-01-15T08:00:00.000000Z", "leaseDurationSeconds": 15},
    }
    made = certificates()
    return Operator(
        deployment=deployment, pods=[], leases=[lease], endpoint_ca=made["ca.crt"],
        endpoint_certificate=made["tls.crt"], denied=(),
    )  # fmt: skip


def web() -> ServiceFacts:
    labels = {"app.kubernetes.io/name": "ullage-engine", "ullage.dev/service": "web", "ullage.dev/traffic": "on"}
    pod = {"metadata": {"name": "web-1", "namespace": "prod", "labels": labels}, "spec": {}, "status": {}}
    policy = {
        "metadata": {"name": "web"},
        "spec": {
            "podSelector": {"matchLabels": {"ullage.dev/service": "web"}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": 8000}]},
                {"ports": [{"port": 9400}]},
                {
                    "ports": [{"port": 9401}],
                    "from": [
                        {
                            "namespaceSelector": {},
                            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "ullage-operator"}},
                        }
                    ],
                },
            ],
        },
    }
    agent = AgentMetrics(
        engine="vllm", engine_version="0.32", model="m", agent_version="0.1.0", risk=20.0,
        sources={"engine": True}, liveness="working",
    )  # fmt: skip
    return ServiceFacts(
        obj={
            "metadata": {"name": "web", "namespace": "prod", "generation": 2},
            "spec": {"engine": {"port": 8000}},
            "status": {"observedGeneration": 2, "phase": "Ready", "risk": {"score": 20}, "conditions": []},
        },
        pods=[pod],
        service={"spec": {"selector": {"ullage.dev/service": "web", "ullage.dev/traffic": "on"}}},
        secret={"data": certificates()},
        policies=[policy],
        monitor={},
        remediations=[],
        agents={"web-1": agent},
        actions={"web-1": "guarded"},
    )


@pytest.fixture
def facts() -> Facts:
    """A sound installation."""
    one = operator()
    bundle = one.endpoint_ca
    hook = {
        "name": "inferenceservices.ullage.dev",
        "clientConfig": {"caBundle": bundle, "service": {"namespace": "ullage-system", "name": "ullage-operator"}},
    }
    return Facts(
        server="https://api", version="v1.36.0", minor=36, crds=crd_objects(), operators=[one],
        webhook={"webhooks": [hook]}, webhook_services={"ullage-system/ullage-operator": True},
        groups=frozenset({"apps/v1", "policy/v1", "monitoring.coreos.com/v1"}), services=[web()], unread={},
        now=1_800_000_005.0, own_version="0.1.0",
    )  # fmt: skip


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def worst(findings: list[Finding], level: str) -> Finding:
    found = [finding for finding in findings if finding.level == level]
    assert len(found) == 1, findings
    return found[0]


def test_a_sound_installation_has_nothing_to_fix(facts: Facts) -> None:
    findings = examine(facts)
    assert levels(findings) == {"ok"}, [f for f in findings if f.level != "ok"]
    assert report.status(findings) == 0
    assert report.summary(findings).startswith("nothing to fix")


def test_rights_are_those_of_the_manifest() -> None:
    role = yaml.safe_load((MANIFESTS / "rbac" / "operator_role.yaml").read_text())
    granted = {
        (group, resource, verb, (rule.get("resourceNames") or [""])[0])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {(right.group, right.resource, verb, right.name) for right in RIGHTS for verb in right.verbs}
    assert asked == granted


def test_a_review_asks_for_the_account_in_its_groups() -> None:
    body: Any = review(RIGHTS[2], "patch", "system:serviceaccount:ns:op", "prod")
    assert body["spec"]["resourceAttributes"] == {
        "group": "ullage.dev", "resource": "inferenceservices", "subresource": "status", "verb": "patch", "name": "",
        "namespace": "prod",
    }  # fmt: skip
    assert "system:serviceaccounts:ns" in body["spec"]["groups"]


def test_old_servers_are_told_of_the_rules_that_they_do_not_check(facts: Facts) -> None:
    assert worst(list(install.check_server(replace(facts, minor=20))), "info").message.startswith(
        "v1.36.0 checks no CEL"
    )
    assert levels(list(install.check_server(replace(facts, minor=0)))) == {"unknown"}


def test_crds_missing_not_established_or_of_another_version(facts: Facts) -> None:
    name = "remediations.ullage.dev"
    none = replace(facts, crds=facts.crds | {name: None})
    assert worst(list(install.check_crds(none)), "error").message == "is not installed"
    waiting = deepcopy(facts.crds)
    waiting[name]["status"]["conditions"] = [{"type": "NamesAccepted", "status": "False", "message": "taken"}]  # type: ignore[index]
    assert "taken" in worst(list(install.check_crds(replace(facts, crds=waiting))), "error").message
    older = deepcopy(facts.crds)
    spec = install.schema_of(older[name])["properties"]["spec"]["properties"]  # type: ignore[arg-type]
    del spec["reason"], spec["mode"]
    found = list(install.check_crds(replace(facts, crds=older)))
    assert "lacks spec.reason and 1 more" in worst(found, "warning").message
    unread = replace(facts, unread={f"CustomResourceDefinition {name}": "forbidden"})
    assert levels(list(install.check_crds(unread))) == {"ok", "unknown"}


def test_an_operator_that_is_absent_down_or_of_another_version(facts: Facts) -> None:
    assert levels(list(install.check_operator(replace(facts, operators=[])))) == {"warning"}
    one = facts.operators[0]
    pod = {
        "status": {"containerStatuses": [{"name": "operator", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    }
    down = replace(one, deployment={**one.deployment, "status": {}}, pods=[pod])
    found = worst(list(install.check_operator(replace(facts, operators=[down]))), "error")
    assert "ImagePullBackOff" in found.message
    other = worst(list(install.check_operator(replace(facts, own_version="0.9.0"))), "warning")
    assert "ullage-operator:0.1.0" in other.message
    half = replace(one, deployment={**one.deployment, "status": {"readyReplicas": 1}})
    assert "1 of 2" in worst(list(install.check_operator(replace(facts, operators=[half]))), "warning").message


def test_two_operators_for_all_namespaces_are_one_too_many(facts: Facts) -> None:
    second = deepcopy(facts.operators[0])
    second.deployment["metadata"]["namespace"] = "elsewhere"
    found = list(install.check_operator(replace(facts, operators=[facts.operators[0], second])))
    assert any("undo each other" in finding.message for finding in found if finding.level == "error")


@pytest.mark.parametrize(
    "lease", [None, {"holderIdentity": ""}, {"holderIdentity": "x", "renewTime": "2020-01-01T00:00:00Z"}]
)
def test_nobody_leads(facts: Facts, lease: dict[str, Any] | None) -> None:
    leases = [] if lease is None else [{"metadata": {"name": "ullage-operator"}, "spec": lease}]
    one = replace(facts.operators[0], leases=leases)
    assert "nothing is decided" in worst(list(install.check_operator(replace(facts, operators=[one]))), "error").message


def test_missing_rights_are_named_by_resource(facts: Facts) -> None:
    pods = next(right for right in RIGHTS if right.resource == "pods")
    monitors = next(right for right in RIGHTS if right.resource == "podmonitors")
    workers = next(right for right in RIGHTS if right.resource == "leaderworkersets")
    denied = ((pods, "list"), (pods, "patch"), (monitors, "create"), (workers, "create"))
    one = replace(facts.operators[0], denied=denied)
    found = [f.message for f in install.check_rights(replace(facts, operators=[one]))]
    assert found == ["may not list, patch pods", "may not create podmonitors.monitoring.coreos.com"]
    unasked = replace(facts.operators[0], denied=None)
    assert levels(list(install.check_rights(replace(facts, operators=[unasked])))) == {"unknown"}


def test_an_operator_of_some_namespaces_needs_no_wide_rights(facts: Facts) -> None:
    wide = next(right for right in RIGHTS if right.resource == "namespaces")
    one = deepcopy(replace(facts.operators[0], denied=((wide, "list"),)))
    one.container["args"].append("--namespace=prod")
    assert one.namespaces == ["prod"]
    assert levels(list(install.check_rights(replace(facts, operators=[one])))) == {"ok"}


def test_a_webhook_without_trust_service_or_with_another_certificate(facts: Facts) -> None:
    hooks = deepcopy(facts.webhook or {})
    hooks["webhooks"][0]["clientConfig"]["caBundle"] = ""
    assert "no caBundle" in worst(list(install.check_webhook(replace(facts, webhook=hooks))), "error").message
    hooks["webhooks"][0]["clientConfig"]["caBundle"] = certificates()["ca.crt"]
    assert "another certificate" in worst(list(install.check_webhook(replace(facts, webhook=hooks))), "error").message
    gone = replace(facts, webhook_services={"ullage-system/ullage-operator": False})
    assert "does not exist" in worst(list(install.check_webhook(gone)), "error").message
    assert levels(list(install.check_webhook(replace(facts, webhook=None)))) == {"info"}


@pytest.mark.parametrize(
    ("text", "now", "name", "level", "message"),
    [
        (None, NOW, None, "ok", "is good for 365 days"),
        (None, NOW + 360 * DAY, None, "warning", "expires in 5 days"),
        (None, NOW + 400 * DAY, None, "error", "expired 35 days ago"),
        (None, NOW, "other.prod", "error", "is not for other.prod"),
        (b"nonsense", NOW, None, "error", "cannot be read"),
    ],
)
def test_certificates(text: bytes | None, now: float, name: str | None, level: str, message: str) -> None:
    pem = base64.b64decode(certificates()["tls.crt"]) if text is None else text
    found = install.certificate_finding("x", pem, now, name)
    assert (found.level, message in found.message) == (level, True)


Check = Callable[[Facts, ServiceFacts], Any]


@pytest.mark.parametrize(
    ("check", "change", "level", "message"),
    [
        (per_service.check_status, lambda s: s.obj.pop("status"), "error", "no operator has looked"),
        (per_service.check_status, lambda s: s.obj["metadata"].update(generation=3), "warning", "not acted on yet"),
        (
            per_service.check_status,
            lambda s: s.obj["status"].update(
                phase="Invalid", conditions=[{"type": "InvalidSpec", "status": "True", "message": "evict.ratio"}]
            ),
            "error",
            "evict.ratio",
        ),
        (
            per_service.check_status,
            lambda s: s.obj["status"].update(
                phase="Degraded",
                conditions=[{"type": "MetricsContract", "status": "False", "message": "web-1: x is missing"}],
            ),
            "warning",
            "MetricsContract is False: web-1: x is missing",
        ),
        (
            per_service.check_status,
            lambda s: s.obj["status"].update(
                phase="Pending",
                conditions=[
                    {"type": "Progressing", "status": "False", "reason": "ReconcileFailed", "message": "is taken"}
                ],
            ),
            "error",
            "is taken",
        ),
        (
            per_service.check_labels,
            lambda s: s.service["spec"]["selector"].update({"ullage.dev/service": "wob"}),
            "error",
            "selects ullage.dev/service=wob",
        ),
        (
            per_service.check_labels,
            lambda s: s.service["spec"]["selector"].update(extra="x"),
            "error",
            "selects none of the pods",
        ),
        (
            per_service.check_labels,
            lambda s: s.pods[0]["metadata"]["labels"].update({"ullage.dev/traffic": "off"}),
            "warning",
            "web-1 gets no requests",
        ),
        (
            per_service.check_pods,
            lambda s: s.pods[0]["status"].update(
                conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]
            ),
            "error",
            "Unschedulable: no GPU",
        ),
        (
            network.check_network,
            lambda s: s.policies[0]["spec"]["ingress"].pop(),
            "error",
            "web: nobody who must come in for actions may reach port 9401",
        ),
        (
            network.check_network,
            lambda s: s.policies[0]["spec"]["ingress"][2]["from"][0]["podSelector"]["matchLabels"].update(a="b"),
            "error",
            "for actions",
        ),
        (network.check_network, lambda s: s.policies.clear(), "warning", "NetworkPolicy is missing"),
        (per_service.check_credentials, lambda s: s.secret["data"].pop("token"), "error", "no token"),
        (
            per_service.check_credentials,
            lambda s: s.secret.update(data=certificates(name="other")),
            "error",
            "is not for web.prod.agents.ullage.dev",
        ),
        (per_service.check_action_ports, lambda s: s.actions.update({"web-1": "open"}), "error", "without a token"),
        (per_service.check_action_ports, lambda s: s.actions.update({"web-1": "HTTP 503"}), "unknown", "HTTP 503"),
        (per_service.check_agents, lambda s: s.agents.update({"web-1": "forbidden"}), "unknown", "forbidden"),
    ],
)  # fmt: skip
def test_a_service_broken_in_one_way(
    facts: Facts, check: Check, change: Callable[[ServiceFacts], Any], level: str, message: str
) -> None:
    service = deepcopy(facts.services[0])
    change(service)
    found = list(check(facts, service))
    assert message in worst(found, level).message
    if level in ("warning", "error"):
        assert worst(found, level).fix


@pytest.mark.parametrize(
    ("change", "level", "message"),
    [
        ({"sources": {"engine": False}}, "error", "cannot read its engine"),
        ({"sources": {"engine": True, "device": False}}, "info", "reads no device memory"),
        ({"violations": (("vllm:kv", "missing"),)}, "warning", "vllm:kv is missing"),
        ({"certificate_valid": False}, "error", "clients refuse"),
        ({"liveness": "stalled"}, "error", "is stalled"),
        ({"risk": None}, "warning", "too little for a risk"),
        ({"agent_version": "0.0.9"}, "warning", "is version 0.0.9"),
    ],
)
def test_what_an_agents_metrics_tell(facts: Facts, change: dict[str, Any], level: str, message: str) -> None:
    agent = replace(facts.services[0].agents["web-1"], **change)  # type: ignore[type-var]
    assert message in worst(list(per_service.agent_findings("agent", agent, "0.1.0")), level).message


def test_a_leaving_engine_is_no_trouble(facts: Facts) -> None:
    service = deepcopy(facts.services[0])
    service.pods[0]["metadata"]["labels"]["ullage.dev/traffic"] = "off"
    service.pods.append(deepcopy(facts.services[0].pods[0]))
    service.remediations.append(
        {"metadata": {"name": "r"}, "spec": {"action": "scaleDown"}, "status": {"phase": "Running"}}
    )
    assert levels(list(per_service.check_labels(facts, service))) == set()


def remediation(name: str, phase: str, finished: str | None) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"action": "evict"}, "status": {"phase": phase, "finishedAt": finished}}


def test_remediations_that_wait_or_bring_nothing(facts: Facts) -> None:
    service = replace(
        facts.services[0],
        remediations=[
            remediation("w", "Proposed", None),
            *(remediation(f"f{i}", "Ineffective", f"2026-01-01T00:00:0{i}Z") for i in range(3)),
        ],
    )
    found = list(per_service.check_remediations(facts, service))
    assert "ullage approve w" in worst(found, "info").message
    assert worst(found, "warning").fix == "ullage explain f2"
    helped = replace(
        service, remediations=[*service.remediations, remediation("s", "Succeeded", "2026-01-02T00:00:00Z")]
    )
    assert levels(list(per_service.check_remediations(facts, helped))) == {"info"}


def test_a_port_range_lets_in_what_lies_within(facts: Facts) -> None:
    service = deepcopy(facts.services[0])
    service.policies[0]["spec"]["ingress"] = [{"ports": [{"port": 8000, "endPort": 9500}]}]
    assert levels(list(network.check_network(facts, service))) == {"ok"}
    service.policies[0]["spec"]["ingress"] = [{"ports": [{"port": name} for name in ("http", "metrics", "actions")]}]
    assert levels(list(network.check_network(facts, service))) == {"ok"}
    service.policies[0]["spec"]["ingress"] = [{"ports": [{"port": 8000, "endPort": 9400}]}]
    assert levels(list(network.check_network(facts, service))) == {"error"}


def test_the_report_marks_levels_by_signs_and_ends_with_a_summary() -> None:
    findings = [ok("a", "x"), warning("b", "y", "do z"), error("c", "y", "do z"), unknown("d", "y")]
    text = report.text(findings)
    assert text.splitlines()[1:3] == [" !  b: y", "      -> do z"]
    assert text.endswith("1 to fix, 1 to look at; 1 as they should be; 1 could not be checked")
    assert report.status(findings) == 1 and report.status(findings[:2]) == 0
    assert report.as_dict(findings)["findings"][2] == {"level": "error", "subject": "c", "message": "y", "fix": "do z"}
