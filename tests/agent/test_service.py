import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.histogram import Histogram
from ullage_agent.service import WINDOW_S, Moment, Moments, remember, service
from ullage_agent.wire import Snapshot


def moment(at: float, instance: str = "a", histograms: Any = None, **fields: Any) -> Moment:
    return Moment(
        at=at, instance=instance, snapshot=Snapshot(sampled_at=0, **fields), histograms=histograms or {}
    )  # fmt: skip


def window(*moments: Moment) -> Moments:
    found: Moments = ()
    for item in moments:
        found = remember(found, item)
    return found


def test_rates_are_differences_over_the_window() -> None:
    found = service(
        window(
            moment(0.0, running=5, waiting=0, finished_total=10, preemptions_total=0, generated_tokens_total=100),
            moment(10.0, running=8, waiting=2, finished_total=20, preemptions_total=5, generated_tokens_total=600),
        )
    )
    assert found is not None
    assert found.window_s == 10.0
    assert (found.arrivals_per_s, found.admissions_per_s, found.finishes_per_s) == (1.5, 1.3, 1.0)
    assert (found.preemptions_per_s, found.generated_tokens_per_s) == (0.5, 50.0)


def test_what_is_unknown_stays_unknown() -> None:
    found = service(window(moment(0.0), moment(10.0)))
    assert found is not None
    assert (found.arrivals_per_s, found.preemptions_per_s, found.prefix_hit_ratio, found.ttft_p50_s) == (None,) * 4


@pytest.mark.parametrize("moments", [(), (moment(0.0),), (moment(0.0), moment(1.0))])
def test_too_short_a_window_says_nothing(moments: tuple[Moment, ...]) -> None:
    assert service(window(*moments)) is None


def test_preemption_is_inferred_before_it_is_counted() -> None:
    """As in the recorded pressure: running falls without a finish while the queue grows."""
    found = service(
        window(
            moment(0.0, running=21, waiting=0, finished_total=3, preemptions_total=0),
            moment(1.0, running=20, waiting=3, finished_total=3, preemptions_total=0),
            moment(2.0, running=17, waiting=6, finished_total=4, preemptions_total=0),
        )
    )
    assert found is not None
    assert found.preemptions_per_s == 0.0
    assert found.inferred_preemptions_per_s == pytest.approx((1 + 2) / 2.0)


def test_requests_that_finish_are_no_preemptions() -> None:
    found = service(
        window(moment(0.0, running=9, waiting=0, finished_total=0), moment(2.0, running=5, waiting=1, finished_total=4))
    )
    assert found is not None
    assert found.inferred_preemptions_per_s == 0.0


@pytest.mark.parametrize(
    "later",
    [
        moment(5.0, instance="b", finished_total=20),  # another process
        moment(5.0, finished_total=9),  # counters went back
        moment(-5.0, finished_total=20),  # so did the clock
    ],
)
def test_what_does_not_continue_starts_anew(later: Moment) -> None:
    assert remember((moment(0.0, finished_total=10),), later) == (later,)


def test_quantiles_are_of_the_window_alone() -> None:
    old = Histogram(((1.0, 100.0), (2.0, 100.0), (math.inf, 100.0)))
    new = Histogram(((1.0, 100.0), (2.0, 110.0), (math.inf, 110.0)))
    found = service(window(moment(0.0, histograms={"ttft": old}), moment(10.0, histograms={"ttft": new})))
    assert found is not None
    assert found.ttft_p50_s == pytest.approx(1.5)
    same = service(window(moment(0.0, histograms={"ttft": new}), moment(10.0, histograms={"ttft": new})))
    assert same is not None and same.ttft_p50_s is None


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=200))
def test_the_window_is_bounded_and_no_shorter_than_asked(steps: list[float]) -> None:
    at, moments = 0.0, ()
    for step in steps:
        at += step
        moments = remember(moments, moment(at))
    assert len(moments) <= 120
    if at - steps[0] > WINDOW_S and len(moments) < 120:
        assert moments[-1].at - moments[0].at >= WINDOW_S
    assert list(moments) == sorted(moments, key=lambda item: item.at)
