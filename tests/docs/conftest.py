"""Where the commands of the docs run: a scratch folder that looks like a checkout, and a cluster with a small node."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from assets import AssetsMissing, find_or_build
from cluster import Kubectl, establish, eventually
from controlplane import ControlPlane
from kubelet import Kubelet
from processes import Program

from ullage_operator.crd import crds

ROOT = Path(__file__).parents[2]
CEL_SINCE = (1, 25)
FULL = {"pool": {"total": 100, "hot": 100, "peak": 0}}
KUBECTL = """#!/usr/bin/env bash
# an API server before 1.25 knows no CEL rules and refuses them where kubectl asks it to be strict
if [ "$1" = apply ]; then shift; exec {kubectl} apply --validate={validate} "$@"; fi
exec {kubectl} "$@"
"""
ULLAGE = """#!/usr/bin/env bash
# the operator of these tests runs outside the cluster, which `doctor` rightly finds amiss
{ullage} "$@"; status=$?
if [ "$1" = doctor ] && [ $status = 1 ]; then exit 0; fi
exit $status
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Shell:
    """Runs blocks in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        self.environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
        self.environment["KUBECACHEDIR"] = str(folder / ".kubecache")
        for name in ("manifests", "docs", "bench"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def program(self, name: str, text: str) -> None:
        """A program that goes before those of the same name."""
        file = self.folder / ".bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        if not self.environment["PATH"].startswith(str(file.parent)):
            self.environment["PATH"] = f"{file.parent}{os.pathsep}{self.environment['PATH']}"

    def run(self, text: str, timeout_s: float = 240) -> str:
        """What a block prints; it must end well."""
        script = f"set -e -o pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}\n"
        done = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n--> {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """For commands that need nothing."""
    return Shell(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, dict[str, str]]]:
    """A server that answers as a real vLLM did, and the ports to put in place of the docs' own."""
    trace = ROOT / "tests" / "agent" / "traces" / "vllm-0.32-load.txt.xz"
    body = lzma.decompress(trace.read_bytes())

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    metrics, host = free_port(), "--metrics-host 127.0.0.1"
    ports = {
        "127.0.0.1:8000": f"127.0.0.1:{server.server_port}",
        "127.0.0.1:9400": f"127.0.0.1:{metrics}",
        host: f"{host} --metrics-port {metrics}",
    }
    yield Shell(tmp_path_factory.mktemp("agent")), ports
    server.shutdown()
    thread.join()
    server.server_close()


class Playground:
    """A cluster of its own, an operator, and a node whose engines' caches are full."""

    def __init__(self, shell: Shell, kubectl: Kubectl, operator: Program) -> None:
        self.shell = shell
        self.kubectl = kubectl
        self.operator = operator

    def pod(self) -> str:
        return str(self.kubectl.list("pod", "ullage.dev/service=smollm2")[0]["metadata"]["name"])


@pytest.fixture(scope="module")
def playground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """The product installed, one sample served and remedied, so that each block can be run alone."""
    assets = _assets(request)
    shell = Shell(tmp_path_factory.mktemp("cluster"))
    cache = tmp_path_factory.mktemp("kubectl")

    def install(plane: ControlPlane) -> None:
        establish(Kubectl(plane.kubeconfig, cache), crds(cel=plane.version() >= CEL_SINCE).values())

    with ControlPlane(assets, before_controllers=install) as plane:
        kubectl = Kubectl(plane.kubeconfig, cache)
        new = plane.version() >= CEL_SINCE
        real = Path(sys.executable).parent
        shell.program("kubectl", KUBECTL.format(kubectl=real / "kubectl", validate=str(new).lower()))
        shell.program("ullage", ULLAGE.format(ullage=real / "ullage"))
        shell.environment["KUBECONFIG"] = str(plane.kubeconfig)
        shell.run("kubectl apply -k manifests/default")
        options = [f"--kubeconfig={plane.kubeconfig}", "--namespace=default", "--http-host=127.0.0.1", "--http-port=0"]
        log = tmp_path_factory.mktemp("operator") / "operator.log"
        node = Kubelet(plane, "default", tmp_path_factory.mktemp("node"), engines=lambda _: FULL)
        with Program("ullage_operator.main", [*options, "--sweep-seconds=0.5"], log) as operator, node:
            shell.run("kubectl apply -f manifests/samples/smollm2.yaml")
            eventually("a remediation that ended", lambda: _ended(kubectl), within_s=120)
            yield Playground(shell, kubectl, operator)


def _assets(request: pytest.FixtureRequest) -> Path:
    try:
        reporter = request.config.pluginmanager.getplugin("terminalreporter")
        return find_or_build(os.environ, reporter.write_line)
    except AssetsMissing as error:
        pytest.skip(str(error))


def _ended(kubectl: Kubectl) -> bool:
    return any((record.get("status") or {}).get("finishedAt") for record in kubectl.list("remed"))


@pytest.fixture(scope="module")
def proposed(playground: Playground) -> Playground:
    """With a proposal that waits."""
    playground.shell.run("kubectl apply -f manifests/samples/propose.yaml")
    waiting = ("get", "remed", "-o", "jsonpath={.items[*].status.phase}")
    eventually("a proposal", lambda: "Proposed" in playground.kubectl.run(*waiting), within_s=120)
    return playground


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Shell:
    """With the real small model; the sample's engine gets a port of its own."""
    shell = Shell(tmp_path_factory.mktemp("model"))
    sample = shell.folder / "manifests" / "samples" / "smollm2.yaml"
    text = sample.read_text()
    sample.write_text(re.sub(r"^(  engine:\n)", rf"\g<1>    port: {free_port()}\n", text, count=1, flags=re.M))
    assert model_folder.is_dir()
    return shell
