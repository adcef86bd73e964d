"""Prometheus without its operator: the shipped jobs, and the ones in the docs, find engines and name their services."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cluster import eventually
from demo import DemoServer
from discovery import targets
from mixin.parts import Alert
from mixin.render import RULE_FILES
from stack import MONITORING, ROOT, Prometheus

from ullage_operator.manifest import read_service
from ullage_operator.pods import Images, pod_template

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
SERVICE: dict[str, Any] = {
    "apiVersion": "ullage.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "web", "namespace": "chat", "uid": "1"},
    "spec": {"model": {"source": "/models/m"}, "engine": {"kvCache": {"memory": "9Mi"}}},
}


def block(start: str) -> dict[str, Any]:
    """The page's YAML block that begins like this."""
    (text,) = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if text.startswith(start)]
    return dict(yaml.safe_load(text))


def pod(name: str, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    """A pod as the operator would have it made."""
    service = read_service({**SERVICE, "spec": {**SERVICE["spec"], **spec}})
    template = pod_template(service, Images(engine="e", agent="a"))
    metadata = {**template["metadata"], "namespace": "chat", "name": name}
    return {**template, "metadata": metadata, "status": {"phase": phase, "podIP": "127.0.0.1"}}


def foreign(name: str) -> dict[str, Any]:
    """A pod that is none of ours and has a port of the same name."""
    container = {"name": "c", "ports": [{"name": "http", "containerPort": 80}]}
    metadata = {"namespace": "other", "name": name, "labels": {"app.kubernetes.io/name": "shop"}}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {"phase": "Running", "podIP": "::1"}}


def operator() -> dict[str, Any]:
    """The operator's pod, from its manifest."""
    (deployment,) = yaml.safe_load_all((ROOT / "manifests" / "operator" / "deployment.yaml").read_text())
    template = deployment["spec"]["template"]
    metadata = {**template["metadata"], "namespace": "ullage-system", "name": "ullage-operator-0"}
    return {**template, "metadata": metadata, "status": {"phase": "Running", "podIP": "127.0.0.1"}}


def configuration(folder: Path, jobs: list[dict[str, Any]], pods: list[dict[str, Any]]) -> dict[str, Any]:
    """Jobs whose discovery of pods is replaced by a file with the same labels."""
    file = folder / "pods.json"
    file.write_text(json.dumps([target for pod in pods for target in targets(pod)]))
    for job in jobs:
        if job.pop("kubernetes_sd_configs", None):
            job["file_sd_configs"] = [{"files": [str(file)]}]
    return {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}


def found(prometheus: Prometheus) -> list[tuple[str, ...]]:
    """Job, address, namespace, pod and service of each target."""
    labels = [target["labels"] for target in prometheus.get("targets", state="active")["activeTargets"]]
    names = ("job", "instance", "namespace", "pod", "ullage_service")
    return sorted(tuple(target.get(name, "") for name in names) for target in labels)


def test_shipped_jobs_find_ours_and_nothing_else(tmp_path: Path) -> None:
    shipped = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    pods = [pod("web-1"), pod("web-2", "Succeeded"), pod("web-3", "Pending"), foreign("shop-1"), operator()]
    expected = [
        ("ullage", "127.0.0.1:8000", "chat", "web-1", "web"),
        ("ullage", "127.0.0.1:9400", "chat", "web-1", "web"),
        ("ullage-agents", "localhost:9400", "", "", "smollm2"),
        ("ullage-operator", "127.0.0.1:8080", "ullage-system", "ullage-operator-0", ""),
    ]
    with Prometheus(tmp_path, configuration(tmp_path, shipped["scrape_configs"], pods)) as prometheus:
        assert eventually("targets", lambda: found(prometheus) if len(found(prometheus)) >= len(expected) else None)
        assert found(prometheus) == expected


def test_annotated_pods_are_scraped_under_their_service_s_name(tmp_path: Path) -> None:
    template = block("spec:\n  podTemplate")["spec"]["podTemplate"]
    with DemoServer() as server:
        template["metadata"]["annotations"] |= {
            "prometheus.io/port": server.address.split(":")[1],
            "prometheus.io/path": "/agent",
        }
        pods = [pod("web-1", podTemplate=template), pod("web-2"), foreign("shop-1")]
        jobs = [block("job_name: annotated-pods")]
        with Prometheus(tmp_path, configuration(tmp_path, jobs, pods)) as prometheus:
            series = eventually("a risk", lambda: prometheus.instant("llm_oom_risk_score"))
            assert found(prometheus) == [("annotated-pods", server.address, "chat", "web-1", "web")]
    (labels,) = [one["metric"] for one in series]
    assert (labels["namespace"], labels["pod"], labels["ullage_service"]) == ("chat", "web-1", "web")


def test_the_scraper_s_rights_are_a_valid_role() -> None:
    role = yaml.safe_load((MONITORING / "prometheus" / "scraper.yaml").read_text())
    kubernetes_validate.validate(role, "1.37", strict=True)
    (rule,) = role["rules"]
    assert (rule["resources"], sorted(rule["verbs"])) == (["pods"], ["get", "list", "watch"])


def test_the_page_lists_the_alerts_as_they_are() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| .+ \| (\w+) \| (\w+) \|$", PAGE, re.M)
    alerts: list[Alert] = [alert for rules in RULE_FILES for alert in rules.alerts()]
    assert {(name, hold, severity) for name, _, hold, severity in rows} == {
        (alert.name, alert.hold, alert.severity) for alert in alerts
    }
    assert all(name == page for name, page, _, _ in rows)


def test_the_page_names_the_recorded_series() -> None:
    recorded = {
        rule.name for rules in RULE_FILES for g in rules.groups for rule in g.rules if not isinstance(rule, Alert)
    }
    named = set(re.findall(r"`((?:engine|service):[\w:]+)`", PAGE))
    assert named == {name for name in recorded if not name.endswith("_avg1d")}
