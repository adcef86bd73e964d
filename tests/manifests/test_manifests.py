"""What is applied to a cluster: renders, is locked down, grants no more than needed, is taken by a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Kubectl

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
SAMPLES = sorted((MANIFESTS / "samples").glob("*.yaml"))


def render(folder: str) -> list[dict[str, Any]]:
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [str(kubectl), "kustomize", str(MANIFESTS / folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [obj for obj in objects if obj["kind"] == kind]
    return found


def test_the_default_holds_everything() -> None:
    kinds = sorted(obj["kind"] for obj in render("default"))
    assert kinds == sorted(
        ["Namespace", "ServiceAccount", "ClusterRoleBinding", "Deployment", "Service"]
        + ["Role", "RoleBinding", "ValidatingWebhookConfiguration"]
        + ["ClusterRole"] * 3
        + ["CustomResourceDefinition"] * 2
    )


def test_the_operator_is_locked_down_and_one_of_its_copies_decides() -> None:
    deployment = only(render("operator"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert "--leader-elect" in container["args"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert not container["image"].endswith(":latest")


def test_the_operator_s_role_is_narrow() -> None:
    role = next(obj for obj in render("rbac") if obj["metadata"]["name"] == "ullage-operator" and "rules" in obj)
    for rule in role["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if set(rule["resources"]) & {"secrets", "services", "deployments", "pods"}:
            assert not {"delete", "deletecollection", "update"} & set(rule["verbs"])


def test_the_account_is_the_same_everywhere() -> None:
    objects = render("default")
    account = only(objects, "ServiceAccount")["metadata"]
    subject = only(objects, "ClusterRoleBinding")["subjects"][0]
    deployment = only(objects, "Deployment")
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]
    assert deployment["metadata"]["namespace"] == account["namespace"]


@pytest.mark.envtest
def test_a_real_server_takes_the_default(admin: Kubectl) -> None:
    """Without the CRDs, which the control plane already has in the form that fits its version."""
    objects = [obj for obj in render("default") if obj["kind"] != "CustomResourceDefinition"]
    system = admin.within("ullage-system")
    for obj in objects:
        system.apply(obj)
    assert system.get("deployment", "ullage-operator")


@pytest.mark.envtest
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.stem)
def test_a_real_server_takes_the_samples(kubectl: Kubectl, sample: Path) -> None:
    kubectl.run("apply", "-f", str(sample))
    name = yaml.safe_load(sample.read_text())["metadata"]["name"]
    stored = kubectl.get("infsvc", name)
    assert stored is not None
    assert stored["spec"]["remediation"]["historyLimit"] == 50, "defaults were filled in"
