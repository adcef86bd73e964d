"""Children of a service: locked down, complete, and the same for the same spec."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from ullage_operator.arguments import AgentFiles, agent_arguments, engine_arguments
from ullage_operator.certificates import issue, valid
from ullage_operator.desired import Images, credentials_of, desired_objects
from ullage_operator.manifest import read_service
from ullage_operator.targets import agent_targets, known_pod, read_target

IMAGES = Images(engine="engine:1", agent="agent:1")
CREDENTIALS = issue("web.prod.agents.ullage.dev", now=time.time())


def objects(service: Any) -> dict[str, Any]:
    return {o["kind"]: o for o in desired_objects(service, images=IMAGES, credentials=CREDENTIALS)}


def containers(service: Any) -> dict[str, Any]:
    pod = objects(service)["Deployment"]["spec"]["template"]["spec"]
    return {c["name"]: c for c in pod["containers"]}


def test_children_are_owned_labelled_and_stable(build: Any) -> None:
    made = objects(build.service())
    assert made == objects(build.service())
    assert set(made) == {"Secret", "Service", "Deployment", "NetworkPolicy"}
    for child in made.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-web", True)
        assert child["metadata"]["labels"]["ullage.dev/service"] == "web"
        assert child["metadata"]["namespace"] == "prod"


def test_pods_are_locked_down(build: Any) -> None:
    pod = objects(build.service())["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert "/tmp" in writable


def test_every_mount_has_its_volume_and_only_the_agent_sees_the_secret(build: Any) -> None:
    pod = objects(build.service())["Deployment"]["spec"]["template"]["spec"]
    volumes = {v["name"] for v in pod["volumes"]}
    mounts = {c["name"]: {m["name"] for m in c["volumeMounts"]} for c in pod["containers"]}
    assert mounts["engine"] | mounts["agent"] == volumes
    assert "credentials" in mounts["agent"] - mounts["engine"]
    assert "run" in mounts["agent"] & mounts["engine"], "the admin socket is shared"


def test_both_ends_name_the_same_socket_and_the_admin_side_has_no_port(build: Any) -> None:
    made = containers(build.service())
    admin = next(a for a in made["engine"]["args"] if a.startswith("--admin="))
    url = next(a for a in made["agent"]["args"] if a.startswith("--engine-url="))
    assert admin.split("=", 1)[1] == url.split("=", 1)[1] == "unix:/run/ullage/admin.sock"
    assert [p["name"] for p in made["engine"]["ports"]] == ["http"]


def test_probes_and_drain(build: Any) -> None:
    made = containers(build.service())
    assert made["engine"]["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert made["engine"]["livenessProbe"]["httpGet"]["path"] == "/health"
    assert made["agent"]["livenessProbe"]["httpGet"]["path"] == "/healthz"
    grace = objects(build.service())["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    leave = made["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    drain = made["agent"]["lifecycle"]["preStop"]["exec"]["command"]
    assert (leave[3], drain[3]) == ("/run/ullage", "/run/ullage"), "they speak through the volume that both mount"
    assert drain[4:6] == ["/etc/ullage/agent", "9401"]
    assert float(leave[4]) == float(drain[7]) < grace


def test_secrets_stay_out_of_everything_but_the_secret(build: Any) -> None:
    made = objects(build.service())
    del made["Secret"]
    text = repr(made)
    assert CREDENTIALS.token not in text
    assert base64.b64encode(CREDENTIALS.token.encode()).decode() not in text


def test_credentials_survive_the_secret(build: Any) -> None:
    secret = objects(build.service())["Secret"]
    assert credentials_of(secret) == CREDENTIALS


@pytest.mark.parametrize("data", [None, {}, {"token": "%%%"}, {"tls.crt": "/w=="}])
def test_a_damaged_secret_reads_as_invalid_credentials(data: Any) -> None:
    read = credentials_of({"data": data})
    assert not valid(read, "web.prod.agents.ullage.dev", now=time.time())


def test_replicas_follow_desired_then_min(build: Any) -> None:
    manifest = build.manifest()
    for replicas, expected in [({"min": 2, "max": 5}, 2), ({"min": 2, "max": 5, "desired": 4}, 4)]:
        manifest["spec"]["replicas"] = replicas
        assert objects(read_service(manifest))["Deployment"]["spec"]["replicas"] == expected


def test_images_and_resources_of_the_spec_win(build: Any) -> None:
    manifest = build.manifest()
    manifest["spec"]["engine"] |= {"image": "mine:2", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    made = containers(read_service(manifest))
    assert made["engine"]["image"] == "mine:2"
    assert made["engine"]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert made["agent"]["image"] == "agent:1"
    assert made["agent"]["resources"]["limits"]["memory"]


def test_engine_arguments_say_everything_the_spec_says(build: Any) -> None:
    manifest = build.manifest()
    manifest["spec"]["model"] |= {"servedName": "tiny", "maxLength": 512}
    manifest["spec"]["engine"] |= {"threads": 2, "extraArgs": ["--x", "y"]}
    manifest["spec"]["engine"]["kvCache"] |= {"prefixReuse": False, "type": "int8", "blockSize": 8}
    arguments = engine_arguments(read_service(manifest), host="127.0.0.1", port=0, admin="unix:/a")
    assert arguments == [
        "--model=/models/tiny",
        "--served-name=tiny",
        "--host=127.0.0.1",
        "--port=0",
        "--admin=unix:/a",
        f"--kv-memory={48 * 2**20}",
        "--kv-type=int8",
        "--block-size=8",
        "--max-model-len=512",
        "--max-batch-tokens=512",
        "--max-sequences=64",
        "--dtype=auto",
        "--numerics=fast",
        "--threads=2",
        "--evict-interval=256",
        "--protected-tokens=256",
        "--recent-tokens=256",
        "--no-prefix-reuse",
        "--x",
        "y",
    ]


def test_agent_arguments(build: Any) -> None:
    arguments = agent_arguments(
        build.service(),
        engine_url="unix:/a",
        host="127.0.0.1",
        metrics_port=0,
        action_port=1,
        files=AgentFiles(certificate="c", key="k", token="t"),
    )
    assert arguments[:2] == ["--engine=ullage", "--engine-url=unix:/a"]
    assert {"--tls-cert=c", "--tls-key=k", "--token-file=t", "--poll-seconds=1.0"} <= set(arguments)


def pod(name: str, **changes: Any) -> dict[str, Any]:
    container = {"name": "agent", "ports": [{"name": "actions", "containerPort": 9401}]}
    made = {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"containers": [{"name": "engine"}, container]},
        "status": {"podIP": "10.0.0.7", "phase": "Running"},
    }
    for key, value in changes.items():
        made[key] = {**made[key], **value}
    return made


def test_targets_are_pods_that_can_be_called() -> None:
    pods = [
        pod("z"),
        pod("a", status={"podIP": "fd00::7"}),
        pod("no-address", status={"podIP": None}),
        pod("leaving", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        pod("ended", status={"phase": "Succeeded"}),
        pod("foreign", spec={"containers": [{"name": "other"}]}),
        {"metadata": {"name": "new", "uid": "u"}, "spec": {}},
    ]
    found = agent_targets(read_target(obj, server_name="n") for obj in pods)
    assert [(t.pod, t.uid, t.url) for t in found] == [
        ("a", "uid-a", "https://[fd00::7]:9401"),
        ("z", "uid-z", "https://10.0.0.7:9401"),
    ]


def test_what_is_kept_of_a_pod_names_its_service_s_certificate() -> None:
    labels = {"ullage.dev/service": "web"}
    known = known_pod(pod("a", metadata={"namespace": "prod", "labels": labels}))
    assert known.agent is not None
    assert known.agent.server_name == "web.prod.agents.ullage.dev"
    assert known.pod is not None
    ended = known_pod(pod("a", metadata={"namespace": "prod", "labels": labels}, status={"phase": "Failed"}))
    assert (ended.pod, ended.agent) == (None, None)
