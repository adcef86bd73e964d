"""The manifests build, and an operator of one namespace has the cluster-wide one's rights in it and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_operator.settings import parse

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
CLUSTER_ONLY = {"namespaces", "customresourcedefinitions", "validatingwebhookconfigurations"}


def build(overlay: str) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", MANIFESTS / overlay], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def rights(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def of_kind(objects: list[dict[str, Any]], kind: str, name: str = "ullage-operator") -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def test_rights_of_both_agree() -> None:
    wide = rights(of_kind(build("default"), "ClusterRole")["rules"])
    election = rights(of_kind(build("default"), "Role", "ullage-operator-election")["rules"])
    narrow = rights(of_kind(build("namespaced"), "Role")["rules"])
    assert narrow == {right for right in wide if right[1] not in CLUSTER_ONLY} | election


def test_a_namespaced_operator_is_only_in_its_namespace() -> None:
    objects = build("namespaced")
    assert {o["metadata"].get("namespace") for o in objects} == {"ullage"}
    assert not {o["kind"] for o in objects} & {"ClusterRole", "ClusterRoleBinding", "ValidatingWebhookConfiguration"}


@pytest.mark.parametrize("overlay", ["default", "namespaced", "cert-manager"])
def test_the_deployment_s_arguments_are_the_program_s(overlay: str, tmp_path: Path) -> None:
    container = of_kind(build(overlay), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    pem = tmp_path / "pem"
    pem.touch()
    arguments = [a.replace("/etc/ullage/endpoint/tls", str(pem)).replace("pem.crt", "pem") for a in container["args"]]
    parsed = parse([a.replace("pem.key", "pem") for a in arguments], {})
    assert parsed.leader_elect
    assert parsed.endpoint_port == 8443
    assert {p["containerPort"] for p in container["ports"]} == {8080, 8443}


def test_the_webhook_s_service_is_the_one_in_the_certificate() -> None:
    hook = of_kind(build("default"), "ValidatingWebhookConfiguration")["webhooks"][0]
    service = hook["clientConfig"]["service"]
    parsed = parse([], {"POD_NAMESPACE": service["namespace"]})
    assert parsed.endpoint_name == f"{service['name']}.{service['namespace']}.svc"
    assert hook["failurePolicy"] == "Ignore"
