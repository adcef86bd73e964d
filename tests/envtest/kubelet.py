"""A small node for tests: runs the pods of a namespace as processes of this machine, each under an address of its own.

    with Kubelet(plane, "my-namespace", folder) as kubelet: …

Every pod gets a loopback address as its IP, so ports are what the pod says. Of a container it honours command and
arguments, mounted Secrets and emptyDirs (as folders), httpGet probes, preStop exec and the grace period. With
`engines` given, the engine container is not run and the agent reads that scripted or simulated engine instead.
Not honoured: images, resources, security, init containers, restarts.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane import ControlPlane

POLL_S = 0.2
PROBE_S = 0.3
HEARTBEAT_S = 5.0
MODULES = {"ullage-engine": "ullage_engine.main", "ullage-agent": "ullage_agent.main"}
ADDRESSES = itertools.count(int.from_bytes(os.urandom(2)) % 60_000)


class Api:
    """JSON calls to the API server as the administrator."""

    def __init__(self, plane: ControlPlane) -> None:
        self._server = plane.server
        self._token = plane.token
        context = ssl.create_default_context(cafile=str(plane.ca))
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> dict[str, Any]:
        """The answer. Raises OSError; urllib.error.HTTPError for an error status."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        request = urllib.request.Request(self._server + path, data=data, method=method, headers=headers)
        with self._opener.open(request, timeout=10) as response:
            return dict(json.loads(response.read()))


@dataclass
class RunningPod:
    """A pod's processes."""

    obj: dict[str, Any]
    address: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    ready: bool | None = None
    ending: threading.Thread | None = None

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])


class Kubelet:
    """Runs pods while it is entered; leaves no process behind."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        engines: Callable[[int], dict[str, Any]] | None = None,
        schedulable: Callable[[int], bool] = lambda index: True,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`engines` gives the n-th pod's scenario of a fake engine; `schedulable` says whether the n-th pod fits."""
        self._api = Api(plane)
        self._base = f"/api/v1/namespaces/{namespace}"
        self._folder = folder
        self._engines = engines
        self._schedulable = schedulable
        self._environment = environment or {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._node = f"node-{namespace}"
        self._seen: set[str] = set()
        self.pods: dict[str, RunningPod] = {}
        self.ended: dict[str, int] = {}
        """Exit status of each engine that ended, by pod."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for pod in list(self.pods.values()):
            for process in pod.processes.values():
                process.kill()
                process.wait()
            if pod.ending is not None:
                pod.ending.join()

    def log(self, pod: str, container: str) -> str:
        """What a container wrote."""
        file = self._folder / pod / f"{container}.log"
        return file.read_text(errors="replace")[-3000:] if file.exists() else "(no log)"

    def _run(self) -> None:
        beat = float("-inf")
        while not self._stop.wait(POLL_S):
            # The API server may be down on purpose; a node goes on and asks again.
            with contextlib.suppress(OSError):
                if time.monotonic() - beat > HEARTBEAT_S:
                    self._heartbeat()
                    beat = time.monotonic()
                self._sync()
        with contextlib.suppress(OSError):
            self._api.call("DELETE", f"/api/v1/nodes/{self._node}")

    def _heartbeat(self) -> None:
        """Pods of a node that is not there, or silent, are taken away by the cluster."""
        with contextlib.suppress(urllib.error.HTTPError):
            self._api.call("POST", "/api/v1/nodes", {"metadata": {"name": self._node}})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
        body = {"status": {"conditions": [ready]}}
        self._api.call("PATCH", f"/api/v1/nodes/{self._node}/status", body, "application/strategic-merge-patch+json")

    def _sync(self) -> None:
        pods = self._api.call("GET", f"{self._base}/pods?labelSelector=ullage.dev/service")["items"]
        there = {obj["metadata"]["uid"] for obj in pods}
        for uid, running in list(self.pods.items()):
            if uid not in there and running.ending is None:
                running.ending = threading.Thread(target=self._end, args=(uid, running), daemon=True)
                running.ending.start()
        for obj in sorted(pods, key=lambda o: str(o["metadata"]["creationTimestamp"])):
            uid = obj["metadata"]["uid"]
            if uid not in self._seen and not obj["metadata"].get("deletionTimestamp"):
                self._admit(obj)
            present = self.pods.get(uid)
            if present is None:
                if obj["metadata"].get("deletionTimestamp"):
                    self._remove(obj)
                continue
            if obj["metadata"].get("deletionTimestamp") and present.ending is None:
                present.ending = threading.Thread(target=self._end, args=(uid, present), daemon=True)
                present.ending.start()
            self._probe(present)

    def _admit(self, obj: dict[str, Any]) -> None:
        uid = obj["metadata"]["uid"]
        if not self._schedulable(len(self._seen)):
            self._seen.add(uid)
            unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            self._status(obj, {"phase": "Pending", "conditions": [unschedulable]})
            return
        number = next(ADDRESSES)
        address = f"127.{100 + number // 62_500}.{number // 250 % 250 + 1}.{number % 250 + 1}"
        pod = RunningPod(obj, address, self._folder / obj["metadata"]["name"])
        pod.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(pod, len(self._seen))
        except urllib.error.HTTPError as error:
            if error.code == 404:  # the Secret is not there yet
                return
            raise
        # Only pods that are bound end with grace; others are deleted at once.
        target = {"kind": "Node", "name": self._node}
        binding = {"metadata": {"name": pod.name}, "target": target}
        self._api.call("POST", f"{self._base}/pods/{pod.name}/binding", binding)
        self._seen.add(uid)
        self.pods[uid] = pod
        self._status(obj, {"phase": "Running", "podIP": address, "conditions": [_condition(False)]})

    def _start(self, pod: RunningPod, index: int) -> None:
        mounts = pod.mounts = self._volumes(pod)
        for container in pod.obj["spec"]["containers"]:
            name = container["name"]
            if name == "engine" and self._engines is not None:
                continue
            arguments = [self._translate(word, pod, mounts) for word in container.get("args", [])]
            if name == "agent" and self._engines is not None:
                scenario = pod.folder / "scenario.json"
                scenario.write_text(json.dumps(self._engines(index)))
                arguments = [a for a in arguments if not a.startswith(("--engine=", "--engine-url="))]
                arguments += ["--engine=fake", f"--engine-url={scenario}"]
            module = MODULES[container["command"][0]]
            environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
            with (pod.folder / f"{name}.log").open("ab") as log:
                pod.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env={**environment, **self._environment},
                    start_new_session=True,
                )

    def _volumes(self, pod: RunningPod) -> dict[str, str]:
        """Folder on this machine by path in the pod."""
        folders: dict[str, str] = {}
        for volume in pod.obj["spec"]["volumes"]:
            folder = pod.folder / volume["name"]
            folder.mkdir(exist_ok=True)
            folders[volume["name"]] = str(folder)
            if "secret" in volume:
                secret = self._api.call("GET", f"{self._base}/secrets/{volume['secret']['secretName']}")
                for key, value in secret["data"].items():
                    (folder / key).write_bytes(base64.b64decode(value))
        mounts = [m for c in pod.obj["spec"]["containers"] for m in c.get("volumeMounts", [])]
        return {m["mountPath"]: folders[m["name"]] for m in mounts if m["mountPath"] != "/tmp"}

    def _translate(self, word: str, pod: RunningPod, mounts: dict[str, str]) -> str:
        for path in sorted(mounts, key=len, reverse=True):
            word = word.replace(path, mounts[path])
        if word.startswith("--cache-dir=") and "ULLAGE_TEST_CACHE" in self._environment:
            return f"--cache-dir={self._environment['ULLAGE_TEST_CACHE']}"
        return word.replace("0.0.0.0", pod.address)

    def _probe(self, pod: RunningPod) -> None:
        probed = "agent" if self._engines is not None else "engine"
        container = next(c for c in pod.obj["spec"]["containers"] if c["name"] == probed)
        ready = all(process.poll() is None for process in pod.processes.values())
        get = (container.get("readinessProbe") or container["livenessProbe"])["httpGet"]
        port = next(p["containerPort"] for p in container["ports"] if p["name"] == get["port"])
        ready = ready and _answers(f"http://{pod.address}:{port}{get['path']}")
        if ready != pod.ready:
            self._status(pod.obj, {"phase": "Running", "podIP": pod.address, "conditions": [_condition(ready)]})
            pod.ready = ready

    def _end(self, uid: str, pod: RunningPod) -> None:
        grace = pod.obj["spec"].get("terminationGracePeriodSeconds", 30)
        deadline = time.monotonic() + grace
        ends = [threading.Thread(target=self._stop_container, args=(pod, name, deadline)) for name in pod.processes]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        self.pods.pop(uid, None)
        with contextlib.suppress(OSError):
            self._remove(pod.obj)

    def _stop_container(self, pod: RunningPod, name: str, deadline: float) -> None:
        """Each container by itself, as a node does: its hook, then SIGTERM, then the kill."""
        container = next(c for c in pod.obj["spec"]["containers"] if c["name"] == name)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook and self._engines is None:
            command = [self._translate(word, pod, pod.mounts) for word in hook]
            command[0] = command[0].replace("python3", sys.executable)
            with (pod.folder / f"prestop-{name}.log").open("ab") as log:
                subprocess.run(command, stdout=log, stderr=log, timeout=deadline - time.monotonic(), check=False)
        process = pod.processes[name]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, deadline - time.monotonic()))
        process.kill()
        status = process.wait()
        if name == "engine":
            self.ended[pod.name] = status

    def _status(self, obj: dict[str, Any], status: dict[str, Any]) -> None:
        path = f"{self._base}/pods/{obj['metadata']['name']}/status"
        with contextlib.suppress(urllib.error.HTTPError):  # it may have gone meanwhile
            self._api.call("PATCH", path, {"status": status}, "application/strategic-merge-patch+json")

    def _remove(self, obj: dict[str, Any]) -> None:
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": obj["metadata"]["uid"]}}
        with contextlib.suppress(urllib.error.HTTPError):
            self._api.call("DELETE", f"{self._base}/pods/{obj['metadata']['name']}", body)


def _condition(ready: bool) -> dict[str, str]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "Ready", "status": str(ready), "lastTransitionTime": now}


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_S * 5) as response:
            return int(response.status) < 400
    except OSError:
        return False
