"""Status: says what was seen, keeps still while nothing changes, and never reads missing data as good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ullage_agent.wire import Violation
from ullage_operator.model import ServiceStatus
from ullage_operator.policy import Decision, Reason
from ullage_operator.status import invalid_status, merge_body, observed_status
from ullage_operator.sweep import SweepResult

READY = {
    "metadata": {"generation": 2},
    "spec": {"replicas": 1},
    "status": {
        "observedGeneration": 2,
        "replicas": 1,
        "updatedReplicas": 1,
        "readyReplicas": 1,
        "availableReplicas": 1,
    },
}


def swept(observations: list[Any], records: tuple[Any, ...] = ()) -> SweepResult:
    decision = Decision(verdict="Hold", reason=Reason.HEALTHY, message="")
    return SweepResult(observations=tuple(observations), decision=decision, changed_records=(), records=records)


def status(build: Any, observations: list[Any], **changes: Any) -> ServiceStatus:
    arguments = {
        "previous": None,
        "deployment": READY,
        "sweep": swept(observations, changes.pop("records", ())),
        "problem": None,
        "now": build.now,
        **changes,
    }
    return observed_status(arguments.pop("service", build.service()), **arguments)


def conditions(made: ServiceStatus) -> dict[str, str]:
    return {c.type: f"{c.status}/{c.reason}" for c in made.conditions}


def test_a_broken_metric_contract_is_named(build: Any) -> None:
    seen = build.observation(30)
    violation = Violation(metric="vllm:kv_cache_usage_perc", problem="missing", detail="")
    seen = replace(seen, report=replace(seen.report, violations=(violation,)))
    made = status(build, [seen])
    assert conditions(made)["MetricsContract"] == "False/Violated"
    assert conditions(made)["Degraded"] == "True/NotAsExpected"
    (found,) = [c for c in made.conditions if c.type == "MetricsContract"]
    assert found.message == "web-a: vllm:kv_cache_usage_perc is missing"


def test_all_is_well(build: Any) -> None:
    made = status(build, [build.observation(30.04)])
    assert conditions(made) == {
        "Ready": "True/AllReady",
        "Progressing": "False/Complete",
        "EngineReachable": "True/Fresh",
        "RiskHigh": "False/BelowThreshold",
        "Throttled": "False/NoLimit",
        "RemediationEffective": "Unknown/NoRemediation",
        "MetricsContract": "True/Kept",
        "Degraded": "False/AsExpected",
    }
    assert made.phase == "Ready"
    assert made.risk is not None
    assert (made.risk.score, made.risk.pod, made.risk.term) == (30.0, "web-a", "classic")
    assert made.selector == "app.kubernetes.io/name=ullage-engine,ullage.dev/service=web"
    assert all(c.observed_generation == 3 for c in made.conditions)


def test_trouble_shows(build: Any) -> None:
    made = status(
        build,
        [build.observation(92, admission_max_prompt_tokens=9), build.observation(pod="web-b", error="x")],
        records=(build.record(phase="Ineffective"),),
    )
    seen = conditions(made)
    assert seen["EngineReachable"] == "False/StaleData"
    assert seen["RiskHigh"] == "True/AtThreshold"
    assert seen["Throttled"] == "True/LimitInForce"
    assert seen["RemediationEffective"] == "False/Ineffective"
    assert made.phase == "Degraded"
    assert made.throttled is True
    assert made.last_action is not None
    assert made.last_action.phase == "Ineffective"


@pytest.mark.parametrize("observations", ["none", "stale"])
def test_unknown_is_not_good(build: Any, observations: str) -> None:
    made = status(build, [] if observations == "none" else [build.observation(10, age=60)])
    seen = conditions(made)
    assert seen["RiskHigh"].startswith("Unknown")
    assert seen["Throttled"].startswith("Unknown")
    assert not seen["EngineReachable"].startswith("True")
    assert made.risk is None
    assert made.throttled is None


def test_equal_sights_make_equal_status(build: Any) -> None:
    first = status(build, [build.observation(30)])
    again = status(build, [build.observation(31, age=0.2)], previous=first, now=build.now + 1)
    assert again == first
    assert status(build, [build.observation(34)], previous=first, now=build.now).risk != first.risk


def test_crossing_the_threshold_shows_however_small_the_step(build: Any) -> None:
    first = status(build, [build.observation(84.9)])
    crossed = status(build, [build.observation(85)], previous=first)
    assert crossed.risk is not None
    assert crossed.risk.score == 85


def test_transition_time_moves_with_the_status_only(build: Any) -> None:
    first = status(build, [build.observation(30)])
    later = status(build, [build.observation(90)], previous=first, now=build.now + 0.5)
    times = {
        c.type: (c.last_transition_time, n.last_transition_time)
        for c, n in zip(first.conditions, later.conditions, strict=True)
    }
    moved = {name for name, (before, after) in times.items() if before != after}
    assert moved == {"RiskHigh", "Degraded"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"metadata": {"generation": 3}}, "True/RollingOut"),
        ({"status": {**READY["status"], "updatedReplicas": 0}}, "True/RollingOut"),
        ({"status": {**READY["status"], "replicas": 2}}, "True/RollingOut"),
        ({"status": {**READY["status"], "availableReplicas": 0}}, "True/WaitingForEngines"),
    ],
)
def test_progress_of_the_deployment(build: Any, change: dict[str, Any], expected: str) -> None:
    made = status(build, [build.observation()], deployment={**READY, **change})
    assert conditions(made)["Progressing"] == expected


def test_before_anything_exists(build: Any) -> None:
    made = status(build, [], deployment=None, sweep=None)
    assert (made.phase, made.replicas, made.ready_replicas) == ("Pending", 0, 0)
    assert conditions(made)["Progressing"] == "True/Creating"


def test_a_problem_and_a_suspension_are_said(build: Any) -> None:
    problem = status(build, [], problem="Service/web exists and is not of this service")
    assert conditions(problem)["Progressing"] == "False/ReconcileFailed"
    suspended = status(build, [build.observation()], service=build.service(suspend=True))
    assert suspended.phase == "Suspended"


def test_an_invalid_spec_is_said_and_forgotten_once_mended(build: Any) -> None:
    first = status(build, [build.observation()])
    invalid = invalid_status(first, generation=4, problem="spec.x: bad", now=build.now)
    assert invalid.phase == "Invalid"
    assert conditions(invalid)["InvalidSpec"] == "True/ValidationFailed"
    assert invalid_status(invalid, generation=4, problem="spec.x: bad", now=build.now + 9) == invalid
    assert "InvalidSpec" not in conditions(status(build, [build.observation()], previous=invalid))


def test_a_merge_patch_removes_what_is_gone(build: Any) -> None:
    body = merge_body(status(build, []))
    assert body["risk"] is None
    assert all(None not in condition.values() for condition in body["conditions"])
