"""Children around the pods, and users' templates merged over them."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.certificates import issue
from ullage_operator.desired import Images, covers, desired_objects
from ullage_operator.errors import ManifestError, NotServed
from ullage_operator.features import Features
from ullage_operator.manifest import read_service
from ullage_operator.pods import pod_template
from ullage_operator.reconcile import reconcile
from ullage_operator.strategic import merge

IMAGES = Images(engine="e", agent="a")
CREDENTIALS = issue("web.prod.agents.ullage.dev", now=time.time())
EVERYTHING = Features(
    disruption_budget="policy/v1beta1", pod_monitor=True, prometheus_rule=True, leader_worker_set=True
)


def made(build: Any, features: Features = EVERYTHING, **spec: Any) -> dict[str, dict[str, Any]]:
    manifest = build.manifest()
    manifest["spec"] |= spec
    objects = desired_objects(read_service(manifest), images=IMAGES, credentials=CREDENTIALS, features=features)
    return {obj["kind"]: obj for obj in objects}


def test_optional_kinds_are_made_where_they_exist(build: Any) -> None:
    assert set(made(build)) - set(made(build, Features())) == {"PodDisruptionBudget", "PodMonitor", "PrometheusRule"}
    assert made(build)["PodDisruptionBudget"]["apiVersion"] == "policy/v1beta1"
    assert "PodMonitor" not in made(build, monitoring={"enabled": False})
    assert "NetworkPolicy" not in made(build, network={"policy": False})
    assert (
        made(build, monitoring={"labels": {"release": "prom"}})["PodMonitor"]["metadata"]["labels"]["release"] == "prom"
    )


def test_prometheus_comes_in_and_only_operators_may_act(build: Any) -> None:
    """A policy of ours must never keep Prometheus out, wherever it runs."""
    requests, metrics, actions = made(build)["NetworkPolicy"]["spec"]["ingress"]
    assert "from" not in requests
    assert "from" not in metrics
    assert metrics["ports"] == [{"port": 9400, "protocol": "TCP"}]
    assert actions["ports"] == [{"port": 9401, "protocol": "TCP"}]
    assert actions["from"][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "ullage-operator"}}
    narrowed = made(build, network={"metricsFrom": {"team": "obs"}})["NetworkPolicy"]["spec"]["ingress"][1]
    assert narrowed["from"] == [{"namespaceSelector": {"matchLabels": {"team": "obs"}}}]


def test_alerts_carry_the_labels_that_lead_back_to_the_service(build: Any) -> None:
    (group,) = made(build)["PrometheusRule"]["spec"]["groups"]
    for rule in group["rules"]:
        assert rule["labels"]["ullage_service"] == "web"
        assert 'ullage_service="web",namespace="prod"' in rule["expr"]
    relabel = made(build)["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["relabelings"][0]
    assert (relabel["targetLabel"], relabel["replacement"]) == ("ullage_service", "web")


def test_an_engine_on_several_nodes_is_a_leader_worker_set(build: Any) -> None:
    engine = {"type": "vllm", "image": "v", "nodes": 2, "tensorParallel": 2, "kvCache": {"memory": "1Gi"}}
    template = made(build, engine=engine)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert [c["name"] for c in leader["spec"]["containers"]] == ["engine", "agent"]
    assert [c["name"] for c in worker["spec"]["containers"]] == ["engine"]
    assert "ullage.dev/service" not in worker["metadata"]["labels"], "workers take no requests and have no agent"
    assert "readinessProbe" not in worker["spec"]["containers"][0]


async def test_without_that_kind_the_reason_is_said(build: Any, cluster: Any) -> None:
    manifest = build.manifest()
    manifest["spec"]["engine"] |= {"type": "vllm", "image": "v", "nodes": 2}
    with pytest.raises(NotServed, match=r"engine.nodes: 2 needs the LeaderWorkerSet API"):
        await reconcile(
            read_service(manifest), cluster=cluster, images=IMAGES, features=Features(), clock=lambda: build.now
        )
    assert cluster.written == []


async def test_what_is_as_it_should_be_is_not_written_again(build: Any, cluster: Any) -> None:
    async def go() -> None:
        await reconcile(service, cluster=cluster, images=IMAGES, features=Features(), clock=time.time)

    service = read_service(build.manifest())
    await go()
    cluster.written.clear()
    cluster.objects["Service", "web"]["spec"]["clusterIP"] = "10.0.0.1"  # what the server fills in
    await go()
    assert cluster.written == []
    cluster.objects["Deployment", "web"]["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    await go()
    assert cluster.written == ["Deployment"]


def test_covers() -> None:
    assert covers({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"c": 2}]})
    assert not covers({"b": [{"c": 2}, {}]}, {"b": [{"c": 2}]})
    assert covers({}, {"a": {}, "b": []}), "the API server leaves empty ones out"
    assert not covers({}, {"a": {"b": 1}})
    assert not covers({"a": 1}, {"a": {"b": 1}})


TEMPLATE = {
    "metadata": {"labels": {"team": "search", "ullage.dev/service": "stolen"}, "annotations": {"a": "b"}},
    "spec": {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu"}],
        "terminationGracePeriodSeconds": 600,
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "HF_TOKEN", "value": "x"}, {"name": "USER", "value": "me"}],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                "livenessProbe": None,
            },
            {"name": "proxy", "image": "proxy:1"},
        ],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "m"}}],
    },
}


def test_a_pod_template_is_merged_by_strategy(build: Any) -> None:
    manifest = build.manifest()
    manifest["spec"]["podTemplate"] = TEMPLATE
    template = pod_template(read_service(manifest), IMAGES)
    labels, spec = template["metadata"]["labels"], template["spec"]
    assert (labels["team"], labels["ullage.dev/service"]) == ("search", "web"), "found under its labels in any case"
    assert template["metadata"]["annotations"] == {"a": "b"}
    assert spec["terminationGracePeriodSeconds"] == 600
    assert "585" in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], "the drain has all of the grace"
    engine, agent, proxy = spec["containers"]
    assert (agent["name"], proxy) == ("agent", {"name": "proxy", "image": "proxy:1"})
    environment = {e["name"]: e["value"] for e in engine["env"]}
    assert (environment["HF_TOKEN"], environment["USER"], environment["HOME"]) == ("x", "me", "/var/cache/ullage")
    assert "livenessProbe" not in engine
    assert engine["securityContext"]["readOnlyRootFilesystem"] is True
    assert {v["name"] for v in spec["volumes"]} >= {"run", "models"}


@pytest.mark.parametrize("value", [{"replicas": 2}, {"spec": []}, {"metadata": "x"}])
def test_what_is_no_pod_template_is_refused(build: Any, value: Any) -> None:
    manifest = build.manifest()
    manifest["spec"]["podTemplate"] = value
    with pytest.raises(ManifestError, match=r"spec\.podTemplate"):
        read_service(manifest)


def test_directives() -> None:
    base = {"containers": [{"name": "a", "x": 1}, {"name": "b"}], "dnsConfig": {"p": 1}}
    patch = {"containers": [{"name": "a", "$patch": "delete"}], "dnsConfig": {"$patch": "replace", "q": 2}}
    assert merge(base, patch) == {"containers": [{"name": "b"}], "dnsConfig": {"q": 2}}


JSON = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "ports"]), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "spec"]), JSON, max_size=3)


@given(base=OBJECTS, patch=OBJECTS)
def test_merging_changes_no_input_twice_is_once_and_an_empty_patch_nothing(base: Any, patch: Any) -> None:
    before = copy.deepcopy((base, patch))
    once = merge(base, patch)
    assert (base, patch) == before
    assert merge(base, {}) == base
    if "ports" not in repr(patch):
        assert merge(once, patch) == once
