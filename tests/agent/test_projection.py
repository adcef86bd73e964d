import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ullage_agent.histogram import Histogram
from ullage_agent.lengths import MIN_FINISHED, LengthLearner, Lengths
from ullage_agent.projection import Load, project
from ullage_agent.wire import Snapshot

RANDOM_ENDS = Lengths(prompt_mean=100.0, answer_mean=200.0, answers=None, count=100.0)
ALL_500 = Lengths(
    prompt_mean=100.0,
    answer_mean=500.0,
    answers=Histogram(((490.0, 0.0), (510.0, 50.0), (math.inf, 50.0))),
    count=50.0,
)


def load(**changes: float) -> Load:
    values = {"held_tokens": 0.0, "running": 0, "waiting": 0, "tokens_per_s": 20.0}
    return Load(**{**values, "prompt_tokens": 100.0, **changes})  # type: ignore[arg-type]


def test_steady_arrivals_stay_level() -> None:
    """Little's law: held = arrivals x (prompt x time + area under the answer)."""
    held = 2.0 * (100.0 * 200.0 / 20.0 + 200.0**2 / 20.0)
    running = round(2.0 * 200.0 / 20.0)
    course = project(load(held_tokens=held, running=running), RANDOM_ENDS, 60.0).course(2.0)
    assert course.held[0] == pytest.approx(held)
    assert course.peak < 1.15 * held
    assert min(course.held) > 0.8 * held


def test_a_ramp_of_equal_answers_goes_to_its_level_and_no_further() -> None:
    level = 1.0 * (100.0 * 25.0 + 500.0 * 25.0 / 2)
    course = project(load(held_tokens=200.0, running=2), ALL_500, 120.0).course(1.0)
    assert course.peak == pytest.approx(level, rel=0.2)


def test_waiting_requests_come_in() -> None:
    few = project(load(held_tokens=1000.0, running=5), ALL_500, 60.0).course(0.0)
    many = project(load(held_tokens=1000.0, running=5, waiting=50), ALL_500, 60.0).course(0.0)
    assert many.peak > few.peak + 50 * 100


def test_without_arrivals_everything_ends() -> None:
    course = project(load(held_tokens=3000.0, running=10), ALL_500, 120.0).course(0.0)
    assert course.held[-1] < 100.0
    assert course.reaches(course.peak + 1.0) is None


def test_the_time_at_which_a_level_is_reached() -> None:
    course = project(load(held_tokens=1000.0, running=5), ALL_500, 60.0).course(5.0)
    at = course.reaches(3000.0)
    assert at is not None and 0.0 < at < 20.0
    assert course.reaches(500.0) == 0.0


@example(1.0, 0, 0, 0.0, 1.0, 2.2250738585072014e-308, ALL_500)
@given(
    st.floats(0, 1e7), st.integers(0, 2000), st.integers(0, 2000), st.floats(0, 1e3), st.floats(0.01, 1e3),
    st.floats(0, 1e5), st.sampled_from([RANDOM_ENDS, ALL_500]),
)  # fmt: skip
def test_any_load_gives_a_finite_course(
    held: float, running: int, waiting: int, arrivals: float, pace: float, prompt: float, lengths: Lengths
) -> None:
    course = project(
        Load(held_tokens=held, running=running, waiting=waiting, tokens_per_s=pace, prompt_tokens=prompt),
        lengths,
        120.0,
    ).course(arrivals)
    assert len(course.times) == len(course.held) <= 200
    assert all(math.isfinite(value) and value >= 0.0 for value in course.held)
    assert list(course.times) == sorted(course.times)


def histogram(count: float) -> Histogram:
    return Histogram(((100.0, count / 2), (200.0, count), (math.inf, count)))


def test_lengths_are_learned_from_enough_requests() -> None:
    learner = LengthLearner()
    few, many = histogram(MIN_FINISHED - 1), histogram(MIN_FINISHED)
    state = Snapshot(sampled_at=0)
    assert learner.learn(0.0, "a", state, {"answer_tokens": few, "prompt_tokens": few}) is None
    found = learner.learn(1.0, "a", state, {"answer_tokens": many, "prompt_tokens": many})
    assert found is not None
    assert (found.prompt_mean, found.survival(100.0)) == (100.0, 0.5)


def test_counters_teach_means() -> None:
    learner = LengthLearner()
    zero = Snapshot(
        sampled_at=0, finished_total=0, generated_tokens_total=0, prompt_tokens_total=0, admitted_total=0
    )  # fmt: skip
    later = Snapshot(
        sampled_at=0, finished_total=50, generated_tokens_total=5000, prompt_tokens_total=12_000, admitted_total=60
    )
    assert learner.learn(0.0, "a", zero, {}) is None
    found = learner.learn(60.0, "a", later, {})
    assert found is not None
    assert (found.answer_mean, found.prompt_mean) == (100.0, 200.0)
    assert found.survival(100.0) == pytest.approx(math.exp(-1))
    assert learner.learn(61.0, "b", later, {}) is None  # another process


def test_old_lengths_are_forgotten() -> None:
    learner = LengthLearner(period_s=10.0)
    state = Snapshot(sampled_at=0)
    short = {"answer_tokens": histogram(40.0), "prompt_tokens": histogram(40.0)}
    grown = Histogram(((100.0, 20.0), (200.0, 40.0), (math.inf, 40.0 + 40.0)))
    learner.learn(0.0, "a", state, short)
    learner.learn(10.0, "a", state, short)
    found = learner.learn(20.0, "a", state, {"answer_tokens": grown, "prompt_tokens": histogram(80.0)})
    assert found is not None
    assert found.survival(200.0) == 1.0
