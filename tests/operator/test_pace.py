"""How soon a service is looked at again: at a rate, sooner where something is going on, never by all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ullage_agent.wire import Forecast
from ullage_operator.pace import BRISK, REST, Pace, astir
from ullage_operator.policy import Decision, Reason
from ullage_operator.sweep import SweepResult


def test_what_a_round_took_is_part_of_the_interval() -> None:
    pace = Pace(2.0)
    assert pace.pause("a", astir=False, spent_s=0.5) == 1.5
    assert pace.pause("a", astir=False, spent_s=9.0) == pytest.approx(2.0 * REST), "a round that is late leaves room"


def test_where_something_goes_on_it_is_looked_at_sooner() -> None:
    pace = Pace(2.0)
    assert pace.pause("a", astir=True, spent_s=0.0) == 2.0 / BRISK
    assert pace.pause("a", astir=False, spent_s=0.0) == 2.0


def test_only_so_many_services_are_looked_at_sooner() -> None:
    pace = Pace(2.0, brisk_services=2)
    pauses = [pace.pause(name, astir=True, spent_s=0.0) for name in "abc"]
    assert pauses == [0.5, 0.5, 2.0]
    assert pace.pause("a", astir=True, spent_s=0.0) == 0.5, "it keeps its own place"
    pace.pause("a", astir=False, spent_s=0.0)
    assert pace.pause("c", astir=True, spent_s=0.0) == 0.5
    pace.forget("c")
    assert pace.pause("d", astir=True, spent_s=0.0) == 0.5


@pytest.mark.parametrize(
    ("score", "age", "reason", "end_s", "expected"),
    [
        (30.0, 0.5, Reason.HEALTHY, None, False),
        (30.0, 0.5, Reason.HEALTHY, 30.0, True),
        (30.0, 0.5, Reason.HEALTHY, 300.0, False),
        (75.0, 0.5, Reason.HEALTHY, None, True),
        (75.0, 60.0, Reason.STALE_DATA, None, False),
        (30.0, 0.5, Reason.SETTLING, None, True),
        (30.0, 0.5, Reason.AWAITING_APPROVAL, None, False),
    ],
)
def test_what_counts_as_going_on(
    build: Any, score: float, age: float, reason: Reason, end_s: float | None, expected: bool
) -> None:
    seen = build.observation(score, age=age)
    report = dataclasses.replace(seen.report, forecast=Forecast(exhaustion_p50_s=end_s))
    result = SweepResult(
        observations=(dataclasses.replace(seen, report=report),),
        decision=Decision(verdict="Hold", reason=reason, message=""),
        changed_records=(),
        records=(),
    )
    assert astir(build.service(releaseThreshold=60), result, now=build.now) is expected
