"""The upper ladder as a table: emergency, compact, throttle with its bridge, scaling both ways, alerts, modes, caps."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ullage_operator.alerts import Alert
from ullage_operator.fields import moment
from ullage_operator.policy import Decision, Inputs, Reason, Watch, decide

COMPACTING = ("evict", "compact", "throttle", "release")
SCATTERED = {"capabilities": COMPACTING, "free_blocks": 20, "largest_free_run_blocks": 5}
LIMITED = {"admission_max_prompt_tokens": 9}
UP, PAIR = {"min": 1, "max": 3}, {"min": 1, "max": 3, "desired": 2}
Situation = Callable[[Any], Inputs]


def situation(
    b: Any,
    observations: list[Any],
    records: list[Any] | None = None,
    *,
    replicas: dict[str, Any] | None = None,
    pods: tuple[Any, ...] | None = ("web-a",),
    high_s: float | None = None,
    calm_s: float | None = None,
    alerts: tuple[Alert, ...] = (),
    slots: int | None = None,
    **policy: Any,
) -> Inputs:
    """Ready-made inputs; `high_s` and `calm_s` say for how long that has been so."""
    service = b.service(replicas=replicas or UP, **policy)
    return Inputs(
        service=service,
        observations=tuple(observations),
        records=tuple(records or ()),
        fleet=None if pods is None else b.fleet(*pods),
        watch=Watch(
            seen_at=b.now,
            replicas=service.spec.replicas.effective,
            high_since=None if high_s is None else b.now - high_s,
            calm_since=None if calm_s is None else b.now - calm_s,
        ),
        alerts=alerts,
        slots_left=slots,
    )


def ended(b: Any, action: str, phase: str, ago: float, **kwargs: Any) -> Any:
    return b.record(action, phase, age=ago + 10, started_at=-ago - 9, finished_at=-ago, **kwargs)


def let_down(b: Any) -> list[Any]:
    return [ended(b, "evict", "Ineffective", 4)]


def scaling(b: Any, action: str, stage: str, *, ago: float = 10, answered: bool = True, **kwargs: Any) -> Any:
    times = {"started_at": -ago, "stage_at": -ago, **({"answered_at": -ago} if answered else {})}
    return b.record(action, "Running", age=ago, stage=stage, **times, **kwargs)


def idle(b: Any, pod: str, **changes: Any) -> Any:
    return b.observation(10, pod=pod, **{"hot_blocks": 20, "running": 0, "waiting": 0, **changes})


def firing(b: Any, pod: str | None = None, ago: float = 10) -> tuple[Alert, ...]:
    return (Alert(name="KVCacheFull", received_at=b.now - ago, pod=pod, fingerprint="f"),)


def two_idle(b: Any) -> list[Any]:
    return [idle(b, "web-a"), idle(b, "web-b")]


TABLE: list[tuple[str, Situation, str, Reason]] = [
    # Emergency
    (
        "device memory nearly gone: throttle at once",
        lambda b: situation(b, [b.observation(96, terms={"device": 96.0, "classic": 20.0})]),
        "Act",
        Reason.EMERGENCY,
    ),
    (
        "host memory, though the throttle policy waits for eviction first",
        lambda b: situation(b, [b.observation(97, terms={"host": 97.0, "classic": 90.0})]),
        "Act",
        Reason.EMERGENCY,
    ),
    (
        "throttled already: one engine more, without waiting for demand to last",
        lambda b: situation(b, [b.observation(96, terms={"device": 96.0}, **LIMITED)]),
        "Act",
        Reason.EMERGENCY,
    ),
    (
        "device at risk, no emergency yet: no eviction, which cannot help",
        lambda b: situation(b, [b.observation(90, terms={"device": 90.0, "classic": 20.0})]),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "emergency on stale data",
        lambda b: situation(b, [b.observation(99, age=9, terms={"device": 99.0})]),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "emergency beyond the cap",
        lambda b: situation(
            b,
            [b.observation(99, terms={"device": 99.0})],
            [ended(b, "evict", "Succeeded", 100)],
            replicas={"min": 1, "max": 1},
            maxActionsPerHour=1,
        ),
        "Hold",
        Reason.RATE_LIMITED,
    ),
    # Compact
    (
        "eviction let down and free blocks scattered",
        lambda b: situation(b, [b.observation(90, **SCATTERED)], let_down(b)),
        "Act",
        Reason.COMPACT,
    ),
    (
        "eviction first",
        lambda b: situation(b, [b.observation(90, **SCATTERED)]),
        "Act",
        Reason.EVICT,
    ),
    (
        "not scattered enough",
        lambda b: situation(b, [b.observation(90, **{**SCATTERED, "largest_free_run_blocks": 11})], let_down(b)),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "compaction would free blocks, though the free ones lie in one run",
        lambda b: situation(b, [b.observation(90, capabilities=COMPACTING, compactable_blocks=1)], let_down(b)),
        "Act",
        Reason.COMPACT,
    ),
    (
        "compaction would free nothing, however scattered the free blocks are",
        lambda b: situation(b, [b.observation(90, **SCATTERED, compactable_blocks=0)], let_down(b)),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "compaction let down too",
        lambda b: situation(b, [b.observation(90, **SCATTERED)], [*let_down(b), ended(b, "compact", "Ineffective", 2)]),
        "Act",
        Reason.THROTTLE,
    ),
    # Scale up
    (
        "eviction let down, throttled: one more",
        lambda b: situation(b, [b.observation(90, **LIMITED)], let_down(b)),
        "Act",
        Reason.SCALE_UP,
    ),
    (
        "demand lasts, though evictions help",
        lambda b: situation(b, [b.observation(90)], [ended(b, "evict", "Succeeded", 2)], high_s=60),
        "Act",
        Reason.SCALE_UP,
    ),
    ("demand does not last yet", lambda b: situation(b, [b.observation(90)], high_s=59), "Act", Reason.EVICT),
    (
        "at the maximum",
        lambda b: situation(b, [b.observation(90)], high_s=600, replicas={"min": 1, "max": 1}),
        "Act",
        Reason.EVICT,
    ),
    (
        "an autoscaler owns the number",
        lambda b: situation(b, [b.observation(90)], high_s=600, replicas={**UP, "managedBy": "External"}),
        "Act",
        Reason.EVICT,
    ),
    ("no cluster", lambda b: situation(b, [b.observation(90)], high_s=600, pods=None), "Act", Reason.EVICT),
    (
        "a reading of a cold start is no demand",
        lambda b: situation(b, [b.observation(90)], high_s=600, pods=(b.pod("web-a", age=59),)),
        "Act",
        Reason.EVICT,
    ),
    (
        "a pod is pending already",
        lambda b: situation(
            b, [b.observation(90)], high_s=600, replicas=PAIR, pods=("web-a", b.pod("web-b", ready=False))
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "a pod is still to be created",
        lambda b: situation(b, [b.observation(90)], high_s=600, replicas=PAIR),
        "Act",
        Reason.EVICT,
    ),
    (
        "after a change of size there is a pause",
        lambda b: situation(b, [b.observation(90)], [ended(b, "scaleUp", "Succeeded", 59)], high_s=600),
        "Act",
        Reason.EVICT,
    ),
    (
        "a longer one after a step that was taken back",
        lambda b: situation(b, [b.observation(90)], [ended(b, "scaleUp", "Ineffective", 899)], high_s=900),
        "Act",
        Reason.EVICT,
    ),
    (
        "and then it is tried again",
        lambda b: situation(b, [b.observation(90)], [ended(b, "scaleUp", "Ineffective", 900)], high_s=900),
        "Act",
        Reason.SCALE_UP,
    ),
    (
        "own cap reached",
        lambda b: situation(
            b,
            [b.observation(90, **LIMITED)],
            [ended(b, "scaleUp", "Succeeded", 600), *let_down(b)],
            scaleUp={"maxPerHour": 1},
        ),
        "Hold",
        Reason.RATE_LIMITED,
    ),
    # Growing
    (
        "while a new engine comes up the ladder goes on",
        lambda b: situation(
            b,
            [b.observation(90)],
            [scaling(b, "scaleUp", "Scaling")],
            replicas=PAIR,
            pods=("web-a", b.pod("web-b", ready=False)),
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "and no second is asked for",
        lambda b: situation(
            b,
            [b.observation(90, **LIMITED)],
            [scaling(b, "scaleUp", "Scaling"), *let_down(b), ended(b, "evict", "Ineffective", 3)],
            replicas=PAIR,
            high_s=600,
        ),
        "Hold",
        Reason.COOLING_DOWN,
    ),
    (
        "nothing left but to wait for it",
        lambda b: situation(
            b,
            [b.observation(90, capabilities=("throttle",), **LIMITED)],
            [scaling(b, "scaleUp", "Scaling")],
            replicas=PAIR,
        ),
        "Hold",
        Reason.SCALING,
    ),
    (
        "the throttle is renewed before it lapses",
        lambda b: situation(
            b,
            [b.observation(70, **LIMITED, admission_expires_in_s=40)],
            [scaling(b, "scaleUp", "Scaling"), ended(b, "throttle", "Succeeded", 80)],
            replicas=PAIR,
        ),
        "Act",
        Reason.BRIDGE,
    ),
    (
        "and not lifted, though risk is down",
        lambda b: situation(
            b,
            [b.observation(30, **LIMITED, admission_expires_in_s=40)],
            [scaling(b, "scaleUp", "Scaling"), ended(b, "throttle", "Succeeded", 80)],
            replicas=PAIR,
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "the new engine is ready",
        lambda b: situation(
            b, [b.observation(70)], [scaling(b, "scaleUp", "Scaling")], replicas=PAIR, pods=("web-a", "web-b")
        ),
        "Conclude",
        Reason.EFFECTIVE,
    ),
    (
        "then the throttle lifts, though risk is above the release threshold",
        lambda b: situation(
            b,
            [b.observation(70, **LIMITED)],
            [ended(b, "throttle", "Succeeded", 80), ended(b, "scaleUp", "Succeeded", 1)],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Act",
        Reason.RELEASE,
    ),
    (
        "not ready in time: taken back, whatever the readings",
        lambda b: situation(
            b,
            [b.observation(error="x")],
            [scaling(b, "scaleUp", "Scaling", ago=600)],
            replicas=PAIR,
            pods=("web-a", b.pod("web-b", ready=False, problem="Unschedulable: 0/3 nodes")),
        ),
        "Act",
        Reason.PENDING_CANCELLED,
    ),
    (
        "taken back",
        lambda b: situation(b, [b.observation(70)], [scaling(b, "scaleUp", "Cancelling")], replicas=UP),
        "Conclude",
        Reason.PENDING_CANCELLED,
    ),
    (
        "the API did not answer",
        lambda b: situation(b, [b.observation(70)], [scaling(b, "scaleUp", "Scaling", answered=False)]),
        "Act",
        Reason.SCALING,
    ),
    (
        "the API never answered",
        lambda b: situation(b, [b.observation(70)], [scaling(b, "scaleUp", "Scaling", ago=120, answered=False)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "somebody else set the number meanwhile",
        lambda b: situation(
            b, [b.observation(70)], [scaling(b, "scaleUp", "Scaling")], replicas={"min": 1, "max": 5, "desired": 5}
        ),
        "Conclude",
        Reason.OVERDUE,
    ),
    # Scale down
    (
        "the load has fitted on one less for the window",
        lambda b: situation(b, two_idle(b), replicas=PAIR, pods=("web-a", "web-b"), calm_s=300),
        "Act",
        Reason.SCALE_DOWN,
    ),
    (
        "not for long enough",
        lambda b: situation(b, two_idle(b), replicas=PAIR, pods=("web-a", "web-b"), calm_s=299),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "at the minimum",
        lambda b: situation(b, two_idle(b), replicas={"min": 2, "max": 3}, pods=("web-a", "web-b"), calm_s=900),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "an engine is not read",
        lambda b: situation(
            b,
            [idle(b, "web-a"), b.observation(pod="web-b", error="x")],
            replicas=PAIR,
            pods=("web-a", "web-b"),
            calm_s=900,
        ),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "the load would not fit now",
        lambda b: situation(
            b,
            [idle(b, "web-a", hot_blocks=31), idle(b, "web-b", hot_blocks=30)],
            replicas=PAIR,
            pods=("web-a", "web-b"),
            calm_s=900,
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "a change of size within the window",
        lambda b: situation(
            b,
            two_idle(b),
            [ended(b, "scaleUp", "Succeeded", 299)],
            replicas=PAIR,
            pods=("web-a", "web-b"),
            calm_s=900,
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "it drains while requests are in flight",
        lambda b: situation(
            b,
            [idle(b, "web-a", running=1), idle(b, "web-b")],
            [scaling(b, "scaleDown", "Draining")],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Hold",
        Reason.DRAINING,
    ),
    (
        "nothing in flight, but the reading is from before the endpoints followed",
        lambda b: situation(
            b, two_idle(b), [scaling(b, "scaleDown", "Draining", ago=4)], replicas=PAIR, pods=("web-a", "web-b")
        ),
        "Hold",
        Reason.DRAINING,
    ),
    (
        "nothing in flight",
        lambda b: situation(
            b, two_idle(b), [scaling(b, "scaleDown", "Draining")], replicas=PAIR, pods=("web-a", "web-b")
        ),
        "Act",
        Reason.DRAINED,
    ),
    (
        "the engine cannot say what is in flight: it is not removed",
        lambda b: situation(
            b,
            [idle(b, "web-a", running=None), idle(b, "web-b")],
            [scaling(b, "scaleDown", "Draining")],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Hold",
        Reason.DRAINING,
    ),
    (
        "risk rises meanwhile",
        lambda b: situation(
            b,
            [idle(b, "web-a"), b.observation(90, pod="web-b")],
            [scaling(b, "scaleDown", "Draining")],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Act",
        Reason.SCALE_DOWN_CANCELLED,
    ),
    (
        "the drain takes too long, readings or not",
        lambda b: situation(
            b,
            [b.observation(error="x")],
            [scaling(b, "scaleDown", "Draining", ago=900)],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Act",
        Reason.SCALE_DOWN_CANCELLED,
    ),
    (
        "taken back to the end",
        lambda b: situation(
            b, two_idle(b), [scaling(b, "scaleDown", "Restoring")], replicas=PAIR, pods=("web-a", "web-b")
        ),
        "Conclude",
        Reason.SCALE_DOWN_CANCELLED,
    ),
    (
        "removed, and on its way out",
        lambda b: situation(
            b,
            [idle(b, "web-b")],
            [scaling(b, "scaleDown", "Removing")],
            pods=(b.pod("web-a", leaving=True), "web-b"),
        ),
        "Conclude",
        Reason.EFFECTIVE,
    ),
    (
        "removed, and not gone yet",
        lambda b: situation(b, two_idle(b), [scaling(b, "scaleDown", "Removing")], pods=("web-a", "web-b")),
        "Hold",
        Reason.DRAINED,
    ),
    (
        "another pod was removed in its place",
        lambda b: situation(b, [idle(b, "web-a")], [scaling(b, "scaleDown", "Removing", ago=10)]),
        "Act",
        Reason.SCALE_DOWN_CANCELLED,
    ),
    (
        "another pod went, and the fleet may still be on its way to the wanted size",
        lambda b: situation(b, [idle(b, "web-a")], [scaling(b, "scaleDown", "Removing", ago=9)]),
        "Hold",
        Reason.DRAINED,
    ),
    (
        "nobody is removed",
        lambda b: situation(b, two_idle(b), [scaling(b, "scaleDown", "Removing", ago=120)], pods=("web-a", "web-b")),
        "Act",
        Reason.SCALE_DOWN_CANCELLED,
    ),
    (
        "its step is taken again",
        lambda b: situation(
            b,
            two_idle(b),
            [scaling(b, "scaleDown", "Draining", answered=False)],
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Act",
        Reason.DRAINING,
    ),
    # Alerts
    (
        "an alert lowers the threshold",
        lambda b: situation(b, [b.observation(61)], alerts=firing(b), replicas={"min": 1, "max": 1}),
        "Act",
        Reason.EVICT,
    ),
    (
        "it does nothing without a fresh reading",
        lambda b: situation(b, [b.observation(61, age=9)], alerts=firing(b)),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "it does nothing to a healthy engine",
        lambda b: situation(b, [b.observation(59)], alerts=firing(b)),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "it counts as lasting demand",
        lambda b: situation(b, [b.observation(61)], alerts=firing(b)),
        "Act",
        Reason.SCALE_UP,
    ),
    (
        "one about another pod does not count",
        lambda b: situation(b, [b.observation(61)], alerts=firing(b, pod="web-z")),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "one not told of for hours is forgotten",
        lambda b: situation(b, [b.observation(61)], alerts=firing(b, ago=5 * 3600)),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "it keeps engines",
        lambda b: situation(b, two_idle(b), replicas=PAIR, pods=("web-a", "web-b"), calm_s=900, alerts=firing(b)),
        "Hold",
        Reason.HEALTHY,
    ),
    # Modes per action
    (
        "evictions only noted down do not hold up a throttle that may act",
        lambda b: situation(
            b,
            [b.observation(90)],
            [ended(b, "evict", "Expired", 4)],
            evict={"mode": "Observe"},
            replicas={"min": 1, "max": 1},
        ),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "evictions that wait for a person do not either",
        lambda b: situation(
            b,
            [b.observation(90)],
            [b.record(phase="Proposed", service=b.service(mode="Propose"))],
            evict={"mode": "Propose"},
        ),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "but with all asking, one question at a time",
        lambda b: situation(
            b, [b.observation(90)], [b.record(phase="Proposed", service=b.service(mode="Propose"))], mode="Propose"
        ),
        "Hold",
        Reason.AWAITING_APPROVAL,
    ),
    (
        "scaling asks, the rest acts",
        lambda b: situation(b, [b.observation(90)], high_s=60, scaleUp={"mode": "Propose"}),
        "Propose",
        Reason.SCALE_UP,
    ),
    (
        "and goes on while it waits",
        lambda b: situation(
            b,
            [b.observation(90)],
            [b.record("scaleUp", "Proposed", service=b.service(mode="Propose"))],
            high_s=60,
            scaleUp={"mode": "Propose"},
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "an approved step up is started",
        lambda b: situation(
            b,
            [b.observation(90)],
            [b.record("scaleUp", "Proposed", approved=True, service=b.service(mode="Propose"))],
            scaleUp={"mode": "Propose"},
        ),
        "Act",
        Reason.APPROVED,
    ),
    (
        "unless the number has changed since",
        lambda b: situation(
            b,
            [b.observation(90)],
            [b.record("scaleUp", "Proposed", approved=True, service=b.service(mode="Propose"))],
            scaleUp={"mode": "Propose"},
            replicas=PAIR,
            pods=("web-a", "web-b"),
        ),
        "Conclude",
        Reason.RISK_PASSED,
    ),
    # Budget over services
    ("no place left", lambda b: situation(b, [b.observation(90)], slots=0), "Hold", Reason.GLOBAL_BUDGET),
    ("a place left", lambda b: situation(b, [b.observation(90)], slots=1), "Act", Reason.EVICT),
    ("growing needs none", lambda b: situation(b, [b.observation(90)], slots=0, high_s=60), "Act", Reason.SCALE_UP),
    (
        "lifting needs none",
        lambda b: situation(b, [b.observation(30, **LIMITED)], [ended(b, "throttle", "Succeeded", 80)], slots=0),
        "Act",
        Reason.RELEASE,
    ),
]


@pytest.mark.parametrize(("make", "verdict", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_ladder(build: Any, make: Situation, verdict: str, reason: Reason) -> None:
    decision = decide(make(build), build.now)
    assert (decision.verdict, decision.reason) == (verdict, reason), decision.message


def test_every_reason_has_a_row() -> None:
    lower = runpy.run_path(str(Path(__file__).with_name("test_policy.py")))["TABLE"]
    assert {row[3] for row in (*lower, *TABLE)} == set(Reason)


def test_the_victim_has_the_least_warm_cache(build: Any) -> None:
    seen = [idle(build, "web-a", reclaimable_blocks=60), idle(build, "web-b", reclaimable_blocks=3)]
    decision = decide(situation(build, seen, replicas=PAIR, pods=("web-a", "web-b"), calm_s=300), build.now)
    assert (decision.pod, decision.action) == ("web-b", "scaleDown")
    assert decision.execute is not None
    assert (decision.execute.status.stage, decision.execute.spec.parameters.to_replicas) == ("Draining", 1)


def test_of_equally_warm_engines_the_youngest_leaves(build: Any) -> None:
    """As a cluster chooses that knows no deletion costs: the one that was drained."""
    pods = (build.pod("web-a", age=5000), build.pod("web-b", age=6000))
    decision = decide(situation(build, two_idle(build), replicas=PAIR, pods=pods, calm_s=300), build.now)
    assert (decision.pod, decision.action) == ("web-a", "scaleDown")
    pods = (build.pod("web-a", age=6000), build.pod("web-b", age=5000))
    decision = decide(situation(build, two_idle(build), replicas=PAIR, pods=pods, calm_s=300), build.now)
    assert (decision.pod, decision.action) == ("web-b", "scaleDown")


def test_a_stage_is_written_down_before_its_step(build: Any) -> None:
    inputs = situation(
        build, two_idle(build), [scaling(build, "scaleDown", "Draining")], replicas=PAIR, pods=("web-a", "web-b")
    )
    decision = decide(inputs, build.now)
    assert decision.execute is not None
    assert decision.updates == (decision.execute,)
    assert (decision.execute.status.stage, decision.execute.status.answered_at) == ("Removing", None)
    assert decision.execute.status.stage_at == moment(build.now)


def test_a_cancelled_step_names_what_was_in_the_way(build: Any) -> None:
    pods = ("web-a", build.pod("web-b", ready=False, problem="Unschedulable: 0/3 nodes"))
    inputs = situation(build, [build.observation(70)], [scaling(build, "scaleUp", "Scaling", ago=600)], pods=pods)
    inputs = replace(inputs, service=build.service(replicas=PAIR))
    first = decide(inputs, build.now)
    assert first.execute is not None
    assert first.execute.status.stage == "Cancelling"
    done = first.execute.model_copy(
        update={"status": first.execute.status.model_copy(update={"answered_at": moment(build.now)})}
    )
    last: Decision = decide(replace(inputs, records=(done,)), build.now)
    (record,) = last.updates
    assert record.status.phase == "Ineffective"
    assert "web-b Unschedulable: 0/3 nodes" in record.status.message
