"""What the operator makes of each sample fits the schemas of Kubernetes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ullage_operator.certificates import issue
from ullage_operator.desired import Images, desired_objects
from ullage_operator.features import Features
from ullage_operator.manifest import read_service

SAMPLES = sorted((Path(__file__).resolve().parents[2] / "manifests" / "samples").glob("*.yaml"))
EVERYTHING = Features(disruption_budget="policy/v1", pod_monitor=True, prometheus_rule=True, leader_worker_set=True)
RELEASES = ["1.29", "1.37"]
CREDENTIALS = issue("sample.agents.ullage.dev", now=time.time())


def made(sample: Path) -> dict[str, dict[str, Any]]:
    manifest = yaml.safe_load(sample.read_text())
    manifest["metadata"] |= {"namespace": "chat", "uid": "5c6a3a3e-8f0e-4f9e-9d0b-0d2f3f7a1b11"}
    service = read_service(manifest)
    images = Images(engine="ullage-engine:1", agent="ullage-agent:1")
    objects = desired_objects(service, images=images, credentials=CREDENTIALS, features=EVERYTHING)
    return {obj["kind"]: obj for obj in objects}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_objects_of_a_sample_fit_the_schemas(sample: Path) -> None:
    objects = made(sample)
    workload = objects.get("LeaderWorkerSet") or objects["Deployment"]
    templates = [workload["spec"]["template"]] if workload["kind"] == "Deployment" else _templates(workload)
    for release in RELEASES:
        for obj in objects.values():
            if obj["kind"] in ("Deployment", "Service", "Secret", "PodDisruptionBudget", "NetworkPolicy"):
                kubernetes_validate.validate(obj, release, strict=True)
        for template in templates:
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            kubernetes_validate.validate(pod, release, strict=True)


def _templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    template = workload["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def test_samples_are_one_of_each_kind_of_use() -> None:
    specs = {path.stem: yaml.safe_load(path.read_text())["spec"] for path in SAMPLES}
    assert {spec["engine"].get("type", "ullage") for spec in specs.values()} == {"ullage", "vllm", "sglang"}
    assert specs["llama-3-70b"]["engine"]["tensorParallel"] > 1
    assert specs["multi-node"]["engine"]["nodes"] > 1
    assert specs["propose"]["remediation"]["mode"] == "Propose"
    assert specs["llama-3-8b-fp8"]["engine"]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in SAMPLES]
    assert len(names) == len(set(names))
