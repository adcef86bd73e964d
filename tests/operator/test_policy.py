"""The whole decide chain as a table: for each reason the situations that lead to it, and those that come close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ullage_operator.model import InferenceService, Remediation
from ullage_operator.observation import Observation
from ullage_operator.policy import CHECKS, Decision, Inputs, Reason, decide

Situation = tuple[InferenceService, list[Observation], list[Remediation]]
Row = tuple[str, Callable[[Any], Situation], str, Reason]


def proposing(b: Any) -> InferenceService:
    return b.service(mode="Propose")


def proposal(b: Any, **kwargs: Any) -> Remediation:
    return b.record(phase="Proposed", service=proposing(b), **kwargs)


def answered(b: Any, *, ago: float = 10.0, action: str = "evict", freed: int = 10, **kwargs: Any) -> Remediation:
    return b.record(action, "Running", started_at=-ago - 1, answered_at=-ago, bytes_freed=freed, attempts=1, **kwargs)


def ended(b: Any, phase: str, *, ago: float, action: str = "evict", **kwargs: Any) -> Remediation:
    return b.record(action, phase, age=ago + 10, started_at=-ago - 9, finished_at=-ago, **kwargs)


TABLE: list[Row] = [
    # Paused and stale
    ("suspended", lambda b: (b.service(suspend=True), [b.observation(99)], []), "Hold", Reason.PAUSED),
    ("no engines", lambda b: (b.service(), [], []), "Hold", Reason.STALE_DATA),
    ("read failed", lambda b: (b.service(), [b.observation(error="refused")], []), "Hold", Reason.STALE_DATA),
    ("no sample yet", lambda b: (b.service(), [b.observation(99, age=None)], []), "Hold", Reason.STALE_DATA),
    ("no score", lambda b: (b.service(), [b.observation(None)], []), "Hold", Reason.STALE_DATA),
    ("sample too old", lambda b: (b.service(), [b.observation(99, age=5.01)], []), "Hold", Reason.STALE_DATA),
    (
        "young sample, received long ago",
        lambda b: (b.service(), [b.observation(99, age=0.1, received=-5)], []),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "limit follows the polling interval",
        lambda b: (b.service(staleAfterPolls=30), [b.observation(99, age=25)], []),
        "Act",
        Reason.EVICT,
    ),
    (
        "one of two unread, the other well",
        lambda b: (b.service(), [b.observation(30), b.observation(pod="web-b", error="x")], []),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "one of two unread, the other at risk",
        lambda b: (b.service(), [b.observation(90), b.observation(pod="web-b", error="x")], []),
        "Act",
        Reason.EVICT,
    ),
    # Evict
    ("healthy", lambda b: (b.service(), [b.observation(84.9)], []), "Hold", Reason.HEALTHY),
    ("at the threshold", lambda b: (b.service(), [b.observation(85.0)], []), "Act", Reason.EVICT),
    ("observe only", lambda b: (b.service(mode="Observe"), [b.observation(90)], []), "Observe", Reason.EVICT),
    ("propose only", lambda b: (b.service(mode="Propose"), [b.observation(90)], []), "Propose", Reason.EVICT),
    (
        "engine does not say what it holds",
        lambda b: (
            b.service(),
            [b.observation(90, total_blocks=None, hot_blocks=None, reclaimable_blocks=None)],
            [],
        ),
        "Act",
        Reason.EVICT,
    ),
    # Throttle
    (
        "cannot evict",
        lambda b: (b.service(), [b.observation(90, capabilities=("throttle",))], []),
        "Act",
        Reason.THROTTLE,
    ),
    ("evict off", lambda b: (b.service(evict={"enabled": False}), [b.observation(90)], []), "Act", Reason.THROTTLE),
    (
        "nothing to evict",
        lambda b: (b.service(), [b.observation(90, free_blocks=100)], []),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "evict was ineffective",
        lambda b: (b.service(), [b.observation(90)], [ended(b, "Ineffective", ago=2)]),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "evict failed",
        lambda b: (b.service(), [b.observation(90)], [ended(b, "Failed", ago=2)]),
        "Act",
        Reason.THROTTLE,
    ),
    (
        "evict was ineffective long ago",
        lambda b: (b.service(), [b.observation(90)], [ended(b, "Ineffective", ago=61)]),
        "Act",
        Reason.EVICT,
    ),
    (
        "another engine's evict was ineffective",
        lambda b: (
            b.service(),
            [b.observation(90), b.observation(20, pod="web-b")],
            [ended(b, "Ineffective", ago=2, pod="web-b")],
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "throttled already: evict again after the cooldown",
        lambda b: (
            b.service(),
            [b.observation(90, admission_max_prompt_tokens=9)],
            [ended(b, "Ineffective", ago=16)],
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "throttle off, evict ineffective, cooled down",
        lambda b: (
            b.service(throttle={"enabled": False}),
            [b.observation(90)],
            [ended(b, "Ineffective", ago=16)],
        ),
        "Act",
        Reason.EVICT,
    ),
    # Limits
    (
        "cooling down",
        lambda b: (b.service(), [b.observation(90)], [ended(b, "Succeeded", ago=14)]),
        "Hold",
        Reason.COOLING_DOWN,
    ),
    (
        "cooled down",
        lambda b: (b.service(), [b.observation(90)], [ended(b, "Succeeded", ago=15)]),
        "Act",
        Reason.EVICT,
    ),
    (
        "cooling engine, another at risk",
        lambda b: (
            b.service(),
            [b.observation(99), b.observation(90, pod="web-b")],
            [ended(b, "Succeeded", ago=5)],
        ),
        "Act",
        Reason.EVICT,
    ),
    (
        "failed throttle cools down too",
        lambda b: (
            b.service(evict={"enabled": False, "cooldownSeconds": 15}),
            [b.observation(90)],
            [ended(b, "Failed", ago=5, action="throttle")],
        ),
        "Hold",
        Reason.COOLING_DOWN,
    ),
    (
        "budget spent",
        lambda b: (
            b.service(maxActionsPerHour=2),
            [b.observation(90)],
            [ended(b, "Succeeded", ago=100), ended(b, "Succeeded", ago=3500)],
        ),
        "Hold",
        Reason.RATE_LIMITED,
    ),
    (
        "budget spent, but no risk",
        lambda b: (b.service(maxActionsPerHour=1), [b.observation(20)], [ended(b, "Succeeded", ago=100)]),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "budget free again after an hour",
        lambda b: (b.service(maxActionsPerHour=1), [b.observation(90)], [ended(b, "Succeeded", ago=3600)]),
        "Act",
        Reason.EVICT,
    ),
    (
        "proposals that lapsed cost nothing",
        lambda b: (
            b.service(maxActionsPerHour=1, mode="Propose"),
            [b.observation(90)],
            [proposal(b, age=500).model_copy(update={"status": b.record(phase="Expired", age=500).status})],
        ),
        "Propose",
        Reason.EVICT,
    ),
    (
        "no step left",
        lambda b: (b.service(), [b.observation(90, capabilities=())], []),
        "Hold",
        Reason.EXHAUSTED,
    ),
    # Release
    (
        "release at the threshold",
        lambda b: (
            b.service(),
            [b.observation(60, admission_max_prompt_tokens=9)],
            [ended(b, "Succeeded", ago=50, action="throttle")],
        ),
        "Act",
        Reason.RELEASE,
    ),
    (
        "hysteresis",
        lambda b: (
            b.service(),
            [b.observation(60.1, admission_max_prompt_tokens=9)],
            [ended(b, "Succeeded", ago=50, action="throttle")],
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "somebody else's throttle is theirs",
        lambda b: (b.service(), [b.observation(20, admission_max_prompt_tokens=9)], []),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "ours was lifted, the present one is theirs",
        lambda b: (
            b.service(),
            [b.observation(20, admission_max_prompt_tokens=9)],
            [
                ended(b, "Succeeded", ago=90, action="throttle"),
                ended(b, "Succeeded", ago=50, action="release"),
            ],
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "lifting it would open an engine that somebody drained",
        lambda b: (
            b.service(),
            [b.observation(20, admission_max_prompt_tokens=9, draining=True)],
            [ended(b, "Succeeded", ago=50, action="throttle")],
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    (
        "release needs no approval and no budget",
        lambda b: (
            b.service(mode="Propose", maxActionsPerHour=1),
            [b.observation(50, admission_max_prompt_tokens=9), b.observation(99, pod="web-b")],
            [ended(b, "Succeeded", ago=50, action="throttle")],
        ),
        "Act",
        Reason.RELEASE,
    ),
    (
        "nothing is lifted under Observe",
        lambda b: (
            b.service(mode="Observe"),
            [b.observation(50, admission_max_prompt_tokens=9)],
            [ended(b, "Succeeded", ago=50, action="throttle")],
        ),
        "Hold",
        Reason.HEALTHY,
    ),
    # Proposals
    (
        "waiting for approval",
        lambda b: (proposing(b), [b.observation(90)], [proposal(b)]),
        "Hold",
        Reason.AWAITING_APPROVAL,
    ),
    (
        "approved",
        lambda b: (proposing(b), [b.observation(90)], [proposal(b, approved=True)]),
        "Act",
        Reason.APPROVED,
    ),
    (
        "approved, but stale",
        lambda b: (proposing(b), [b.observation(90, age=6)], [proposal(b, approved=True)]),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "approved, but its engine is unread",
        lambda b: (
            proposing(b),
            [b.observation(error="x"), b.observation(20, pod="web-b")],
            [proposal(b, approved=True)],
        ),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "approved, but the budget is spent",
        lambda b: (
            b.service(mode="Propose", maxActionsPerHour=1),
            [b.observation(90)],
            [proposal(b, approved=True), ended(b, "Succeeded", ago=100)],
        ),
        "Hold",
        Reason.RATE_LIMITED,
    ),
    (
        "risk passed before approval",
        lambda b: (proposing(b), [b.observation(60)], [proposal(b, approved=True)]),
        "Conclude",
        Reason.RISK_PASSED,
    ),
    (
        "approval came too late",
        lambda b: (proposing(b), [b.observation(90)], [proposal(b, age=900, approved=True)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "proposal, but the mode is Observe now",
        lambda b: (b.service(mode="Observe"), [b.observation(90)], [proposal(b)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "proposal of an engine that is gone",
        lambda b: (proposing(b), [b.observation(90, pod="web-b")], [proposal(b)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "interrupted between proposing and starting",
        lambda b: (b.service(), [b.observation(90)], [b.record(phase="Proposed")]),
        "Conclude",
        Reason.OVERDUE,
    ),
    # Running
    (
        "answer lost",
        lambda b: (b.service(), [b.observation(90)], [b.record(started_at=-30, attempts=1)]),
        "Act",
        Reason.UNANSWERED,
    ),
    (
        "answer lost and stale",
        lambda b: (b.service(), [b.observation(90, age=9)], [b.record(started_at=-30, attempts=1)]),
        "Hold",
        Reason.STALE_DATA,
    ),
    (
        "answer lost too often",
        lambda b: (b.service(), [b.observation(90)], [b.record(started_at=-30, attempts=4)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "answer lost too long ago",
        lambda b: (b.service(), [b.observation(90)], [b.record(age=120, started_at=-120, attempts=1)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "engine gone while running",
        lambda b: (b.service(), [b.observation(20, pod="web-b")], [answered(b)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "same name, another pod",
        lambda b: (b.service(), [], [answered(b)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    ("settling", lambda b: (b.service(), [b.observation(90)], [answered(b, ago=4)]), "Hold", Reason.SETTLING),
    (
        "settled, but the sample is from before",
        lambda b: (b.service(), [b.observation(20, age=3)], [answered(b, ago=7)]),
        "Hold",
        Reason.SETTLING,
    ),
    ("risk fell", lambda b: (b.service(), [b.observation(40)], [answered(b)]), "Conclude", Reason.EFFECTIVE),
    (
        "risk fell by the margin",
        lambda b: (b.service(), [b.observation(90)], [answered(b, before=95)]),
        "Conclude",
        Reason.EFFECTIVE,
    ),
    (
        "risk fell by less than the margin",
        lambda b: (b.service(), [b.observation(90.1)], [answered(b, before=95)]),
        "Conclude",
        Reason.INEFFECTIVE,
    ),
    (
        "risk fell, but nothing was freed",
        lambda b: (b.service(), [b.observation(40)], [answered(b, freed=0)]),
        "Conclude",
        Reason.INEFFECTIVE,
    ),
    (
        "effect never seen",
        lambda b: (b.service(), [b.observation(error="x")], [answered(b, ago=66, age=70)]),
        "Conclude",
        Reason.OVERDUE,
    ),
    (
        "throttle in force",
        lambda b: (
            b.service(),
            [b.observation(95, admission_max_prompt_tokens=9)],
            [answered(b, action="throttle", freed=0)],
        ),
        "Conclude",
        Reason.EFFECTIVE,
    ),
    (
        "throttle not in force",
        lambda b: (b.service(), [b.observation(95)], [answered(b, action="throttle", freed=0)]),
        "Conclude",
        Reason.INEFFECTIVE,
    ),
    (
        "released",
        lambda b: (b.service(), [b.observation(20)], [answered(b, action="release", freed=0)]),
        "Conclude",
        Reason.EFFECTIVE,
    ),
    (
        "one action in flight, another engine at risk",
        lambda b: (b.service(), [b.observation(90), b.observation(99, pod="web-b")], [answered(b, ago=1)]),
        "Hold",
        Reason.SETTLING,
    ),
]


@pytest.mark.parametrize(("situation", "verdict", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_chain(build: Any, situation: Callable[[Any], Situation], verdict: str, reason: Reason) -> None:
    decision = _decide(build, *situation(build))
    assert (decision.verdict, decision.reason) == (verdict, reason), decision.message


def test_every_check_is_named_once() -> None:
    names = [name for name, _ in CHECKS]
    assert len(set(names)) == len(names)


def test_evict_takes_the_engine_at_the_greatest_risk(build: Any) -> None:
    decision = _decide(build, build.service(), [build.observation(90), build.observation(95, pod="web-b")], [])
    assert decision.pod == "web-b"
    assert decision.parameters is not None
    assert decision.parameters.ratio == 0.2


@pytest.mark.parametrize("term", ["forecast", "thrash"])
def test_in_a_shortage_the_ratio_is_taken_of_hot_blocks_on_top_of_the_cached_ones(build: Any, term: str) -> None:
    short = build.observation(90, terms={"classic": 60.0, term: 90.0}, hot_blocks=80, reclaimable_blocks=20)
    decision = _decide(build, build.service(), [short], [])
    assert decision.parameters is not None
    assert decision.parameters.ratio == pytest.approx((20 + 0.2 * 80) / 100)
    assert "20% of the hot blocks, after the cached ones" in decision.message
    untold = build.observation(90, terms={term: 90.0}, hot_blocks=None, reclaimable_blocks=None)
    decision = _decide(build, build.service(), [untold], [])
    assert decision.parameters is not None
    assert decision.parameters.ratio == 0.2


def test_an_act_is_written_down_as_running_with_its_evidence(build: Any) -> None:
    decision = _decide(build, build.service(), [build.observation(90)], [])
    (record,) = decision.updates
    assert decision.execute == record
    assert record.status.phase == "Running"
    assert record.status.before is not None
    assert record.status.before.score == 90
    assert record.spec.inputs.terms == {"classic": 90.0}
    assert (record.spec.pod, record.spec.pod_uid) == ("web-a", "uid-web-a")


@pytest.mark.parametrize(("mode", "phase"), [("Observe", "Expired"), ("Propose", "Proposed")])
def test_other_modes_send_nothing(build: Any, mode: str, phase: str) -> None:
    decision = _decide(build, build.service(mode=mode), [build.observation(90)], [])
    assert decision.execute is None
    assert decision.updates[0].status.phase == phase


def test_observed_steps_are_spaced_like_real_ones(build: Any) -> None:
    service = build.service(mode="Observe")
    first = _decide(build, service, [build.observation(90)], [])
    inputs = Inputs(service=service, observations=(build.observation(90),), records=first.updates)
    assert decide(inputs, build.now + 4).reason == Reason.COOLING_DOWN


def test_approval_names_who_gave_it(build: Any) -> None:
    record = proposal(build, approved=True)
    spec = record.spec.model_copy(update={"approved_by": "mara"})
    decision = _decide(build, proposing(build), [build.observation(90)], [record.model_copy(update={"spec": spec})])
    assert "approved by mara" in decision.message


def test_a_conclusion_keeps_what_was_seen(build: Any) -> None:
    decision = _decide(build, build.service(), [build.observation(40)], [answered(build)])
    (record,) = decision.updates
    assert record.status.phase == "Succeeded"
    assert record.status.after is not None
    assert record.status.after.score == 40
    assert "risk went from 95 to 40" in record.status.message


@pytest.mark.parametrize(
    ("spare", "words"), [(None, "longest free run went from 5 to 9 blocks; risk"), (3, "freed 7 bytes; risk")]
)
def test_a_compaction_is_told_in_the_terms_for_which_it_was_decided(build: Any, spare: int | None, words: str) -> None:
    record = answered(build, action="compact", freed=7)
    seen = record.spec.inputs.model_copy(update={"compactable_blocks": spare, "largest_free_run_blocks": 5})
    record = record.model_copy(update={"status": record.status.model_copy(update={"before": seen})})
    decision = _decide(build, build.service(), [build.observation(40, largest_free_run_blocks=9)], [record])
    (judged,) = decision.updates
    assert judged.status.phase == "Succeeded"
    assert judged.status.message.startswith(words)


def test_records_of_other_services_do_not_count(build: Any) -> None:
    record = answered(build, ago=1)
    other = record.model_copy(update={"spec": record.spec.model_copy(update={"service": "other"})})
    assert _decide(build, build.service(), [build.observation(90)], [other]).reason == Reason.EVICT


def _decide(
    build: Any, service: InferenceService, observations: list[Observation], records: list[Remediation]
) -> Decision:
    return decide(Inputs(service=service, observations=tuple(observations), records=tuple(records)), build.now)
