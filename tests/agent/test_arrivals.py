from dataclasses import replace

import pytest

from ullage_agent.adapters.base import Reading
from ullage_agent.analysis import Analysis
from ullage_agent.arrivals import HELD_UP_READINGS, admissions_held_up, steady_arrivals
from ullage_agent.service import Moment, Moments
from ullage_agent.wire import EngineIdentity, Snapshot


def at_work(second: int, **changes: int) -> Snapshot:
    """An engine that starts, ends and decodes one request a second."""
    state = Snapshot(
        sampled_at=0,
        block_tokens=16,
        total_blocks=1000,
        hot_blocks=300 + second % 2,
        free_blocks=700 - second % 2,
        reclaimable_blocks=0,
        running=20,
        waiting=0,
        finished_total=100 + second,
        admitted_total=120 + second,
        prompt_tokens_total=20_000 + 200 * second,
        generated_tokens_total=40_000 + 400 * second,
    )
    return replace(state, **changes)


def moments(*states: Snapshot) -> Moments:
    return tuple(Moment(at=float(second), instance="a", snapshot=state) for second, state in enumerate(states))


def test_what_finishes_at_a_level_has_arrived() -> None:
    pace = steady_arrivals(moments(*(at_work(second) for second in range(31))))
    assert pace is not None
    assert pace.per_s == pytest.approx(1.0)
    assert pace.variance == pytest.approx(1.0 / pace.counted_s)


def test_a_burst_is_not_expected_again() -> None:
    states = [at_work(second) for second in range(31)]
    burst = [replace(state, waiting=100 if second >= 28 else 0) for second, state in enumerate(states)]
    pace = steady_arrivals(moments(*burst))
    assert pace is not None
    assert pace.per_s == pytest.approx(1.0)


def test_silence_is_not_certain() -> None:
    pace = steady_arrivals(moments(*(at_work(0) for _ in range(31))))
    assert pace is not None
    assert pace.per_s == 0.0
    assert pace.variance > 0.0


def test_an_engine_that_does_not_count_says_no_pace() -> None:
    silent = [replace(at_work(second), finished_total=None) for second in range(31)]
    assert steady_arrivals(moments(*silent)) is None


@pytest.mark.parametrize(
    ("waiting", "free", "expected"),
    [
        (50, 700, 1.0),  # beside 700 free blocks, they wait for something else
        (50, 50, None),  # memory may be what they wait for
        (0, 700, None),
    ],
)
def test_a_queue_beside_room_is_held_up_by_something_else(waiting: int, free: int, expected: float | None) -> None:
    states = [at_work(s, waiting=waiting, free_blocks=free, hot_blocks=1000 - free) for s in range(HELD_UP_READINGS)]
    assert admissions_held_up(moments(*states)) == expected


def test_a_queue_of_a_moment_is_not_yet_held_up() -> None:
    states = [at_work(0), at_work(1, waiting=50), at_work(2, waiting=50)]
    assert admissions_held_up(moments(*states)) is None


def play(states: list[Snapshot]) -> list[float]:
    analysis, identity = Analysis(), EngineIdentity(type="fake", instance="a")
    found = [
        analysis.take(Reading(snapshot=state, identity=identity), float(second)) for second, state in enumerate(states)
    ]
    return [one.risk.terms.get("forecast", 0.0) for one in found]


def test_requests_that_come_to_wait_at_an_engine_that_stands_still_are_no_sign_of_full_memory() -> None:
    """A stuck engine's queue grows; its pool does not."""
    stuck = [at_work(40, waiting=3 * second) for second in range(1, 30)]
    assert max(play([*(at_work(second) for second in range(41)), *stuck])[41:]) < 50.0


def test_the_same_queue_at_an_engine_that_works_is() -> None:
    crowded = [at_work(41 + second, waiting=100 * (second + 1)) for second in range(3)]
    assert max(play([*(at_work(second) for second in range(41)), *crowded])) >= 85.0


def test_an_engine_at_its_limit_of_sequences_does_not_fill_by_its_queue() -> None:
    """The limit is known by what it does: a queue for seconds, room beside it, and nobody let in but for who ends."""
    limited = [at_work(41 + second, waiting=100) for second in range(20)]
    points = play([*(at_work(second) for second in range(41)), *limited])
    assert max(points[-10:]) < 50.0
