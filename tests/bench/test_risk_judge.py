"""How alarms are judged: figures that detectors are chosen by."""

from __future__ import annotations

import pytest
from risk_judge import ALARM, LEVELS, Alarms, Tally, at_equal_false_alarms, episodes, recall_gain, tally
from risk_simulator import Scenario
from risk_traces import judge_scenarios


def judged(alarms: Alarms, events: tuple[float, ...] = (), shortages: tuple[float, ...] = ()) -> Tally:
    scenario = Scenario(
        name="s", family="f", flavour="ullage", points=(), events=events, shortages=shortages, duration=600.0
    )
    return tally(alarms, scenario, lambda begin, end: begin <= 200.0 <= end)


def on(*seconds: int) -> Alarms:
    return [(float(second), second in seconds) for second in range(600)]


def test_alarms_close_together_are_one_episode() -> None:
    assert episodes(on(10, 40, 71)) == [(10.0, 40.0), (71.0, 71.0)]


@pytest.mark.parametrize(
    ("alarms", "lead"),
    [
        (on(290), 10.0),
        (on(240, 241), 60.0),  # it ended 59 s before
        (on(230), 0.0),  # it ended 70 s before
        (on(*range(100, 400)), 120.0),  # no more is counted
        (on(300), 0.0),  # not before the event
        (on(), 0.0),
    ],
)
def test_lead_of_an_event(alarms: Alarms, lead: float) -> None:
    found = judged(alarms, events=(300.0,))
    assert (found.leads, found.foreseen) == ((lead,), int(lead > 0))


@pytest.mark.parametrize(
    ("alarms", "false", "near"),
    [
        (on(100), 1, 0),
        (on(150), 1, 1),  # the pool was nearly full at 200
        (on(250), 0, 0),  # blocks were short at 300
        (on(560), 0, 0),  # the recording ends before it can be told
        (on(100, 400), 2, 0),
    ],
)
def test_false_alarms(alarms: Alarms, false: int, near: int) -> None:
    found = judged(alarms, shortages=(300.0,))
    assert (found.false_alarms, found.near_misses) == (false, near)


def test_an_alarm_that_is_always_on_shows_in_minutes() -> None:
    always = judged(on(*range(600)), events=(300.0,))
    assert (always.recall, always.false_alarms) == (1.0, 0)
    # all seconds but the minute up to the event, and the last minute, of which nobody knows
    assert always.false_s == 600 - 61 - 59


def test_the_level_is_lowered_until_a_false_alarm_more() -> None:
    def did(recall: float, false: int) -> Tally:
        return Tally(leads=(5.0,) * 10, foreseen=round(10 * recall), false_alarms=false, hours=1.0)

    curve = {70.0: did(1.0, 1), 80.0: did(0.9, 5), 90.0: did(0.7, 2), 99.0: did(0.4, 0)}
    assert at_equal_false_alarms(curve, did(0.5, 3))["level"] == 90.0  # an alarm that never ends is no bargain
    assert at_equal_false_alarms(curve, did(0.5, 5))["recall"] == 1.0
    assert at_equal_false_alarms(curve, Tally())["level"] == 99.0
    assert at_equal_false_alarms({80.0: did(0.9, 5)}, did(0.5, 3))["level"] is None


def foresaw(count: int, false: int = 0) -> Tally:
    return Tally(leads=(5.0,) * 10, foreseen=count, false_alarms=false, hours=1.0)


def test_a_gain_in_recall_is_as_sure_as_scenarios_are_many() -> None:
    some = [foresaw(10), foresaw(0)] * 5
    assert recall_gain({90.0: some}, some) == (0.0, 0.0)
    assert recall_gain({90.0: [foresaw(10)] * 10}, [foresaw(0)] * 10) == (1.0, 1.0)
    bounds = recall_gain({90.0: some}, [foresaw(0)] * 10)  # ten scenarios decide, not their hundred events
    assert bounds is not None
    assert bounds[0] <= 0.3
    assert bounds[1] >= 0.7
    assert recall_gain({90.0: [Tally()]}, [Tally()]) is None


def test_a_gain_in_recall_is_at_a_level_found_anew() -> None:
    lower, higher = [foresaw(10, false=1), *[foresaw(10)] * 9], [foresaw(2)] * 10
    baseline = [*[foresaw(0)] * 9, foresaw(0, false=1)]
    assert recall_gain({80.0: lower, 90.0: higher}, baseline) == (0.2, 1.0)
    never = [foresaw(10, false=1)] * 10
    assert recall_gain({90.0: never}, [foresaw(5)] * 10) == (-0.5, -0.5)


def test_a_scenario_counts_once_at_every_level() -> None:
    one = Scenario(name="s", family="f", flavour="ullage", points=(), events=(300.0,), shortages=(), duration=600.0)
    verdict = judge_scenarios([(0, one)])
    assert set(verdict.curve) == set(LEVELS)
    assert {(len(did.leads), did.hours) for did in verdict.curve.values()} == {(1, 600 / 3600)}
    assert verdict.curve[ALARM] == verdict.whole("ullage")
