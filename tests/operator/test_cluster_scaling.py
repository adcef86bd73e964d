"""Scaling, alerts, the webhook, election and deaths, against a real API server with pods run by a small node."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from assets import find_or_build
from cluster import Kubectl, establish, eventually
from controlplane import ControlPlane
from kubelet import Kubelet, RunningPod
from processes import Program, http_get, metric

from ullage_operator.crd import crds

pytestmark = pytest.mark.envtest

ROOT = Path(__file__).resolve().parents[2]
FAST = {
    "settleSeconds": 0.2,
    "staleAfterPolls": 50,
    "evict": {"cooldownSeconds": 0.2},
    "throttle": {"enabled": False},
    "scaleUp": {"persistSeconds": 0.5, "warmUpSeconds": 0, "cooldownSeconds": 0, "pendingSeconds": 120},
    "scaleDown": {"windowSeconds": 1},
}
FULL = {"pool": {"total": 100, "hot": 100, "peak": 0, "protected": 100}}


def idle(cached: int) -> dict[str, Any]:
    """An engine with nothing in flight."""
    blocks = {"total_blocks": 100, "hot_blocks": 0, "reclaimable_blocks": cached, "free_blocks": 100 - cached}
    return {"steps": [{"snapshot": {**blocks, "largest_free_run_blocks": 100 - cached, "running": 0, "waiting": 0}}]}


EVICTED = 'ullage_agent_actions_total{action="evict",outcome="Succeeded"}'
FINAL = {"Succeeded", "Ineffective", "Failed", "Expired"}


def service(name: str = "web", *, replicas: Any = None, **remediation: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ullage.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "/models/tiny"},
            "engine": {"kvCache": {"memory": "48Mi"}},
            "agent": {"pollSeconds": 0.1},
            "replicas": replicas or {"min": 1, "max": 2},
            "remediation": {**FAST, **remediation},
        },
    }


def records(kubectl: Kubectl, action: str) -> list[dict[str, Any]]:
    return [r for r in kubectl.list("remed") if r["spec"]["action"] == action]


def phase(kubectl: Kubectl, action: str, wanted: str) -> dict[str, Any] | None:
    found = [r for r in records(kubectl, action) if r.get("status", {}).get("phase") == wanted]
    return found[0] if found else None


def test_up_by_demand_and_down_when_idle(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """The first engine is full and cannot be relieved; then it is replaced by an idle one, and the fleet shrinks."""
    # API servers before 1.22 do not know deletion costs and remove the youngest: so it holds the least here.
    scenarios = [FULL, idle(9), idle(3)]
    with (
        operator(),
        Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=lambda n: scenarios[min(n, 2)]),
    ):
        kubectl.apply(service())
        eventually("one more engine", lambda: phase(kubectl, "scaleUp", "Succeeded"))
        assert (kubectl.get("infsvc", "web") or {})["spec"]["replicas"]["desired"] == 2
        full = records(kubectl, "scaleUp")[0]["spec"]["pod"]
        kubectl.run("delete", "pod", full, "--wait=false")
        done = eventually("one less", lambda: phase(kubectl, "scaleDown", "Succeeded"))
        assert (kubectl.get("infsvc", "web") or {})["spec"]["replicas"]["desired"] == 1
        eventually("one pod", lambda: len(kubectl.list("pod")) == 1)
        assert done["spec"]["pod"] not in [p["metadata"]["name"] for p in kubectl.list("pod")]
        (left,) = kubectl.list("pod")
        assert left["metadata"]["labels"]["ullage.dev/traffic"] == "on"
        assert {r["status"]["phase"] for r in kubectl.list("remed")} <= FINAL


def test_the_engine_that_stays_in_place_of_another_opens_again(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """The older engine is chosen, as it holds less, and drained; then the younger one is removed."""
    if control_plane.version() >= (1, 22):
        pytest.skip("this API server removes the engine that was chosen")

    def pool(index: int) -> dict[str, Any]:
        return {"pool": {"total": 100, "cached": 9 if index else 3, "peak": 0}}

    def desired() -> int:
        return int((kubectl.get("infsvc", "web") or {})["spec"]["replicas"].get("desired") or 1)

    def draining(pod: RunningPod) -> Any:
        return json.loads(http_get(f"http://{pod.address}:9400/page.json"))["report"]["draining"]

    with (
        operator(),
        Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=pool) as node,
    ):
        kubectl.apply(service())
        eventually("the older engine", lambda: any(pod.ready for pod in node.pods.values()))
        (older,) = node.pods.values()
        time.sleep(1.1)  # readiness is told in whole seconds
        kubectl.run("scale", "infsvc", "web", "--replicas=2")
        eventually("the younger engine's end", lambda: desired() == 1 and len(node.pods) == 1)
        assert list(node.pods.values()) == [older]
        record = eventually("the step taken back", lambda: phase(kubectl, "scaleDown", "Ineffective"))
        assert (record["spec"]["pod"], record["status"]["closed"]) == (older.name, True)
        assert record["status"]["message"] == f"taken back: {older.name} was not the one removed, and reopened"
        eventually("a reading that it is open", lambda: draining(older) is False)
        released = 'ullage_agent_actions_total{action="release",outcome="Succeeded"}'
        assert metric(http_get(f"http://{older.address}:9400/metrics"), released) == 1
        assert metric(http_get(f"http://{older.address}:9400/metrics"), released.replace("release", "drain")) == 1
        (left,) = kubectl.list("pod")
        assert left["metadata"]["labels"]["ullage.dev/traffic"] == "on"
        assert "controller.kubernetes.io/pod-deletion-cost" not in left["metadata"].get("annotations", {})


def test_a_pod_without_room_is_taken_back(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    policy = {"scaleUp": {**FAST["scaleUp"], "pendingSeconds": 2}}  # type: ignore[dict-item]
    node = Kubelet(
        control_plane, kubectl.namespace, tmp_path / "node", engines=lambda n: FULL, schedulable=lambda n: n < 1
    )
    with operator(), node:
        kubectl.apply(service(**policy))
        record = eventually("the step taken back", lambda: phase(kubectl, "scaleUp", "Ineffective"))
        assert "Unschedulable: no room" in record["status"]["message"]
        assert (kubectl.get("infsvc", "web") or {})["spec"]["replicas"]["desired"] == 1
        eventually("one pod", lambda: len(kubectl.list("pod")) == 1)


def post(url: str, body: Any, *, token: str, trusted: str) -> dict[str, Any]:
    context = ssl.create_default_context(cadata=trusted)
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.build_opener(*handlers).open(request, timeout=10) as response:
        return dict(json.loads(response.read()))


def endpoint_options(kubectl: Kubectl) -> list[str]:
    return [
        "--endpoint-port=0",
        "--endpoint-name=localhost",
        f"--endpoint-secret=endpoint-{kubectl.namespace}",
        f"--operator-namespace={kubectl.namespace}",
    ]


def endpoint_secret(kubectl: Kubectl) -> dict[str, str]:
    import base64

    data = (kubectl.get("secret", f"endpoint-{kubectl.namespace}") or {})["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_an_alert_is_evidence_not_an_order(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    warm = {"pool": {"total": 100, "hot": 70, "peak": 0, "free_runs": 2}}
    with (
        operator(*endpoint_options(kubectl)) as running,
        Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=lambda n: warm),
    ):
        kubectl.apply(service(replicas={"min": 1, "max": 1}, releaseThreshold=30))
        eventually("a reading", lambda: (kubectl.get("infsvc", "web") or {}).get("status", {}).get("risk"))
        assert kubectl.list("remed") == []
        secret = endpoint_secret(kubectl)
        url = running.facts["endpoint"].replace("127.0.0.1", "localhost") + "/v1/alerts"
        labels = {"alertname": "Slow", "namespace": kubectl.namespace, "ullage_service": "web"}
        body = {"version": "4", "alerts": [{"status": "firing", "labels": labels, "fingerprint": "a"}]}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, body, token="guess", trusted=secret["ca.crt"])
        answer = post(url, body, token=secret["token"], trusted=secret["ca.crt"])
        assert answer == {"accepted": 1, "ignored": 0}
        record = eventually("an eviction", lambda: phase(kubectl, "evict", "Succeeded"))
        assert record["spec"]["inputs"]["score"] < 85


def test_the_webhook_refuses_what_the_schema_cannot(
    operator: Any, kubectl: Kubectl, admin: Kubectl, operator_kubeconfig: Path
) -> None:
    with operator(*endpoint_options(kubectl), "--webhook=ullage-operator") as running:
        port = running.facts["endpoint"].rsplit(":", 1)[1]
        hook = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "ullage-operator"},
            "webhooks": [
                {
                    "name": "inferenceservices.ullage.dev",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "failurePolicy": "Fail",
                    "timeoutSeconds": 10,
                    "clientConfig": {"url": f"https://localhost:{port}/validate"},
                    "namespaceSelector": {"matchLabels": {"test": kubectl.namespace}},
                    "rules": [
                        {
                            "apiGroups": ["ullage.dev"],
                            "apiVersions": ["v1alpha1"],
                            "operations": ["CREATE", "UPDATE"],
                            "resources": ["inferenceservices"],
                        }
                    ],
                }
            ],
        }
        admin.run("label", "namespace", kubectl.namespace, f"test={kubectl.namespace}")
        admin.apply(hook)
    with ExitStack() as stack:
        stack.callback(admin.run, "delete", "validatingwebhookconfiguration", "ullage-operator")
        options = [*endpoint_options(kubectl), f"--endpoint-port={port}", "--webhook=ullage-operator"]
        stack.enter_context(operator(*options))
        tier = service()
        tier["spec"]["engine"] |= {
            "type": "vllm",
            "image": "v",
            "kvCache": {"memory": "1Gi", "hostMemory": "64Gi"},
            "resources": {"limits": {"memory": "32Gi"}},
        }

        def refusal() -> str | None:
            done = kubectl.attempt("apply", "-f", "-", stdin=json.dumps(tier))
            return done.stderr if "denied the request" in done.stderr else None

        assert "'64Gi' does not fit under resources.limits.memory 32Gi" in eventually("a refusal", refusal)
        kubectl.apply(service())
        kubectl.run("label", "infsvc", "web", "a=b")
        kubectl.run("delete", "infsvc", "web", "--timeout=20s")


def test_of_two_operators_one_leads_and_the_other_takes_over(operator: Any, kubectl: Kubectl, admin: Kubectl) -> None:
    system, lease = admin.within("ullage-system"), f"lease-{kubectl.namespace}"
    options = ["--leader-elect", f"--lease={lease}"]
    with operator(*options, "--identity=a") as first:
        second = operator(*options, "--identity=b")
        standby = subprocess.Popen(
            [sys.executable, "-m", "ullage_operator.main", *second.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            kubectl.apply(service())
            eventually("the children", lambda: kubectl.get("deployment", "web"))
            assert (system.get("lease", lease) or {})["spec"]["holderIdentity"] == "a"
            assert first.stop() == 0
            assert standby.stdout is not None
            assert standby.stdout.readline().startswith("ready: "), "it leads as soon as the lease is released"
            assert (system.get("lease", lease) or {})["spec"]["holderIdentity"] == "b"
            kubectl.run("delete", "service", "web")
            eventually("the repair by the other", lambda: kubectl.get("service", "web"))
        finally:
            standby.terminate()
            standby.communicate(timeout=30)
    assert standby.returncode == 0


def test_one_namespace_needs_no_right_beyond_it(
    control_plane: ControlPlane, kubectl: Kubectl, tmp_path: Path, admin: Kubectl
) -> None:
    text = admin.run("kustomize", str(ROOT / "manifests" / "namespaced"))
    kinds = ("kind: ServiceAccount", "kind: Role\n", "kind: RoleBinding")
    parts = [p for p in text.split("\n---\n") if any(kind in f"{p}\n" for kind in kinds)]
    assert len(parts) == 3
    kubectl.apply(re.sub(r"namespace: ullage$", f"namespace: {kubectl.namespace}", "\n---\n".join(parts), flags=re.M))
    token = kubectl.run("create", "token", "ullage-operator", "--duration=1h").strip()
    (tmp_path / "kubeconfig").write_text(json.dumps(control_plane.kubeconfig_for(token)))
    options = [
        f"--kubeconfig={tmp_path / 'kubeconfig'}",
        "--http-host=127.0.0.1",
        "--http-port=0",
        "--sweep-seconds=0.2",
        "--leader-elect",
        "--log-format=json",
        f"--namespace={kubectl.namespace}",
        *endpoint_options(kubectl),
    ]
    with (
        Program("ullage_operator.main", options, tmp_path / "operator.log") as running,
        Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=lambda n: FULL),
    ):
        kubectl.apply(service())
        eventually("one more engine", lambda: phase(kubectl, "scaleUp", "Succeeded"))
        assert kubectl.get("networkpolicy", "web")
        assert kubectl.get("pdb", "web")
        calls = http_get(f"{running.facts['http']}/metrics")
        refused = [line for line in calls.splitlines() if "api_calls_total{" in line and 'status="403"' in line]
        assert refused == []
        assert metric(calls, "ullage_operator_leader") == 1
    lines = [json.loads(line) for line in running.log().splitlines()[1:] if line.startswith("{")]
    assert any(line.get("object") == f"InferenceService/{kubectl.namespace}/web" for line in lines)


def test_killed_after_every_write_nothing_is_lost_doubled_or_stuck(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """Each life ends one write later than the one before, while an engine that refills itself keeps them busy."""
    refilling = {"pool": {"total": 100, "hot": 100, "peak": 100, "growth_per_s": 30}}
    policy = {"evict": {"cooldownSeconds": 0}}
    kubectl.apply(service(replicas={"min": 1, "max": 1}, **policy))
    with Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=lambda n: refilling) as node:
        for writes in range(1, 13):
            command = [sys.executable, "-m", "mortal", str(writes), *operator().arguments]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            life = subprocess.Popen(command, cwd=ROOT / "tests" / "envtest", **quiet)  # type: ignore[call-overload]
            try:
                assert life.wait(60) == -9
            finally:
                life.kill()
                life.wait()
        with operator():
            kubectl.apply(service(replicas={"min": 1, "max": 1}, evict={"enabled": False}))
            eventually(
                "an end to each", lambda: {r.get("status", {}).get("phase") for r in kubectl.list("remed")} <= FINAL
            )
        begun = [r for r in kubectl.list("remed") if r["status"].get("startedAt")]
        (pod,) = node.pods.values()
        acted = metric(http_get(f"http://{pod.address}:9400/metrics"), EVICTED)
        assert 1 <= acted <= len(begun)
        assert len(kubectl.list("deployment")) == len(kubectl.list("pod")) == 1


@pytest.mark.timeout(1200)
def test_killed_after_every_write_of_a_change_of_size(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """One up and one down, each by operators that die one write later than the one before, until it is done."""

    def engines(index: int) -> dict[str, Any]:
        # the younger, the less warm, as in the test above
        return FULL if index == 0 else idle(9 - index)

    def live(writes: int, done: Callable[[], Any]) -> None:
        command = [sys.executable, "-m", "mortal", str(writes), *operator().arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        life = subprocess.Popen(command, cwd=ROOT / "tests" / "envtest", **quiet)  # type: ignore[call-overload]
        try:
            # a machine with other work gives fewer fresh readings, and scaling down waits for a window full of them
            eventually("its death, or the end of all work", lambda: life.poll() is not None or done(), within_s=240)
            assert life.poll() in (None, -9)
        finally:
            life.kill()
            life.wait()

    def through(done: Callable[[], Any]) -> int:
        """Lives that it took."""
        for writes in range(1, 40):
            live(writes, done)
            if done():
                return writes
        raise AssertionError("40 lives were not enough")

    def begun(action: str) -> list[dict[str, Any]]:
        """Those that were carried out; one that was cut off before has Expired."""
        return [r for r in records(kubectl, action) if r.get("status", {}).get("startedAt")]

    def desired() -> int:
        return int((kubectl.get("infsvc", "web") or {})["spec"]["replicas"].get("desired") or 1)

    up = {"evict": {"enabled": False}, "scaleDown": {"enabled": False}}
    kubectl.apply(service(**up))
    with Kubelet(control_plane, kubectl.namespace, tmp_path / "node", engines=engines) as node:
        assert through(lambda: phase(kubectl, "scaleUp", "Succeeded")) > 2
        assert desired() == 2
        (grown,) = begun("scaleUp")
        assert len(node.pods) == 2
        full = next(pod for pod in node.pods.values() if pod.name == grown["spec"]["pod"])
        kubectl.run("delete", "pod", full.name, "--wait=false")
        eventually("its successor", lambda: full.name not in {p.name for p in node.pods.values()})
        kubectl.apply(service(evict={"enabled": False}))
        assert through(lambda: phase(kubectl, "scaleDown", "Succeeded")) > 2
        assert desired() == 1
        eventually("one pod", lambda: len(kubectl.list("pod")) == 1)
        with operator():
            eventually("an end to each", lambda: {r["status"]["phase"] for r in kubectl.list("remed")} <= FINAL)
        assert len(begun("scaleUp")) == 1, "no step was doubled"
        (left,) = kubectl.list("pod")
        assert left["metadata"]["labels"]["ullage.dev/traffic"] == "on"
        assert len(kubectl.list("deployment")) == 1
        assert [r["status"]["phase"] for r in begun("scaleDown")].count("Succeeded") == 1


@pytest.fixture
def own_plane(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that may be killed."""
    import os

    def install(plane: ControlPlane) -> None:
        establish(Kubectl(plane.kubeconfig, tmp_path / "cache"), crds(cel=plane.version() >= (1, 25)).values())

    with ControlPlane(find_or_build(os.environ, lambda line: None), before_controllers=install) as plane:
        yield plane


def failures(running: Program, kind: str) -> float:
    """Rounds of an operator that failed in this way."""
    text = http_get(f"{running.facts['http']}/metrics")
    return metric(text, f'ullage_operator_errors_total{{kind="{kind}"}}')


def test_an_api_server_killed_in_the_middle_of_everything(own_plane: ControlPlane, tmp_path: Path) -> None:
    """Watches are cut and their versions gone; while it is away nothing is begun, afterwards all goes on."""
    kubectl = Kubectl(own_plane.kubeconfig, tmp_path / "cache")
    scenario = {"pool": {"total": 100, "hot": 100, "peak": 0}}
    options = [f"--kubeconfig={own_plane.kubeconfig}", "--http-host=127.0.0.1", "--http-port=0", "--sweep-seconds=0.2"]
    with (
        Program("ullage_operator.main", options, tmp_path / "operator.log") as running,
        Kubelet(own_plane, "default", tmp_path / "node", engines=lambda n: scenario) as node,
    ):
        kubectl.apply(service(replicas={"min": 1, "max": 1}, settleSeconds=3))
        eventually(
            "a running record", lambda: [r for r in records(kubectl, "evict") if r.get("status", {}).get("answeredAt")]
        )
        own_plane.kill_apiserver()
        eventually("the operator to notice", lambda: failures(running, "cluster") >= 2)
        assert http_get(f"{running.facts['http']}/healthz") == "ok\n"
        own_plane.start_apiserver()
        record = eventually("its end", lambda: phase(kubectl, "evict", "Succeeded"))
        assert record["status"]["attempts"] == 1
        kubectl.run("delete", "service", "web")
        eventually("the repair, by a watch that lives again", lambda: kubectl.get("service", "web"))
        (pod,) = node.pods.values()
        acted = metric(http_get(f"http://{pod.address}:9400/metrics"), EVICTED)
        assert acted == len(records(kubectl, "evict"))


def test_watches_that_were_refused_begin_anew(own_plane: ControlPlane, tmp_path: Path) -> None:
    """An API server that has just started says 404 to custom resources for a while, which ends kopf for good."""
    kubectl = Kubectl(own_plane.kubeconfig, tmp_path / "cache")
    scenario = {"pool": {"total": 100, "hot": 100, "peak": 0}}
    options = [f"--kubeconfig={own_plane.kubeconfig}", "--http-host=127.0.0.1", "--http-port=0", "--sweep-seconds=0.2"]
    with (
        Program("ullage_operator.main", options, tmp_path / "operator.log") as running,
        Kubelet(own_plane, "default", tmp_path / "node", engines=lambda n: scenario),
    ):
        kubectl.apply(service(replicas={"min": 1, "max": 1}, settleSeconds=3))
        eventually("an answer", lambda: [r for r in records(kubectl, "evict") if r.get("status", {}).get("answeredAt")])
        own_plane.kill_apiserver()
        own_plane.forget("apiextensions.k8s.io/customresourcedefinitions", "remediations.ullage.dev")
        own_plane.start_apiserver()
        eventually("the watches to end", lambda: failures(running, "watch"))
        definitions = crds(cel=own_plane.version() >= (1, 25))
        establish(kubectl, [text for text in definitions.values() if "name: remediations." in text])
        eventually("its end", lambda: phase(kubectl, "evict", "Succeeded"))
        kubectl.run("delete", "service", "web")
        eventually("the repair, by a watch that lives again", lambda: kubectl.get("service", "web"))
        assert http_get(f"{running.facts['http']}/healthz") == "ok\n"
