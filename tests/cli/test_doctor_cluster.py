"""`ullage doctor`, `top` and `explain` on a real API server: an installation that works, then broken in many ways."""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Kubectl, eventually
from controlplane import ControlPlane
from processes import Program

from ullage_operator.certificates import issue, server_name
from ullage_operator.secret import secret_data

pytestmark = pytest.mark.envtest

SERVICE = {
    "apiVersion": "ullage.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "web"},
    "spec": {
        "model": {"source": "/models/tiny"},
        "engine": {"kvCache": {"memory": "48Mi"}},
        "agent": {"pollSeconds": 0.2},
        "remediation": {"settleSeconds": 0.2, "evict": {"cooldownSeconds": 0.2}, "staleAfterPolls": 50},
    },
}
FULL = {"pool": {"total": 100, "hot": 100, "peak": 0}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_address() -> str:
    """An address of this machine that an API server may proxy to: it refuses loopback ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Installed:
    """One namespace with a service that was reconciled and remedied once, and an operator that has stopped since."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def ullage(self, *words: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ullage_cli.main", *words]
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        environment |= {"KUBECONFIG": str(kubeconfig or self.kubectl.kubeconfig)}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    def doctor(self, kubeconfig: Path | None = None) -> list[dict[str, str]]:
        """Findings about this namespace and the cluster."""
        done = self.ullage("doctor", "-n", self.kubectl.namespace, "-o", "json", kubeconfig=kubeconfig)
        assert done.returncode in (0, 1), done.stderr
        document = json.loads(done.stdout)
        assert done.returncode == document["exitStatus"]
        return list(document["findings"])

    def about(self, *subjects: str, kubeconfig: Path | None = None) -> list[dict[str, str]]:
        """Findings whose subject begins so, those that are fine left out."""
        found = self.doctor(kubeconfig)
        return [f for f in found if f["subject"].startswith(subjects) and f["level"] != "ok"]


@pytest.fixture(scope="module")
def installed(
    admin: Kubectl, operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """Run the operator and an agent of a full pool until the first remediation has worked; the agent goes on."""
    folder = tmp_path_factory.mktemp("installed")
    name = f"doctor-{secrets.token_hex(4)}"
    admin.run("create", "namespace", name)
    kubectl, ports = admin.within(name), (free_port(), free_port())
    agent = SERVICE["spec"]["agent"] | {"metricsPort": ports[0], "actionPort": ports[1]}  # type: ignore[index]
    kubectl.apply(SERVICE | {"spec": SERVICE["spec"] | {"agent": agent}})  # type: ignore[operator]
    options = [f"--kubeconfig={operator_kubeconfig}", "--http-host=127.0.0.1", "--http-port=0", "--sweep-seconds=0.2"]
    with Program("ullage_operator.main", [*options, f"--namespace={name}"], folder / "operator.log") as operator:
        pod = eventually("a pod", lambda: next(iter(kubectl.list("pod", "ullage.dev/service=web")), None))
        secret = eventually("the Secret", lambda: kubectl.get("secret", "web-agent"))
        for key, value in secret["data"].items():
            (folder / key).write_bytes(base64.b64decode(value))
        (folder / "scenario.json").write_text(json.dumps(FULL))
        arguments = ["--engine=fake", f"--engine-url={folder / 'scenario.json'}", f"--metrics-port={ports[0]}",
                     f"--action-port={ports[1]}", f"--tls-cert={folder / 'tls.crt'}", f"--tls-key={folder / 'tls.key'}",
                     f"--token-file={folder / 'token'}", "--poll-seconds=0.2", "--no-devices"]  # fmt: skip
        with Program("ullage_agent.main", arguments, folder / "agent.log"):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            status = {"phase": "Running", "podIP": own_address(), "conditions": [ready]}
            kubectl.patch_status("pod", pod["metadata"]["name"], status)
            eventually("a remediation", lambda: [r for r in kubectl.list("remed") if r["status"].get("finishedAt")])
            eventually("a risk", lambda: (kubectl.get("infsvc", "web") or {})["status"].get("risk"))
            operator.stop()
            yield Installed(kubectl)


OWN = ("InferenceService", "labels", "network", "certificate", "agent", "pod", "monitoring")


def test_what_works_is_found_to_work(installed: Installed) -> None:
    found = installed.doctor()
    fine = {f["subject"].split()[0] for f in found if f["level"] == "ok"}
    assert {"CRD", "labels", "network", "certificate"} <= fine, found
    assert not [f for f in found if f["subject"].startswith(OWN) and f["level"] == "error"], found


def test_agents_are_read_through_the_api_server(installed: Installed) -> None:
    found = [f for f in installed.doctor() if f["subject"].startswith("agent")]
    if own_address() == "127.0.0.1":
        assert [f["level"] for f in found] == ["unknown"]
    else:
        assert any(f["level"] == "ok" and "reads fake" in f["message"] for f in found), found


def test_action_ports_are_found_to_be_guarded(installed: Installed) -> None:
    (found,) = [f for f in installed.doctor() if f["subject"].startswith("actions of")]
    assert found["level"] == ("unknown" if own_address() == "127.0.0.1" else "ok"), found


def test_top_shows_the_service_its_engine_and_what_was_done(installed: Installed) -> None:
    done = installed.ullage("top", "-n", installed.kubectl.namespace, "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (service,) = document["services"]
    assert (service["name"], service["mode"]) == ("web", "Enforce")
    assert service["risk"] is not None
    assert document["remediations"][0]["service"] == "web"
    if own_address() != "127.0.0.1":
        assert service["engines"][0]["memoryBytes"]["total"] == 100 * 195_840
    words = installed.ullage("top", "-n", installed.kubectl.namespace, "--once").stdout
    assert f"{installed.kubectl.namespace}/web" in words


def test_explain_tells_a_stored_remediation(installed: Installed) -> None:
    name = installed.kubectl.list("remed")[0]["metadata"]["name"]
    done = installed.ullage("explain", name, "-n", installed.kubectl.namespace)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "Of 100 blocks 100 hot (100 %)" in words
    assert "the policy would have" in words
    missing = installed.ullage("explain", "nothing", "-n", installed.kubectl.namespace)
    assert missing.returncode == 2 and name in missing.stderr


@pytest.fixture
def patched(installed: Installed) -> Iterator[Callable[[str, str, Any], None]]:
    """Merge something into an object, and take it back afterwards."""
    undo: list[tuple[str, str, Any]] = []

    def patch(kind: str, name: str, change: Any, back: Any = None) -> None:
        installed.kubectl.run("patch", kind, name, "--type=merge", "-p", json.dumps(change))
        undo.append((kind, name, back))

    yield patch
    for kind, name, back in reversed(undo):
        installed.kubectl.run("patch", kind, name, "--type=merge", "-p", json.dumps(back))


Patch = Callable[..., None]


def test_a_service_that_selects_others(installed: Installed, patched: Patch) -> None:
    other, own = ({"spec": {"selector": {"ullage.dev/service": name}}} for name in ("wob", "web"))
    patched("service", "web", other, own)
    (found,) = installed.about("labels")
    assert found["level"] == "error" and "ullage.dev/service=wob" in found["message"]


def test_a_pod_that_gets_no_requests(installed: Installed, patched: Patch) -> None:
    (pod,) = installed.kubectl.list("pod", "ullage.dev/service=web")
    off, on = ({"metadata": {"labels": {"ullage.dev/traffic": value}}} for value in ("off", "on"))
    patched("pod", pod["metadata"]["name"], off, on)
    assert any("gets no requests" in f["message"] for f in installed.about("labels"))


def test_a_network_policy_that_shuts_the_operator_out(installed: Installed, patched: Patch) -> None:
    rules = (installed.kubectl.get("networkpolicy", "web") or {})["spec"]["ingress"]
    nobody = json.loads(json.dumps(rules))
    nobody[2]["from"][0]["podSelector"] = {"matchLabels": {"app.kubernetes.io/name": "somebody"}}
    patched("networkpolicy", "web", {"spec": {"ingress": nobody}}, {"spec": {"ingress": rules}})
    (found,) = installed.about("network")
    assert found["level"] == "error" and "for actions" in found["message"]


def test_a_certificate_that_has_expired(installed: Installed, patched: Patch) -> None:
    namespace = installed.kubectl.namespace
    data = (installed.kubectl.get("secret", "web-agent") or {})["data"]
    old = secret_data(issue(server_name("web", namespace), now=time.time() - 500 * 86_400))
    patched("secret", "web-agent", {"data": old}, {"data": data})
    (found,) = installed.about("certificate of " + namespace)
    assert found["level"] == "error" and "expired 135 days ago" in found["message"]


def test_a_change_that_no_operator_has_seen(installed: Installed, patched: Patch) -> None:
    high, default = ({"spec": {"remediation": {"riskThreshold": value}}} for value in (90, 85))
    patched("infsvc", "web", high, default)
    assert any("was not acted on yet" in f["message"] for f in installed.about("InferenceService"))


def test_an_operator_without_rights_and_lead(installed: Installed) -> None:
    """A second Deployment with the operator's label, whose account may do nothing."""
    kubectl = installed.kubectl
    labels = {"app.kubernetes.io/name": "ullage-operator"}
    container = {
        "name": "operator",
        "image": "x/ullage-operator:0.0.1",
        "args": ["--leader-elect", "--namespace=other"],
    }
    kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "ullage-operator", "labels": labels},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        }
    )
    try:
        account = f"system:serviceaccount:{kubectl.namespace}:default"
        found = installed.about(f"rights of {account}")
        assert any("may not get, list, watch inferenceservices.ullage.dev" in f["message"] for f in found), found
        assert all(f["fix"] == "kubectl apply -k manifests/rbac" for f in found)
        operator = installed.about(f"operator in {kubectl.namespace}")
        assert any("is not ready" in f["message"] for f in operator)
        assert any("nobody holds the lead" in f["message"] for f in operator)
        assert any("ullage-operator:0.0.1" in f["message"] for f in operator)
    finally:
        kubectl.run("delete", "deployment", "ullage-operator")


def test_what_may_not_be_read_is_not_counted_as_sound(
    installed: Installed, control_plane: ControlPlane, tmp_path: Path
) -> None:
    token = installed.kubectl.run("create", "token", "default", "--duration=1h").strip()
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(control_plane.kubeconfig_for(token)))
    found = installed.doctor(kubeconfig=file)
    unknown = [f["subject"] for f in found if f["level"] == "unknown"]
    assert any(subject.startswith("CRD") for subject in unknown)
    assert "operator" in unknown
    assert not [f for f in found if f["level"] == "ok" and f["subject"].startswith(("CRD", "rights", "labels"))]


def test_no_server_is_one_line(installed: Installed, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{free_port()}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "elsewhere"}}],
    }  # fmt: skip
    file.write_text(json.dumps(config))
    for command in ("doctor", "top", "explain"):
        done = installed.ullage(command, *(["x"] if command == "explain" else []), kubeconfig=file)
        assert done.returncode == 1, done.stdout
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "does not answer" in done.stderr
