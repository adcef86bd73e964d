import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.fragmentation import fragmentation
from ullage_agent.risk import FORECAST_CURVE, RiskInputs, assess, classic, imminence, points_on_curve
from ullage_agent.wire import Forecast, Fragmentation, Snapshot


def inputs(
    *,
    hot: int | None = None,
    total: int | None = None,
    external: float | None = None,
    forecast: Forecast | None = None,
) -> RiskInputs:
    return RiskInputs(
        snapshot=Snapshot(sampled_at=0, hot_blocks=hot, total_blocks=total),
        fragmentation=Fragmentation(external=external),
        forecast=forecast or Forecast(),
    )


@pytest.mark.parametrize(
    ("seconds", "points"),
    [
        (0.0, 100.0),
        (5.0, 100.0),
        (17.5, 92.5),
        (30.0, 85.0),
        (75.0, 67.5),
        (120.0, 50.0),
        (360.0, 25.0),
        (600.0, 0.0),
        (1e9, 0.0),
    ],
)
def test_forecast_curve(seconds: float, points: float) -> None:
    assert points_on_curve(seconds, FORECAST_CURVE) == pytest.approx(points)


@pytest.mark.parametrize(
    ("hot", "total", "external", "points"),
    [
        (256, 256, 1.0, 100.0),
        (256, 256, 0.0, 60.0),  # why classic alone is not enough
        (0, 256, 1.0, 40.0),
        (0, 256, 0.0, 0.0),
        (192, 256, 1.0, 85.0),
        (None, 256, 0.0, None),
        (1, None, 0.0, None),
        (1, 0, 0.0, None),
        (1, 256, None, None),
    ],
)
def test_classic(hot: int | None, total: int | None, external: float | None, points: float | None) -> None:
    assert classic(inputs(hot=hot, total=total, external=external)) == points


def test_a_pool_of_nothing_but_cache_has_external_one_and_no_pressure() -> None:
    snapshot = Snapshot(
        sampled_at=0,
        total_blocks=256,
        hot_blocks=0,
        reclaimable_blocks=256,
        free_blocks=0,
        largest_free_run_blocks=0,
    )
    risk = assess(RiskInputs(snapshot=snapshot, fragmentation=fragmentation(snapshot), forecast=Forecast()))
    assert risk.terms == {"classic": 40.0}


@pytest.mark.parametrize(
    ("forecast", "points"),
    [
        (Forecast(exhaustion_p50_s=30.0, supply_blocks=1), 85.0),
        (Forecast(demand_blocks=5, supply_blocks=5), 0.0),  # fits: known without a trend
        (Forecast(growth_blocks_per_s=0.0, supply_blocks=5), 0.0),  # looked for, not in sight
        (Forecast(supply_blocks=5), None),  # no trend yet
        (Forecast(growth_blocks_per_s=1.0), None),  # supply unknown
        (Forecast(demand_blocks=6, supply_blocks=5), None),
    ],
)
def test_forecast_term(forecast: Forecast, points: float | None) -> None:
    assert imminence(inputs(forecast=forecast)) == points


def test_the_greatest_term_is_score_and_winner() -> None:
    risk = assess(inputs(hot=256, total=256, external=0.0, forecast=Forecast(exhaustion_p50_s=5.0)))
    assert risk.terms == {"classic": 60.0, "forecast": 100.0}
    assert (risk.score, risk.winner) == (100.0, "forecast")


def test_equal_terms_go_to_the_first() -> None:
    risk = assess(inputs(hot=256, total=256, external=1.0, forecast=Forecast(exhaustion_p50_s=0.0)))
    assert (risk.score, risk.winner) == (100.0, "classic")


def test_nothing_known_is_no_score() -> None:
    risk = assess(inputs())
    assert (risk.score, risk.winner, risk.terms) == (None, None, {})


seconds = st.floats(0, 1e12)


@given(seconds, seconds)
def test_sooner_is_never_less_risky(one: float, other: float) -> None:
    sooner, later = sorted((one, other))
    assert points_on_curve(sooner, FORECAST_CURVE) >= points_on_curve(later, FORECAST_CURVE)


@given(
    st.integers(0, 2**53),
    st.none() | st.integers(0, 2**53),
    st.none() | st.floats(0, 1),
    st.none() | seconds,
)
def test_scores_stay_in_range(hot: int, total: int | None, external: float | None, p50: float | None) -> None:
    risk = assess(inputs(hot=hot, total=total, external=external, forecast=Forecast(exhaustion_p50_s=p50)))
    for points in risk.terms.values():
        assert math.isfinite(points)
        assert 0.0 <= points <= 100.0
    assert risk.score == (max(risk.terms.values()) if risk.terms else None)


@given(st.integers(1, 1000), st.floats(0, 1), st.data())
def test_classic_rises_with_pressure(total: int, external: float, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    less = classic(inputs(hot=low, total=total, external=external))
    more = classic(inputs(hot=high, total=total, external=external))
    assert less is not None and more is not None
    assert less <= more
