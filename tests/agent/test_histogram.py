import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.histogram import Histogram, add, from_cumulative

TEN = Histogram(((1.0, 2.0), (5.0, 8.0), (math.inf, 10.0)))


@pytest.mark.parametrize(("share", "value"), [(0.1, 0.5), (0.2, 1.0), (0.5, 3.0), (0.8, 5.0), (0.9, 5.0), (1.0, 5.0)])
def test_quantiles_are_straight_within_a_bucket(share: float, value: float) -> None:
    assert TEN.quantile(share) == pytest.approx(value)


@pytest.mark.parametrize(("value", "share"), [(0.0, 1.0), (0.5, 0.9), (1.0, 0.8), (3.0, 0.5), (5.0, 0.2), (9.0, 0.2)])
def test_share_above(value: float, share: float) -> None:
    assert TEN.share_above(value) == pytest.approx(share)


def test_an_empty_histogram_says_nothing() -> None:
    empty = Histogram(((1.0, 0.0), (math.inf, 0.0)))
    assert (empty.quantile(0.5), empty.mean(), empty.share_above(0.5)) == (None, None, 0.0)


def test_difference_and_restart() -> None:
    later = Histogram(((1.0, 2.0), (5.0, 9.0), (math.inf, 12.0)))
    assert later.since(TEN).buckets == ((1.0, 0.0), (5.0, 1.0), (math.inf, 2.0))
    assert TEN.since(later) == TEN  # fewer than before: the engine was restarted
    assert TEN.since(None) == TEN
    assert TEN.since(Histogram(((math.inf, 1.0),))) == TEN


@pytest.mark.parametrize(
    "pairs",
    [[], [(1.0, 1.0)], [(1.0, 2.0), (math.inf, 1.0)], [(math.inf, math.nan)], [(math.inf, -1.0)],
     [(math.nan, 1.0), (math.inf, 1.0)], [(1.0, 1.0), (1.0, 1.0), (math.inf, 1.0)]],
)  # fmt: skip
def test_what_is_no_cumulative_histogram(pairs: list[tuple[float, float]]) -> None:
    assert from_cumulative(pairs) is None


def test_sums_need_the_same_buckets() -> None:
    assert add([TEN, TEN]) == Histogram(((1.0, 4.0), (5.0, 16.0), (math.inf, 20.0)))
    assert add([TEN, Histogram(((math.inf, 1.0),))]) is None
    assert add([]) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_within_a_bucket_of_the_truth(values: list[float], share: float) -> None:
    bounds = [*range(10, 110, 10), math.inf]
    found = from_cumulative([(bound, sum(value <= bound for value in values)) for bound in bounds])
    assert found is not None
    truth = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    quantile = found.quantile(share)
    assert quantile is not None
    assert abs(quantile - truth) <= 10 + 1e-6
