"""What Dockerfiles promise: pinned, no root, no compiler, labelled, watched; ports and paths of the manifests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile import COMPONENTS, ROOT, image, stages

from ullage_operator.pods import USER_ID

COMPILERS = re.compile(r"\b(?:gcc|g\+\+|clang|build-essential|cmake)\b")
HEALTH = {"operator": (8080, "/healthz"), "agent": (9400, "/healthz"), "engine": (8000, "/health")}
PORTS = {"operator": "8080 8443", "agent": "9400 9401", "engine": "8000"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_hadolint_has_nothing_to_say(component: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--config", str(ROOT / "images" / "hadolint.yaml"), str(ROOT / component / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("component", COMPONENTS)
def test_bases_are_pinned(component: str) -> None:
    text = (ROOT / component / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-slim-bookworm$", text, re.MULTILINE)
    own = {"base", "torch-${VARIANT}"}
    assert {stage.base for stage in stages(component)} <= {"python:${PYTHON}", *own}
    installs = [run for stage in stages(component) for run in stage.all("RUN") if "pip install" in run]
    for run in installs:
        assert "--constraint constraints.txt" in run or "torch==" in run


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_image_runs_locked_down(component: str) -> None:
    last = image(component)
    assert last.only("USER") == f"{USER_ID}:{USER_ID}"
    environment = last.pairs("ENV")
    assert environment["USER"], "kopf and others ask for it where there is no entry in /etc/passwd"
    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    runs = last.all("RUN")
    assert not any(COMPILERS.search(run) for run in runs)
    assert any("pip uninstall" in run for run in runs)
    assert last.command("ENTRYPOINT") == [f"ullage-{component}"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_image_says_what_it_is(component: str) -> None:
    labels = image(component).pairs("LABEL")
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"ullage-{component}"
    assert labels[f"{prefix}version"] == "${VERSION}"
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert {f"{prefix}description", f"{prefix}revision"} <= labels.keys()


@pytest.mark.parametrize("component", COMPONENTS)
def test_health_is_asked_where_the_program_answers(component: str) -> None:
    last = image(component)
    port, path = HEALTH[component]
    assert f"http://127.0.0.1:{port}{path}" in last.command("HEALTHCHECK")[-1]
    assert last.only("EXPOSE") == PORTS[component]


def test_the_operator_s_manifest_names_the_image_and_its_program() -> None:
    (deployment,) = yaml.safe_load_all((ROOT / "manifests" / "operator" / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == image("operator").command("ENTRYPOINT")
    assert container["image"].split(":")[0] == image("operator").pairs("LABEL")["org.opencontainers.image.title"]
    assert pod["securityContext"]["runAsUser"] == USER_ID
    assert " ".join(str(port["containerPort"]) for port in container["ports"]) == PORTS["operator"]


@pytest.mark.parametrize(("component", "extra"), [("agent", "agent"), ("operator", "operator"), ("engine", "engine")])
def test_an_image_holds_its_own_set_of_packages(component: str, extra: str) -> None:
    builder = stages(component)[-2]
    (run,) = [run for run in builder.all("RUN") if "pip install --constraint" in run]
    assert f"'.[{extra}]'" in run
    assert "pip check" in run


def test_the_engine_compiles_before_it_runs() -> None:
    *_, builder, last = stages("engine")
    made = re.findall(r"/opt/ullage/kernels/\S+\.so", " ".join(builder.all("RUN")))
    assert made == [last.pairs("ENV")["ULLAGE_CPU_KERNELS"]]
    assert last.pairs("ENV")["PATH"].startswith("/opt/ullage/start:")
    assert "libgomp1" in " ".join(last.all("RUN"))


def test_what_is_copied_is_let_through() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for component in COMPONENTS:
        for stage in stages(component):
            for copy in stage.all("COPY"):
                sources = [] if copy.startswith("--from") else copy.split()[:-1]
                for source in sources:
                    assert (ROOT / source).exists()
                    assert any(
                        name == source or name.startswith(f"{source}/") or source.startswith(f"{name}/")
                        for name in allowed
                    )
