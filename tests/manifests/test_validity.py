"""Every kustomization builds; what it builds fits the schemas of Kubernetes, old and new, and itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster import Kubectl
from stack import program

from ullage_operator.settings import parse

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
FOLDERS = sorted(str(file.parent.relative_to(MANIFESTS)) for file in MANIFESTS.rglob("kustomization.yaml"))
OVERLAYS = ["cert-manager", "default", "dev", "prometheus-operator"]
"""What is applied as a whole, in the whole cluster."""
RELEASES = ["1.29", "1.33", "1.37"]
OTHERS = {"PrometheusRule", "PodMonitor", "Certificate", "Issuer"}
"""Kinds of other projects' operators, for which there is no schema here."""


def build(folder: str) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [str(kubectl), "kustomize", str(MANIFESTS / folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def named(objects: list[dict[str, Any]], kind: str, name: str = "ullage-operator") -> dict[str, Any]:
    (found,) = [obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name)]
    return found


def problems(obj: dict[str, Any], release: str) -> str | None:
    try:
        kubernetes_validate.validate(obj, release, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{obj['kind']} {obj['metadata']['name']}: {error.message}"
    return None


def test_all_folders_are_known() -> None:
    assert set(OVERLAYS) < set(FOLDERS)
    assert {"crd", "rbac", "operator", "webhook", "monitoring", "network", "namespaced"} < set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_built_objects_fit_the_schemas(folder: str) -> None:
    objects = build(folder)
    assert objects
    for obj in objects:
        if obj["kind"] not in OTHERS:
            for release in RELEASES:
                assert problems(obj, release) is None


def test_a_misspelt_field_is_noticed() -> None:
    deployment = named(build("operator"), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    assert "livenessProb" in str(problems(deployment, RELEASES[-1]))


@pytest.mark.parametrize("folder", OVERLAYS)
def test_no_object_is_there_twice_and_none_is_stray(folder: str) -> None:
    objects = build(folder)
    keys = [(obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in objects]
    assert len(keys) == len(set(keys))
    assert {namespace for _, namespace, _ in keys} <= {None, "ullage-system"}


def test_the_overlay_for_prometheus_operator_is_the_default_and_more() -> None:
    more = build("prometheus-operator")
    assert all(obj in more for obj in build("default"))
    kinds = {obj["kind"] for obj in more}
    assert {"PrometheusRule", "PodMonitor", "NetworkPolicy", "ConfigMap"} <= kinds


def test_rules_inside_objects_are_rules(tmp_path: Path) -> None:
    rules = [obj for obj in build("monitoring") if obj["kind"] == "PrometheusRule"]
    assert {obj["metadata"]["name"] for obj in rules} == {"ullage-engines", "ullage-operator"}
    for obj in rules:
        file = tmp_path / f"{obj['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(obj["spec"]))
        done = subprocess.run([program("promtool"), "check", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_dashboards_are_found_by_the_sidecar() -> None:
    maps = [obj for obj in build("monitoring/dashboards") if obj["kind"] == "ConfigMap"]
    assert len(maps) == 3
    for obj in maps:
        assert obj["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = obj["data"].items()
        assert text == (MANIFESTS / "monitoring" / "dashboards" / name).read_text()
        assert f"{json.loads(text)['uid']}.json" == name


def test_scraping_and_policy_name_ports_of_the_operator() -> None:
    objects = build("prometheus-operator")
    deployment = named(objects, "Deployment")
    template = deployment["spec"]["template"]
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    monitor, policy = named(objects, "PodMonitor")["spec"], named(objects, "NetworkPolicy")["spec"]
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} < ports
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    for selector in (monitor["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_overlay_for_development_is_one_operator_with_local_images() -> None:
    deployment = named(build("dev"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert deployment["spec"]["replicas"] == 1
    assert container["image"] == "ullage-operator:dev"
    assert container["imagePullPolicy"] == "IfNotPresent"
    given = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    parsed = parse(container["args"], given)
    assert (parsed.engine_image, parsed.agent_image) == ("ullage-engine:dev-cpu", "ullage-agent:dev")
    assert parsed.log_level == "debug"


@pytest.mark.envtest
@pytest.mark.parametrize("folder", ["network", "monitoring/dashboards"])
def test_a_real_server_takes_what_needs_no_other_operator(admin: Kubectl, folder: str) -> None:
    system = admin.within("ullage-system")
    system.run("apply", "-f", str(MANIFESTS / "default" / "namespace.yaml"))
    for obj in build(folder):
        system.apply(obj)
        assert system.get(obj["kind"].lower(), obj["metadata"]["name"])
