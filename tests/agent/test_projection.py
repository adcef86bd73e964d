import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ullage_agent.histogram import Histogram
from ullage_agent.lengths import MAX_STRETCH, MIN_FINISHED, MIN_MEAN, LengthLearner, Lengths
from ullage_agent.passage import filled_by
from ullage_agent.projection import Load, project
from ullage_agent.wire import Snapshot

RANDOM_ENDS = Lengths(prompt_mean=100.0, prompt_deviation=50.0, answer_mean=200.0, answers=None, count=100.0)
ALL_500 = Lengths(
    prompt_mean=100.0,
    prompt_deviation=50.0,
    answer_mean=500.0,
    answers=Histogram(((490.0, 0.0), (510.0, 50.0), (math.inf, 50.0))),
    count=50.0,
)


def load(**changes: float) -> Load:
    values = {"held_tokens": 0.0, "running": 0, "waiting": 0, "tokens_per_s": 20.0}
    return Load(**{**values, "prompt_tokens": 100.0, **changes})  # type: ignore[arg-type]


def means(state: Load, lengths: Lengths, horizon_s: float, arrivals: float) -> Sequence[float]:
    return project(state, lengths, horizon_s).spread(arrivals, 0.0).means


def test_steady_arrivals_stay_level() -> None:
    """Little's law: held = arrivals x (prompt x time + area under the answer)."""
    held = 2.0 * (100.0 * 200.0 / 20.0 + 200.0**2 / 20.0)
    running = round(2.0 * 200.0 / 20.0)
    course = means(load(held_tokens=held, running=running), RANDOM_ENDS, 60.0, 2.0)
    assert course[0] == pytest.approx(held)
    assert max(course) < 1.15 * held
    assert min(course) > 0.8 * held


def test_a_ramp_of_equal_answers_goes_to_its_level_and_no_further() -> None:
    level = 1.0 * (100.0 * 25.0 + 500.0 * 25.0 / 2)
    course = means(load(held_tokens=200.0, running=2), ALL_500, 120.0, 1.0)
    assert max(course) == pytest.approx(level, rel=0.2)


def test_waiting_requests_come_in() -> None:
    few = means(load(held_tokens=1000.0, running=5), ALL_500, 60.0, 0.0)
    many = means(load(held_tokens=1000.0, running=5, waiting=50), ALL_500, 60.0, 0.0)
    assert max(many) > max(few) + 50 * 100


def test_without_arrivals_everything_ends() -> None:
    course = means(load(held_tokens=3000.0, running=10), ALL_500, 120.0, 0.0)
    assert course[-1] < 100.0


def test_arrivals_spread_as_a_compound_poisson_process_does() -> None:
    """Requests that never end: variance = arrivals x time x mean square, with nothing that runs."""
    endless = Lengths(prompt_mean=100.0, prompt_deviation=50.0, answer_mean=1e9, answers=None, count=100.0)
    still = load(tokens_per_s=1e-6, prompt_deviation=50.0)
    spread = project(still, endless, 120.0).spread(2.0, 0.0)
    assert spread.means[-1] == pytest.approx(2.0 * 120.0 * 100.0, rel=1e-3)
    assert spread.variances[-1] == pytest.approx(2.0 * 120.0 * (100.0**2 + 50.0**2), rel=1e-3)
    unsure = project(still, endless, 120.0).spread(2.0, 0.25)
    assert unsure.variances[-1] - spread.variances[-1] == pytest.approx(0.25 * (120.0 * 100.0) ** 2, rel=1e-3)


def test_what_is_held_now_is_certain_and_ends_are_not() -> None:
    spread = project(load(held_tokens=3000.0, running=10), RANDOM_ENDS, 60.0).spread(0.0, 0.0)
    assert spread.variances[0] == 0.0
    assert max(spread.variances) > 0.0


@example(1.0, 0, 0, 0.0, 1.0, 2.2250738585072014e-308, ALL_500)
@given(
    st.floats(0, 1e7), st.integers(0, 2000), st.integers(0, 2000), st.floats(0, 1e3), st.floats(0.01, 1e3),
    st.floats(0, 1e5), st.sampled_from([RANDOM_ENDS, ALL_500]),
)  # fmt: skip
def test_any_load_gives_a_finite_spread(
    held: float, running: int, waiting: int, arrivals: float, pace: float, prompt: float, lengths: Lengths
) -> None:
    spread = project(
        Load(
            held_tokens=held,
            running=running,
            waiting=waiting,
            tokens_per_s=pace,
            prompt_tokens=prompt,
            prompt_deviation=prompt / 2,
        ),
        lengths,
        120.0,
    ).spread(arrivals, arrivals)
    assert len(spread.times) == len(spread.means) == len(spread.variances) <= 200
    assert all(math.isfinite(value) and value >= 0.0 for value in (*spread.means, *spread.variances))
    assert list(spread.times) == sorted(spread.times)
    chances = filled_by(spread, 1e5)
    assert list(chances) == sorted(chances)
    assert chances[0] >= 0.0 and chances[-1] <= 1.0


def histogram(count: float) -> Histogram:
    return Histogram(((100.0, count / 2), (200.0, count), (math.inf, count)))


def test_lengths_are_learned_from_enough_requests() -> None:
    learner = LengthLearner()
    few, many = histogram(MIN_FINISHED - 1), histogram(MIN_FINISHED)
    state = Snapshot(sampled_at=0)
    assert learner.learn(0.0, "a", state, {"answer_tokens": few, "prompt_tokens": few}) is None
    found = learner.learn(1.0, "a", state, {"answer_tokens": many, "prompt_tokens": many})
    assert found is not None
    assert (found.prompt_mean, found.prompt_deviation, found.survival(100.0)) == (100.0, 50.0, 0.5)


def counted(finished: int, generated: int) -> Snapshot:
    return Snapshot(
        sampled_at=0, finished_total=finished, generated_tokens_total=generated, prompt_tokens_total=200 * finished
    )


def test_answers_that_go_on_are_longer_than_those_that_ended() -> None:
    """While work builds up, the short answers end first; tokens of the others are counted too."""
    known = {"answer_tokens": histogram(40.0), "prompt_tokens": histogram(40.0)}  # mean 100
    settled = LengthLearner().learn(0.0, "a", counted(40, 4000), known)
    building = LengthLearner().learn(0.0, "a", counted(40, 6000), known)
    wild = LengthLearner().learn(0.0, "a", counted(40, 400_000), known)
    assert settled is not None and building is not None and wild is not None
    assert (settled.stretch, building.stretch, wild.stretch) == (1.0, 1.5, MAX_STRETCH)
    assert building.survival(150.0) == settled.survival(100.0)
    assert building.longest() == 1.5 * settled.longest()


def test_counters_teach_means_early_and_with_little_weight() -> None:
    learner = LengthLearner()
    assert learner.learn(0.0, "a", counted(MIN_MEAN - 1, 400), {}) is None
    found = learner.learn(1.0, "a", counted(MIN_MEAN, 500), {})
    assert found is not None
    assert (found.answer_mean, found.prompt_mean, found.count) == (100.0, 200.0, MIN_MEAN)
    assert found.survival(100.0) == pytest.approx(math.exp(-1))


def test_another_process_serves_the_same_callers() -> None:
    learner = LengthLearner()
    before = learner.learn(0.0, "a", counted(100, 10_000), {})
    assert before is not None
    assert learner.learn(1.0, "b", counted(0, 0), {}) is before
    assert learner.learn(9.0, "b", counted(MIN_MEAN, 9000), {}) is before  # too few to unlearn by
    after = learner.learn(60.0, "b", counted(50, 10_000), {})
    assert after is not None and after.answer_mean == 200.0


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
