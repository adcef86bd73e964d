"""The images' sets of packages in plain folders, run as the images run: read-only, as a user nobody knows.

The sets of agent and operator are installed anew from the same requirements. The engine's is heavy: what is installed
for the tests is used for it, and its requirements are resolved without being installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import eventually
from controlplane import ControlPlane, free_port
from dockerfile import ROOT, image, stages
from processes import http_get
from rootfs import USER, RootFs, obstacle

HEAVY = ("torch", "transformers", "triton")
INSTALL_S = 400
SMALL_MB = {"agent": 60, "operator": 250}
"""Bounds on the sets: a heavy dependency that creeps in shows here."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)


def install(folder: Path, extra: str) -> Path:
    """As in the Dockerfile's builder."""
    target = folder / extra
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True, timeout=INSTALL_S)
    pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wanted = f"{ROOT}[{extra}]"
    subprocess.run(
        [*pip, "install", "--constraint", str(ROOT / "constraints.txt"), wanted], check=True, timeout=INSTALL_S
    )
    subprocess.run([*pip, "check"], check=True, timeout=60)
    subprocess.run([*pip, "uninstall", "--yes", "pip"], check=True, timeout=60)
    return target


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of the light images."""
    folder = tmp_path_factory.mktemp("sets")
    return {extra: install(folder, extra) for extra in ("agent", "operator")}


def environment(component: str, packages: Path) -> dict[str, str]:
    """The image's, with its folder being elsewhere."""
    given = image(component).pairs("ENV")
    return {**given, "PATH": given["PATH"].replace("/opt/ullage/bin", str(packages / "bin"))}


@contextmanager
def running(rootfs: RootFs, command: list[str], given: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A program inside, from its `ready:` line to a clean end."""
    process = rootfs.start(command, given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            pytest.fail("".join(lines))
        yield {**json.loads(lines[-1].removeprefix("ready: ")), "pid": process.pid}
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def owner(pid: int) -> tuple[set[str], str]:
    """Users and groups that a process has, and its capabilities."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {*status["Uid"].split(), *status["Gid"].split(), *status["Groups"].split()}, status["CapEff"].strip()


@pytest.mark.parametrize("component", ["agent", "operator"])
def test_a_light_image_has_nothing_heavy(sets: dict[str, Path], component: str) -> None:
    names = {path.name.split("-")[0].lower() for path in sets[component].rglob("*.dist-info")}
    assert "ullage" in names
    assert not names & {*HEAVY, "pip"}
    size = sum(file.stat().st_size for file in sets[component].rglob("*") if not file.is_symlink()) / 1e6
    assert size < SMALL_MB[component]


@pytest.mark.parametrize("component", ["agent", "operator"])
def test_a_root_file_system_is_read_only(sets: dict[str, Path], tmp_path: Path, component: str) -> None:
    packages = sets[component]
    rootfs = RootFs(tmp_path, [packages])
    given = environment(component, packages)
    script = "id -u; id -un 2>&1; touch /x 2>&1; touch /opt/x 2>&1; touch /tmp/x && echo written"
    said = rootfs.run(["/bin/sh", "-c", script], given).stdout
    assert said.startswith(f"{USER}\n")
    assert "cannot find name" in said
    assert said.count("Read-only file system") == 1
    assert said.endswith("written\n")


@pytest.mark.parametrize("component", ["agent", "operator"])
def test_a_program_starts_and_says_its_version(sets: dict[str, Path], tmp_path: Path, component: str) -> None:
    packages = sets[component]
    done = RootFs(tmp_path, [packages]).run(
        [*image(component).command("ENTRYPOINT"), "--version"], environment(component, packages)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_agent_serves(sets: dict[str, Path], tmp_path: Path) -> None:
    packages = sets["agent"]
    scenario = tmp_path / "scenario.json"
    scenario.write_text(json.dumps({"pool": {"total": 100, "hot": 50}}))
    rootfs = RootFs(tmp_path / "fs", [packages, scenario])
    port = free_port()
    command = [*image("agent").command("ENTRYPOINT"), "--engine=fake", f"--engine-url={scenario}"]
    command += ["--metrics-host=127.0.0.1", f"--metrics-port={port}"]
    given = environment("agent", packages)
    with running(rootfs, command, given) as facts:
        assert facts["metrics"] == f"http://127.0.0.1:{port}"
        assert owner(facts["pid"]) == ({str(USER)}, "0" * 16)
        assert eventually("a risk", lambda: "llm_oom_risk_score" in http_get(f"{facts['metrics']}/metrics"))
        check = [word.replace("9400", str(port)) for word in image("agent").command("HEALTHCHECK")]
        assert rootfs.run(check, given).returncode == 0
    assert rootfs.run(check, given).returncode != 0, "the health check notices that nobody answers"


@pytest.mark.envtest
def test_the_operator_leads(
    sets: dict[str, Path], tmp_path: Path, control_plane: ControlPlane, operator_kubeconfig: Path
) -> None:
    packages = sets["operator"]
    kubeconfig = json.loads(operator_kubeconfig.read_text())
    authority = kubeconfig["clusters"][0]["cluster"]
    rootfs = RootFs(tmp_path / "fs", [packages])
    (rootfs.tmp / "ca.crt").write_text(Path(authority["certificate-authority"]).read_text())
    authority["certificate-authority"] = "/tmp/ca.crt"
    (rootfs.tmp / "kubeconfig").write_text(json.dumps(kubeconfig))
    port = free_port()
    command = [*image("operator").command("ENTRYPOINT"), "--kubeconfig=/tmp/kubeconfig", "--namespace=default"]
    command += ["--http-host=127.0.0.1", f"--http-port={port}"]
    given = environment("operator", packages)
    with running(rootfs, command, given) as facts:
        assert owner(facts["pid"]) == ({str(USER)}, "0" * 16)
        assert http_get(f"{facts['http']}/readyz")
        check = [word.replace("8080", str(port)) for word in image("operator").command("HEALTHCHECK")]
        assert rootfs.run(check, given).returncode == 0


def test_the_engine_s_requirements_resolve() -> None:
    """Against what is installed and the index; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--dry-run"]
    wanted = ["--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[engine]"]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr


def compiled(folder: Path) -> Path:
    """The CPU's kernels, by the command of the image's builder."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here, which the image's builder has")
    (run,) = [run for run in stages("engine")[-2].all("RUN") if "cpu_build" in run]
    (target,) = re.findall(r"-m ullage_engine\.kernels\.cpu_build (\S+) --march", run)
    (march,) = re.findall(r"MARCH=(\S+)", " ".join(stages("engine")[-2].all("ARG")))
    made = folder / Path(target).name
    command = [sys.executable, "-m", "ullage_engine.kernels.cpu_build", str(made), "--march", march]
    subprocess.run(command, check=True, timeout=INSTALL_S)
    return made


def test_triton_s_driver_module_is_made_without_a_driver(tmp_path: Path) -> None:
    """In a place of the cache that depends on Triton's source alone, so the image's first kernel finds it."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here, which the image's builder has")
    command = [sys.executable, str(ROOT / "images" / "triton_seed.py"), str(tmp_path)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    (module,) = map(Path, done.stdout.split())
    assert module.read_bytes()[:4] == b"\x7fELF"
    assert module.parent.parent == tmp_path


@pytest.mark.model
def test_the_engine_answers(tmp_path: Path, model_folder: Path) -> None:
    """With the packages that are installed here for the tests, torch among them."""
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "model.safetensors").chmod(0o644)  # a cache is its owner's; a volume of models is everybody's
    kernels = compiled(tmp_path)
    rootfs = RootFs(tmp_path / "fs", [Path(sys.prefix), ROOT, model, kernels])
    given = {**environment("engine", Path(sys.prefix)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    given["ULLAGE_CPU_KERNELS"] = str(kernels)
    port = free_port()
    command = [*image("engine").command("ENTRYPOINT"), f"--model={model}", "--served-name=smol", "--threads=1"]
    command += ["--host=127.0.0.1", f"--port={port}", "--kv-memory=8MiB", "--max-model-len=256"]
    with running(rootfs, command, given) as facts:
        assert owner(facts["pid"]) == ({str(USER)}, "0" * 16)
        body = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        check = [word.replace("8000", str(port)) for word in image("engine").command("HEALTHCHECK")]
        assert rootfs.run(check, given).returncode == 0
