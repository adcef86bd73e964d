"""The phase machine: which steps exist, which raise, and what is kept of the past."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from ullage_agent.wire import ActionResult
from ullage_operator.errors import IllegalTransition
from ullage_operator.model import FINAL_PHASES, Phase
from ullage_operator.remediation import TRANSITIONS, answered, approve, enter, finish, sent, start, stepped, surplus

PHASES = get_args(Phase)
LEGAL = {(a, b) for a, following in TRANSITIONS.items() for b in following}


def test_the_table_covers_every_phase_and_final_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(PHASES)
    assert {phase for phase in PHASES if not TRANSITIONS[phase]} == set(FINAL_PHASES)


@pytest.mark.parametrize("present", PHASES)
@pytest.mark.parametrize("wanted", ["Approved", "Running", *sorted(FINAL_PHASES)])
def test_only_the_table_s_steps_are_taken(build: Any, present: str, wanted: str) -> None:
    record = build.record(phase=present)

    def step() -> Any:
        if wanted == "Approved":
            return approve(record)
        if wanted == "Running":
            return start(record, before=record.spec.inputs, now=build.now)
        return finish(record, wanted, message="", now=build.now)  # type: ignore[arg-type]

    if (present, wanted) in LEGAL:
        assert step().status.phase == wanted
    else:
        with pytest.raises(IllegalTransition, match=record.metadata.name):
            step()


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "Running"])
def test_only_a_running_record_is_sent(build: Any, phase: str) -> None:
    with pytest.raises(IllegalTransition):
        sent(build.record(phase=phase))


@pytest.mark.parametrize(
    ("outcome", "phase"),
    [("Succeeded", "Running"), ("Ineffective", "Ineffective"), ("Failed", "Failed"), ("Unsupported", "Failed")],
)
def test_an_answer_is_final_unless_its_effect_is_still_to_be_seen(build: Any, outcome: Any, phase: str) -> None:
    result = ActionResult(action="evict", outcome=outcome, message="m", bytes_freed=7, blocks_freed=2)
    record = answered(build.record(started_at=-1), result, now=build.now)
    assert record.status.phase == phase
    assert (record.status.bytes_freed, record.status.blocks_freed) == (7, 2)
    assert record.status.answered_at is not None


def test_a_peer_s_negative_count_is_no_record(build: Any) -> None:
    result = ActionResult(action="evict", outcome="Succeeded", message="", bytes_freed=-5, blocks_freed=-1)
    record = answered(build.record(started_at=-1), result, now=build.now)
    assert (record.status.bytes_freed, record.status.blocks_freed) == (0, 0)


def test_the_name_is_a_legal_key_and_differs_by_engine_and_time(build: Any) -> None:
    names = {build.record(pod=pod, age=age).metadata.name for pod in ("web-a", "web-b") for age in (1.0, 1.001, 2.0)}
    assert len(names) == 6
    assert all(name.replace("-", "").isalnum() and name.islower() and len(name) <= 63 for name in names)
    assert build.record(age=1).metadata.name == build.record(age=1).metadata.name


def test_history_is_cut_by_count_oldest_first(build: Any) -> None:
    old = [build.record(phase="Succeeded", age=4000 + n) for n in range(5)]
    assert surplus(old, limit=2, now=build.now) == [r.metadata.name for r in (old[4], old[3], old[2])]


def test_history_is_cut_by_age(build: Any) -> None:
    old, young = build.record(phase="Succeeded", age=90_000), build.record(phase="Succeeded", age=80_000)
    assert surplus([old, young], limit=10, now=build.now, max_age_s=86_400) == [old.metadata.name]
    assert surplus([build.record(phase="Succeeded", age=3000)], limit=10, now=build.now, max_age_s=60) == []


@pytest.mark.parametrize(
    ("path", "legal"),
    [
        (["Scaling", "Cancelling"], True),
        (["Draining", "Removing"], True),
        (["Draining", "Restoring"], True),
        (["Draining", "Removing", "Restoring"], True),
        (["Scaling", "Removing"], False),
        (["Draining", "Restoring", "Removing"], False),
    ],
)
def test_stages_follow_their_table(build: Any, path: list[str], legal: bool) -> None:
    action = "scaleUp" if path[0] == "Scaling" else "scaleDown"
    proposed = build.record(action, "Proposed")
    record = start(approve(proposed), before=proposed.spec.inputs, now=build.now)
    assert record.status.stage == path[0]
    if legal:
        for stage in path[1:]:
            record = enter(stepped(record, "m", now=build.now), stage, message="m", now=build.now)  # type: ignore[arg-type]
            assert (record.status.stage, record.status.answered_at, record.status.attempts) == (stage, None, 0)
        return
    with pytest.raises(IllegalTransition):
        for stage in path[1:]:
            record = enter(record, stage, message="m", now=build.now)  # type: ignore[arg-type]


def test_the_last_hour_and_open_records_are_kept_over_the_limit(build: Any) -> None:
    recent = [build.record(phase="Succeeded", age=10 + n) for n in range(5)]
    running = build.record(phase="Running", age=9000)
    assert surplus([*recent, running], limit=1, now=build.now) == []
