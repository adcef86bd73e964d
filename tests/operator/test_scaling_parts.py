"""The parts around scaling decisions: pods as seen, the scaler's writes, the budget over services, alerts kept."""

from __future__ import annotations

from typing import Any

import pytest

from ullage_operator.alerts import ALERT_TTL_S, Alert, AlertBoard
from ullage_operator.book import ServiceKey
from ullage_operator.budget import Budget
from ullage_operator.errors import ClusterError
from ullage_operator.fleet import fleet_of, read_pod
from ullage_operator.scaler import ClusterScaler

KEY = ServiceKey("prod", "web")


def pod(name: str, *, ready: bool = True, **changes: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2027-01-15T08:00:00Z"}
    made: dict[str, Any] = {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"ullage.dev/traffic": "on"}},
        "status": {"phase": "Running", "conditions": [condition]},
    }
    for key, value in changes.items():
        made[key] = {**made[key], **value}
    return made


def test_pods_as_decisions_see_them() -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    waiting = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    fleet = fleet_of(
        read_pod(obj)
        for obj in [
            pod("b"),
            pod("a", metadata={"deletionTimestamp": "2027-01-15T08:00:00Z"}),
            pod("c", metadata={"labels": {"ullage.dev/traffic": "off"}}),
            pod("d", ready=False, status={"conditions": [scheduled]}),
            pod("e", ready=False, status={"containerStatuses": [waiting]}),
            pod("ended", status={"phase": "Failed"}),
            {"metadata": {"name": "new", "uid": "n"}},
        ]
    )
    assert [p.name for p in fleet.pods] == ["a", "b", "c", "d", "e", "new"]
    assert [p.name for p in fleet.ready] == ["b", "c"]
    assert {p.name: p.problem for p in fleet.pending} == {
        "d": "Unschedulable: 0/3 nodes",
        "e": "engine: ImagePullBackOff",
        "new": "",
    }
    assert [p.name for p in fleet.pods if not p.serving] == ["c"]
    found = fleet.pod("uid-b")
    assert found is not None
    assert found.ready_at == 1_800_000_000.0


@pytest.mark.parametrize(
    ("stored", "patched"),
    [
        ({"min": 1, "max": 3}, True),
        ({"min": 1, "max": 3, "desired": 1}, True),
        ({"min": 1, "max": 3, "desired": 2}, False),
    ],
)
async def test_a_change_of_size_is_written_once(cluster: Any, stored: dict[str, Any], patched: bool) -> None:
    cluster.objects["InferenceService", "web"] = {
        "metadata": {"name": "web", "resourceVersion": "7"},
        "spec": {"replicas": stored},
    }
    await ClusterScaler(KEY, cluster).set_replicas(expected=1, wanted=2)
    body = {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 2}}
    assert cluster.patches == ([("InferenceService", "web", "scale", body)] if patched else [])


async def test_somebody_else_s_number_is_left(cluster: Any) -> None:
    cluster.objects["InferenceService", "web"] = {"metadata": {}, "spec": {"replicas": {"desired": 3}}}
    with pytest.raises(ClusterError, match="3 replicas are wanted now, not 1"):
        await ClusterScaler(KEY, cluster).set_replicas(expected=1, wanted=2)
    assert cluster.patches == []


async def test_traffic_and_order_of_leaving(cluster: Any, build: Any) -> None:
    scaler = ClusterScaler(KEY, cluster)
    await scaler.set_serving("web-a", serving=False)
    await scaler.set_serving("web-a", serving=True)
    costs = [
        (body["metadata"]["labels"], body["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"])
        for _, _, _, body in cluster.patches
    ]
    assert costs == [({"ullage.dev/traffic": "off"}, "-1000000"), ({"ullage.dev/traffic": "on"}, None)]
    cluster.patches.clear()
    seen = [build.observation(30, hot_blocks=5, reclaimable_blocks=2), build.observation(error="x", pod="web-b")]
    await scaler.rank(build.fleet("web-a", "web-b", "web-c").pods, seen)
    costs = [(n, b["metadata"]["annotations"]) for _, n, _, b in cluster.patches]
    assert costs == [
        ("web-a", {"controller.kubernetes.io/pod-deletion-cost": "7"}),
        ("web-b", {"controller.kubernetes.io/pod-deletion-cost": "0"}),
    ]


async def test_a_pod_that_is_gone_is_no_error_but_a_refusal_is(cluster: Any) -> None:
    cluster.failures += [ClusterError("gone", status=404), ClusterError("no", status=403)]
    await ClusterScaler(KEY, cluster).set_serving("web-a", serving=False)
    with pytest.raises(ClusterError):
        await ClusterScaler(KEY, cluster).set_serving("web-a", serving=False)


def test_the_budget_counts_what_others_have_running(build: Any) -> None:
    budget = Budget(2)
    budget.enter("a", [build.record(phase="Running"), build.record(phase="Succeeded")])
    budget.enter("b", [build.record("scaleUp", "Running"), build.record(phase="Proposed")])
    assert (budget.left_for("a"), budget.left_for("b"), budget.in_flight) == (2, 1, 1)
    budget.enter("b", [build.record("throttle", "Running")])
    assert budget.left_for("c") == 0
    budget.forget("a")
    budget.enter("b", [])
    assert budget.left_for("c") == 2


def test_alerts_end_when_told_or_forgotten() -> None:
    board = AlertBoard()
    for fingerprint in ("x", "y"):
        board.fire(KEY, Alert(name="Full", received_at=100.0, fingerprint=fingerprint))
    board.fire(KEY, Alert(name="Full", received_at=200.0, fingerprint="y"))
    assert [a.fingerprint for a in board.of(KEY, now=200.0)] == ["x", "y"]
    assert [a.fingerprint for a in board.of(KEY, now=101.0 + ALERT_TTL_S)] == ["y"]
    board.resolve(KEY, "y")
    board.resolve(KEY, "unknown")
    assert board.of(KEY, now=200.0) == ()
