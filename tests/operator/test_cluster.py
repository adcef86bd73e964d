"""The operator as a process, under the rights it ships with, against a real API server."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Kubectl, eventually
from processes import Program, http_get, metric

pytestmark = pytest.mark.envtest

EVICTED = 'ullage_agent_actions_total{action="evict",outcome="Succeeded"}'
POOL = 14
"""Namespaces for the tests that share an operator."""
FULL = {"pool": {"total": 100, "hot": 100, "peak": 0}}
SETTINGS = {"settleSeconds": 0.2, "evict": {"cooldownSeconds": 0.2}, "staleAfterPolls": 20}


def service(name: str = "web", **changes: Any) -> dict[str, Any]:
    spec = {
        "model": {"source": "/models/tiny"},
        "engine": {"kvCache": {"memory": "48Mi"}},
        "agent": {"pollSeconds": 0.1},
        "remediation": SETTINGS,
    }
    for key, value in changes.items():
        spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
    metadata = {"name": name}
    return {"apiVersion": "ullage.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}


def condition(kubectl: Kubectl, kind: str, name: str = "web") -> dict[str, Any]:
    obj = kubectl.get("infsvc", name) or {}
    found = [c for c in obj.get("status", {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def children(kubectl: Kubectl) -> dict[str, str]:
    found = {kind: kubectl.get(kind, name) for kind, name in CHILDREN.items()}
    return {kind: obj["metadata"]["uid"] for kind, obj in found.items() if obj}


CHILDREN = {"deployment": "web", "service": "web", "secret": "web-agent"}


def all_children(kubectl: Kubectl) -> dict[str, str] | None:
    found = children(kubectl)
    return found if len(found) == len(CHILDREN) else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine(kubectl: Kubectl, tmp_path: Path, port: int, scenario: dict[str, Any]) -> Iterator[Program]:
    """What a node would do: run the pod's agent with the Secret's files, and report the pod as ready."""
    pod = eventually("a pod", lambda: next(iter(kubectl.list("pod", "ullage.dev/service=web")), None))
    secret = eventually("the Secret", lambda: kubectl.get("secret", "web-agent"))
    for name, value in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(value))
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    arguments = [
        "--engine=fake",
        f"--engine-url={tmp_path / 'scenario.json'}",
        "--metrics-host=127.0.0.1",
        "--metrics-port=0",
        "--action-host=127.0.0.1",
        f"--action-port={port}",
        f"--tls-cert={tmp_path / 'tls.crt'}",
        f"--tls-key={tmp_path / 'tls.key'}",
        f"--token-file={tmp_path / 'token'}",
        "--poll-seconds=0.1",
    ]
    with Program("ullage_agent.main", arguments, tmp_path / "agent.log") as agent:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [ready]}
        kubectl.patch_status("pod", pod["metadata"]["name"], status)
        yield agent


@pytest.fixture(scope="module")
def pool(admin: Kubectl) -> Iterator[Kubectl]:
    """Fresh namespaces, made before the operator that serves them all."""
    names = [f"pool-{secrets.token_hex(4)}" for _ in range(POOL)]
    for name in names:
        admin.run("create", "namespace", name)
    return iter([admin.within(name) for name in names])


@pytest.fixture(scope="module")
def shared(
    operator_kubeconfig: Path, pool: Iterator[Kubectl], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """One operator for all namespaces of the pool."""
    with Program(
        "ullage_operator.main",
        [
            f"--kubeconfig={operator_kubeconfig}",
            "--http-host=127.0.0.1",
            "--http-port=0",
            "--sweep-seconds=0.2",
            *(f"--namespace={kubectl.namespace}" for kubectl in copy.copy(pool)),
        ],
        tmp_path_factory.mktemp("shared") / "operator.log",
    ) as running:
        yield running


@pytest.fixture
def pooled(shared: Program, pool: Iterator[Kubectl]) -> Kubectl:
    """kubectl in a namespace of this test alone, served by the shared operator."""
    return next(pool)


def finished(kubectl: Kubectl) -> list[dict[str, Any]]:
    ends = {"Succeeded", "Ineffective", "Failed", "Expired"}
    return [r for r in kubectl.list("remed") if r.get("status", {}).get("phase") in ends]


def test_children_appear_and_status_says_so(shared: Program, pooled: Kubectl) -> None:
    pooled.apply(service())
    eventually("the children", lambda: all_children(pooled))
    eventually("a status", lambda: condition(pooled, "Progressing").get("reason") == "WaitingForEngines")
    assert condition(pooled, "Ready")["reason"] == "NoneReady"
    table = pooled.run("get", "infsvc")
    assert table.split()[:6] == ["NAME", "PHASE", "READY", "REPLICAS", "RISK", "TERM"]
    assert "Pending" in table
    pooled.run("get", "ullage")
    assert http_get(f"{shared.facts['http']}/readyz") == "ok\n"
    assert metric(http_get(f"{shared.facts['http']}/metrics"), "ullage_operator_services") >= 1


def test_scale_subresource_sets_the_deployment(pooled: Kubectl) -> None:
    pooled.apply(service(replicas={"min": 1, "max": 3}))
    eventually("the children", lambda: all_children(pooled))
    pooled.run("scale", "infsvc/web", "--replicas=3")
    eventually("three replicas", lambda: (pooled.get("deployment", "web") or {})["spec"]["replicas"] == 3)


def test_what_breaks_is_repaired(pooled: Kubectl) -> None:
    pooled.apply(service())
    first = eventually("the children", lambda: all_children(pooled))
    pooled.run("delete", "service", "web")
    pooled.run("delete", "secret", "web-agent")
    image = '[{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "other"}]'
    pooled.run("patch", "deployment", "web", "--type=json", "-p", image)

    def repaired() -> bool:
        now = all_children(pooled)
        deployment = pooled.get("deployment", "web") or {}
        restored = deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith("ullage-engine")
        return now is not None and restored and all(now[k] != first[k] for k in ("service", "secret"))

    eventually("the repair", repaired, within_s=20)
    assert children(pooled)["deployment"] == first["deployment"]


def test_what_stands_around_the_pods_is_repaired_too(pooled: Kubectl) -> None:
    pooled.apply(service())
    eventually("the policy", lambda: pooled.get("networkpolicy", "web"))
    budget = eventually("the budget", lambda: pooled.get("pdb", "web"))
    pooled.run("delete", "pdb", "web")
    opened = '[{"op": "replace", "path": "/spec/ingress", "value": [{}]}]'
    pooled.run("patch", "networkpolicy", "web", "--type=json", "-p", opened)

    def repaired() -> bool:
        policy, new = pooled.get("networkpolicy", "web") or {}, pooled.get("pdb", "web")
        closed = policy.get("spec", {}).get("ingress", [{}]) != [{}]
        return new is not None and new["metadata"]["uid"] != budget["metadata"]["uid"] and closed

    eventually("the repair", repaired, within_s=20)


def test_deleting_takes_everything_though_no_agent_answers(pooled: Kubectl) -> None:
    pooled.apply(service(agent={"actionPort": free_port(), "pollSeconds": 0.1}))
    eventually("the children", lambda: all_children(pooled))
    pod = eventually("a pod", lambda: pooled.list("pod"))[0]
    pooled.patch_status("pod", pod["metadata"]["name"], {"phase": "Running", "podIP": "127.0.0.1"})
    eventually("the silence", lambda: condition(pooled, "EngineReachable").get("status") == "False")
    assert condition(pooled, "RiskHigh")["status"] == "Unknown"
    pooled.run("delete", "infsvc", "web", "--timeout=10s")
    eventually("nothing left", lambda: not children(pooled))


def test_deleting_works_without_an_operator(operator: Any, kubectl: Kubectl) -> None:
    with operator():
        kubectl.apply(service())
        eventually("the children", lambda: all_children(kubectl))
    kubectl.run("delete", "infsvc", "web", "--timeout=10s")
    eventually("nothing left", lambda: not children(kubectl))
    with operator():
        kubectl.apply(service())
        eventually("the children anew", lambda: all_children(kubectl))


def test_an_invalid_spec_is_said_and_mended(pooled: Kubectl, control_plane: Any) -> None:
    if control_plane.version() >= (1, 25):
        pytest.skip("this API server evaluates CEL and refuses the object itself")
    pooled.apply(service(replicas={"min": 3, "max": 2}))
    found = eventually("InvalidSpec", lambda: condition(pooled, "InvalidSpec"))
    assert found["message"] == ("InferenceService/web: spec.replicas.min: 3 is above max 2; lower min or raise max")
    assert children(pooled) == {}
    pooled.apply(service(replicas={"min": 1, "max": 2}))
    eventually("the children", lambda: all_children(pooled))
    eventually("no complaint", lambda: not condition(pooled, "InvalidSpec"))


def test_somebody_else_s_object_is_not_touched(pooled: Kubectl) -> None:
    pooled.run("create", "service", "clusterip", "web", "--tcp=80:80")
    before = pooled.get("service", "web")
    pooled.apply(service())
    found = eventually("the complaint", lambda: c if (c := condition(pooled, "Progressing")).get("status") else None)
    assert found["reason"] == "ReconcileFailed"
    assert "Service/web exists and is not of this service" in found["message"]
    assert pooled.get("service", "web") == before
    assert set(children(pooled)) == {"service"}
    pooled.run("delete", "service", "web")
    eventually("the children", lambda: all_children(pooled))


def test_a_suspended_service_is_left_alone(pooled: Kubectl) -> None:
    pooled.apply(service())
    eventually("the children", lambda: all_children(pooled))
    pooled.apply(service(suspend=True))
    eventually("Suspended", lambda: (pooled.get("infsvc", "web") or {})["status"]["phase"] == "Suspended")
    pooled.run("delete", "service", "web")
    pooled.apply(service(suspend=True, replicas={"max": 2}))
    generation = (pooled.get("infsvc", "web") or {})["metadata"]["generation"]
    eventually("another pass", lambda: condition(pooled, "Progressing")["observedGeneration"] == generation)
    assert set(children(pooled)) == {"deployment", "secret"}
    pooled.apply(service())
    eventually("the repair", lambda: all_children(pooled))


def test_risk_leads_to_one_eviction_that_is_found_effective(shared: Program, pooled: Kubectl, tmp_path: Path) -> None:
    port = free_port()
    pooled.apply(service(agent={"actionPort": port, "pollSeconds": 0.1}))
    with engine(pooled, tmp_path, port, FULL) as agent:
        (record,) = eventually("the remediation's end", lambda: finished(pooled))
        assert record["status"]["phase"] == "Succeeded"
        assert record["status"]["bytesFreed"] > 0
        assert record["status"]["before"]["score"] >= 85 > record["status"]["after"]["score"]
        assert record["spec"]["reason"] == "EvictColdBlocks"
        assert record["metadata"]["ownerReferences"][0]["name"] == "web"
        eventually("Ready", lambda: condition(pooled, "Ready").get("status") == "True")
        eventually("Reachable", lambda: condition(pooled, "EngineReachable").get("status") == "True")
        assert condition(pooled, "RemediationEffective")["status"] == "True"
        status = (pooled.get("infsvc", "web") or {})["status"]
        assert (status["phase"], status["lastAction"]["phase"]) == ("Ready", "Succeeded")
        assert metric(http_get(f"{agent.facts['metrics']}/metrics"), EVICTED) == 1
        reasons = {event["reason"] for event in pooled.list("events")}
        assert {"EvictColdBlocks", "Effective"} <= reasons
        own = http_get(f"{shared.facts['http']}/metrics")
        assert metric(own, 'ullage_operator_actions_total{action="evict",outcome="Succeeded"}') >= 1
    assert len(pooled.list("remed")) == 1


def test_a_killed_operator_s_work_is_finished_by_the_next(operator: Any, kubectl: Kubectl, tmp_path: Path) -> None:
    port = free_port()
    with operator() as first:
        settings = {**SETTINGS, "settleSeconds": 3}
        kubectl.apply(service(agent={"actionPort": port, "pollSeconds": 0.1}, remediation=settings))
        with engine(kubectl, tmp_path, port, FULL) as agent:
            running = eventually(
                "a running record", lambda: [r for r in kubectl.list("remed") if r.get("status", {}).get("answeredAt")]
            )
            first.kill()
            assert running[0]["status"]["phase"] == "Running"
            with operator():
                (record,) = eventually("its end", lambda: finished(kubectl))
            assert record["metadata"]["name"] == running[0]["metadata"]["name"]
            assert record["status"]["phase"] == "Succeeded"
            assert metric(http_get(f"{agent.facts['metrics']}/metrics"), EVICTED) == 1
            assert len(kubectl.list("remed")) == 1


def by_kubectl(kubectl: Kubectl, name: str) -> None:
    approval = '{"spec": {"approved": true, "approvedBy": "mara"}}'
    kubectl.run("patch", "remed", name, "--type=merge", "-p", approval)


def by_ullage(kubectl: Kubectl, name: str) -> None:
    where = [f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
    program = Path(sys.executable).with_name("ullage")
    subprocess.run([program, "approve", name, "--by=mara", *where], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("approve", [by_kubectl, by_ullage])
def test_a_proposal_waits_for_a_person(
    pooled: Kubectl, tmp_path: Path, approve: Callable[[Kubectl, str], None]
) -> None:
    port = free_port()
    settings = {**SETTINGS, "mode": "Propose"}
    pooled.apply(service(agent={"actionPort": port, "pollSeconds": 0.1}, remediation=settings))
    with engine(pooled, tmp_path, port, FULL) as agent:
        proposed = eventually(
            "a proposal", lambda: [r for r in pooled.list("remed") if r.get("status", {}).get("phase")]
        )[0]
        assert proposed["status"]["phase"] == "Proposed"
        assert metric(http_get(f"{agent.facts['metrics']}/metrics"), EVICTED) == 0
        approve(pooled, proposed["metadata"]["name"])
        (record,) = eventually("its end", lambda: finished(pooled))
        assert record["status"]["phase"] == "Succeeded"
        assert record["spec"]["approvedBy"] == "mara"
        assert metric(http_get(f"{agent.facts['metrics']}/metrics"), EVICTED) == 1


def test_one_operator_for_the_whole_cluster(operator: Any, kubectl: Kubectl) -> None:
    with operator(namespaces=[]):
        kubectl.apply(service())
        eventually("the children", lambda: all_children(kubectl))
        kubectl.run("delete", "service", "web")
        eventually("the repair", lambda: all_children(kubectl), within_s=20)


def test_an_idle_operator_writes_nothing(operator: Any, kubectl: Kubectl) -> None:
    """Nothing changes, so nothing is written: versions stand still over many sweeps."""
    with operator() as running:
        kubectl.apply(service())
        eventually("a status", lambda: condition(kubectl, "Progressing").get("reason") == "WaitingForEngines")
        url = f"{running.facts['http']}/metrics"

        def sweeps() -> float:
            return metric(http_get(url), "ullage_operator_sweep_seconds_count")

        def versions() -> list[str]:
            kinds = [*CHILDREN.items(), ("infsvc", "web")]
            return [(kubectl.get(kind, name) or {})["metadata"]["resourceVersion"] for kind, name in kinds]

        begun = sweeps()
        eventually("calm", lambda: sweeps() >= begun + 5)
        before, begun = versions(), sweeps()
        eventually("more sweeps", lambda: sweeps() >= begun + 10)
        assert versions() == before


def test_columns_of_a_remediation(kubectl: Kubectl) -> None:
    assert kubectl.run("explain", "remed.spec.approved").strip()
    time_ = "2026-01-01T00:00:00Z"
    spec = {
        "service": "web",
        "pod": "web-1",
        "podUID": "u",
        "action": "evict",
        "reason": "EvictColdBlocks",
        "inputs": {"sampledAt": time_, "score": 91.5},
        "mode": "Propose",
    }
    obj = {"apiVersion": "ullage.dev/v1alpha1", "kind": "Remediation", "metadata": {"name": "r"}, "spec": spec}
    kubectl.apply(obj)
    kubectl.patch_status("remed", "r", {"phase": "Proposed", "proposedAt": time_, "before": spec["inputs"]})
    heading, row = kubectl.run("get", "remed").splitlines()
    assert heading.split()[:4] == ["NAME", "PHASE", "ACTION", "POD"]
    assert row.split()[:5] == ["r", "Proposed", "evict", "web-1", "91.5"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": {"min": 3, "max": 2}}, "min is above max"),
        ({"replicas": {"min": 1, "max": 2, "desired": 3}}, "desired is outside min..max"),
        ({"remediation": {"riskThreshold": 50, "releaseThreshold": 50}}, "releaseThreshold is not below"),
        ({"engine": {"type": "vllm", "kvCache": {"memory": "48Mi"}}}, "image is missing"),
        ({"engine": {"kvCache": {"memory": "48"}}}, "memory needs a unit"),
        ({"agent": {"actionPort": 8000}}, "must differ"),
    ],
)
def test_cel_rules_refuse_early(kubectl: Kubectl, control_plane: Any, changes: dict[str, Any], message: str) -> None:
    if control_plane.version() < (1, 25):
        pytest.skip("this API server evaluates no CEL; name a newer one in KUBEBUILDER_ASSETS")
    done = kubectl.attempt("apply", "-f", "-", stdin=json.dumps(service(**changes)))
    assert done.returncode != 0
    assert message in done.stderr


def test_schema_refuses_and_prunes(kubectl: Kubectl) -> None:
    done = kubectl.attempt("apply", "-f", "-", stdin=json.dumps(service(engine={"kvCache": {"memory": "48MB"}})))
    assert done.returncode != 0
    assert "spec.engine.kvCache.memory" in done.stderr
