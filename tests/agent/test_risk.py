import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent import risk as risk_module
from ullage_agent.fragmentation import fragmentation
from ullage_agent.risk import (
    FORECAST_CURVE,
    DeviceOutlook,
    RiskInputs,
    assess,
    classic,
    device,
    host,
    imminence,
    points_on_curve,
    thrash,
)
from ullage_agent.wire import Device, Forecast, Fragmentation, Host, Service, Snapshot


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


def served(**fields: float) -> Service:
    return Service(window_s=60.0, **fields)


@pytest.mark.parametrize(
    ("found", "points"),
    [
        (None, None),
        (served(), None),
        (served(preemptions_per_s=0.0, finishes_per_s=1.0), 0.0),
        (served(preemptions_per_s=1 / 60, finishes_per_s=0.0), 0.0),  # one alone is no thrash
        (served(preemptions_per_s=0.3, finishes_per_s=1.0), 85.0),
        (served(preemptions_per_s=0.0, inferred_preemptions_per_s=0.3, finishes_per_s=1.0), 85.0),
        (served(preemptions_per_s=2.0, finishes_per_s=1.0), 100.0),
        (served(recomputed_share=0.15), 85.0),
    ],
)
def test_thrash(found: Service | None, points: float | None) -> None:
    state = RiskInputs(
        snapshot=Snapshot(sampled_at=0), fragmentation=Fragmentation(), forecast=Forecast(), service=found
    )
    assert thrash(state) == (None if points is None else pytest.approx(points))


GIB = 1 << 30


def on_device(used: float, exhaustion_s: float | None = None) -> RiskInputs:
    gpu = Device(index=0, total_bytes=100 * GIB, used_bytes=int(used * GIB))
    return RiskInputs(
        snapshot=Snapshot(sampled_at=0),
        fragmentation=Fragmentation(),
        forecast=Forecast(),
        devices=(
            DeviceOutlook(device=Device(index=1)),  # a driver that says nothing
            DeviceOutlook(device=gpu, exhaustion_s=exhaustion_s),
        ),
    )


@pytest.mark.parametrize(
    ("used", "seconds_left", "points"),
    [
        (50.0, None, 0.0),
        (92.0, None, 0.0),
        (97.0, None, 50.0),
        (99.0, None, 85.0),
        (100.0, None, 100.0),
        (90.0, 30.0, 85.0),
    ],
)
def test_device(used: float, seconds_left: float | None, points: float) -> None:
    assert device(on_device(used, seconds_left)) == pytest.approx(points)


def test_no_device_is_no_term() -> None:
    assert device(inputs()) is None


def on_host(group: Host | None, **state: int) -> RiskInputs:
    return RiskInputs(
        snapshot=Snapshot(sampled_at=0, **state), fragmentation=Fragmentation(), forecast=Forecast(), host=group
    )


@pytest.mark.parametrize(
    ("group", "state", "points"),
    [
        (None, {}, None),
        (Host(), {}, None),
        (Host(limit_bytes=100, used_bytes=80), {}, 0.0),
        (Host(limit_bytes=100, used_bytes=95), {}, 85.0),
        (Host(limit_bytes=100, used_bytes=10, psi_full_avg10=0.5), {}, 85.0),
        (Host(used_bytes=95), {}, None),  # no limit, nothing to run into
        (Host(limit_bytes=100, used_bytes=20), {"host_total_bytes": 160, "host_used_bytes": 10}, 88.75),
        (Host(limit_bytes=100, used_bytes=60), {"host_total_bytes": 50, "host_used_bytes": 10}, 0.0),  # allocated
    ],
)
def test_host(group: Host | None, state: dict[str, int], points: float | None) -> None:
    found = host(on_host(group, **state))
    assert found == (None if points is None else pytest.approx(points, abs=1.0))


@pytest.mark.parametrize(
    ("hot", "peak", "points"), [(20, None, 40.0), (60, None, 88.0), (70, None, 100.0), (20, 99, 100.0)]
)
def test_growth_without_learned_lengths_counts_for_less(hot: int, peak: int | None, points: float) -> None:
    outlook = Forecast(exhaustion_p50_s=1.0, supply_blocks=1, projected_peak_blocks=peak)
    assert imminence(inputs(hot=hot, total=100, forecast=outlook)) == pytest.approx(points)


CURVES = [getattr(risk_module, name) for name in vars(risk_module) if name.endswith("_CURVE")]


@pytest.mark.parametrize("curve", CURVES)
def test_curves_are_monotone_and_in_range(curve: risk_module.Curve) -> None:
    xs, ys = zip(*curve, strict=True)
    assert list(xs) == sorted(set(xs))
    assert list(ys) in (sorted(ys), sorted(ys, reverse=True))
    assert min(ys) >= 0.0 and max(ys) <= 100.0
