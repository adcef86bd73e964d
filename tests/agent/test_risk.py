import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent import risk as risk_module
from ullage_agent.allocator import Need
from ullage_agent.curve import Curve, points_on_curve
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
    thrash,
)
from ullage_agent.wire import Device, Forecast, Fragmentation, Host, Service, Snapshot


def inputs(
    *,
    hot: int | None = None,
    total: int | None = None,
    available: int | None = None,
    largest: int | None = None,
    forecast: Forecast | None = None,
    service: Service | None = None,
) -> RiskInputs:
    """Half of what is available is free, half is cached."""
    half = None if available is None else available // 2
    return RiskInputs(
        snapshot=Snapshot(
            sampled_at=0,
            hot_blocks=hot,
            total_blocks=total,
            free_blocks=half,
            reclaimable_blocks=None if available is None or half is None else available - half,
            largest_allocation_blocks=largest,
        ),
        fragmentation=Fragmentation(),
        forecast=forecast or Forecast(),
        service=service,
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
    ("hot", "total", "available", "largest", "points"),
    [
        (256, 256, 0, 0, 100.0),
        (252, 256, 4, 4, 59.0625),  # why classic alone is not enough
        (0, 256, 256, 256, 0.0),
        (192, 256, 64, 64, 45.0),  # cached blocks are supply: full of cache is not fragmented
        (192, 256, 64, 16, 75.0),  # an engine that needs neighbours and has few
        (200, 256, 50, 0, 86.875),
        (None, 256, 10, 10, None),
        (1, None, 10, 10, None),
        (1, 0, 10, 10, None),
        (1, 256, None, 10, None),
        (1, 256, 10, None, None),
    ],
)
def test_classic(
    hot: int | None, total: int | None, available: int | None, largest: int | None, points: float | None
) -> None:
    found = classic(inputs(hot=hot, total=total, available=available, largest=largest))
    assert found == (None if points is None else pytest.approx(points))


def test_a_pool_of_nothing_but_cache_is_at_no_risk_though_nothing_is_free() -> None:
    snapshot = Snapshot(
        sampled_at=0,
        total_blocks=256,
        hot_blocks=0,
        reclaimable_blocks=256,
        free_blocks=0,
        largest_free_run_blocks=0,
        largest_allocation_blocks=256,
    )
    figures = fragmentation(snapshot)
    risk = assess(RiskInputs(snapshot=snapshot, fragmentation=figures, forecast=Forecast()))
    assert figures.external == 1.0  # the published figure is still about free blocks
    assert risk.terms == {"classic": 0.0}


@pytest.mark.parametrize(("cached", "points"), [(0, 60 * 0.5 + 40 * 0.75), (1, None)])
def test_the_longest_free_run_stands_in_while_nothing_is_cached(cached: int, points: float | None) -> None:
    snapshot = Snapshot(
        sampled_at=0,
        total_blocks=200,
        hot_blocks=100,
        reclaimable_blocks=cached,
        free_blocks=100,
        largest_free_run_blocks=25,
    )
    found = classic(RiskInputs(snapshot=snapshot, fragmentation=Fragmentation(), forecast=Forecast()))
    assert found == (None if points is None else pytest.approx(points))


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
    outlook = Forecast(exhaustion_chance=1.0)
    risk = assess(inputs(hot=128, total=256, available=128, largest=128, forecast=outlook))
    assert risk.terms == {"classic": 30.0, "forecast": 100.0}
    assert (risk.score, risk.winner) == (100.0, "forecast")


def test_equal_terms_go_to_the_first() -> None:
    risk = assess(inputs(hot=256, total=256, available=0, largest=0, forecast=Forecast(exhaustion_p50_s=0.0)))
    assert (risk.score, risk.winner) == (100.0, "classic")


def test_nothing_known_is_no_score() -> None:
    risk = assess(inputs())
    assert (risk.score, risk.winner, risk.terms) == (None, None, {})


seconds = st.floats(0, 1e12)


@given(seconds, seconds)
def test_sooner_is_never_less_risky(one: float, other: float) -> None:
    sooner, later = sorted((one, other))
    assert points_on_curve(sooner, FORECAST_CURVE) >= points_on_curve(later, FORECAST_CURVE)


counts = st.none() | st.integers(0, 2**53)


@given(st.integers(0, 2**53), counts, counts, counts, st.none() | seconds, st.none() | st.floats(0, 1))
def test_scores_stay_in_range(
    hot: int, total: int | None, available: int | None, largest: int | None, p50: float | None, chance: float | None
) -> None:
    outlook = Forecast(exhaustion_p50_s=p50, exhaustion_chance=chance, growth_blocks_per_s=1.0, supply_blocks=1)
    risk = assess(inputs(hot=hot, total=total, available=available, largest=largest, forecast=outlook))
    for points in risk.terms.values():
        assert math.isfinite(points)
        assert 0.0 <= points <= 100.0
    assert risk.score == (max(risk.terms.values()) if risk.terms else None)


@given(st.integers(1, 1000), st.integers(0, 1000), st.data())
def test_classic_rises_with_pressure(total: int, largest: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    less = classic(inputs(hot=low, total=total, available=1000, largest=largest))
    more = classic(inputs(hot=high, total=total, available=1000, largest=largest))
    assert less is not None and more is not None
    assert less <= more


def served(**fields: float | None) -> Service:
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


@pytest.mark.parametrize(
    ("pool", "need", "points"),
    [
        (0, None, 50.0),  # 3 % free
        (70, None, 0.0),  # the pool is there for good: 3 of 30 are free
        (99, None, 50.0),  # a pool larger than what is used cannot be on this device
        (70, Need(request=2 * GIB, waste=0), 0.0),
        (70, Need(request=3 * GIB, waste=0), 60.0),  # just fits
        (70, Need(request=6 * GIB, waste=0), 90.0),
        (70, Need(request=6 * GIB, waste=6 * GIB), 0.0),  # usable waste is room
    ],
)
def test_device_without_its_pool_against_the_largest_request(pool: int, need: Need | None, points: float) -> None:
    gpu = Device(index=0, total_bytes=100 * GIB, used_bytes=97 * GIB)
    outlook = DeviceOutlook(device=gpu, pool_bytes=pool * GIB, need=need)
    state = RiskInputs(
        snapshot=Snapshot(sampled_at=0), fragmentation=Fragmentation(), forecast=Forecast(), devices=(outlook,)
    )
    assert device(state) == pytest.approx(points)


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
    ("hot", "finishes", "points"),
    [
        (20, 1.0, 40.0),
        (60, 1.0, 60.0),
        (60, 0.0, 88.0),  # nothing has been seen that would stop it
        (60, None, 88.0),
        (85, 1.0, 85.0),
        (100, 1.0, 100.0),
    ],
)
def test_growth_without_learned_lengths_counts_for_less(hot: int, finishes: float | None, points: float) -> None:
    outlook = Forecast(exhaustion_p50_s=1.0, supply_blocks=1)
    found = served(finishes_per_s=finishes)
    assert imminence(inputs(hot=hot, total=100, forecast=outlook, service=found)) == pytest.approx(points)


@pytest.mark.parametrize(("chance", "points"), [(0.0, 0.0), (0.36, 42.5), (0.72, 85.0), (1.0, 100.0)])
@pytest.mark.parametrize("p50", [None, 1.0])
def test_of_learned_lengths_the_chance_alone_counts(chance: float, points: float, p50: float | None) -> None:
    outlook = Forecast(exhaustion_chance=chance, exhaustion_p50_s=p50, growth_blocks_per_s=9.0, supply_blocks=5)
    assert imminence(inputs(hot=1, total=10, forecast=outlook)) == pytest.approx(points)


@given(st.floats(0, 1), st.floats(0, 1))
def test_likelier_is_never_less_risky(one: float, other: float) -> None:
    low, high = (imminence(inputs(forecast=Forecast(exhaustion_chance=c))) for c in sorted((one, other)))
    assert low is not None and high is not None
    assert 0.0 <= low <= high <= 100.0


CURVES = [getattr(risk_module, name) for name in vars(risk_module) if name.endswith("_CURVE")]


@pytest.mark.parametrize("curve", CURVES)
def test_curves_are_monotone_and_in_range(curve: Curve) -> None:
    xs, ys = zip(*curve, strict=True)
    assert list(xs) == sorted(set(xs))
    assert list(ys) in (sorted(ys), sorted(ys, reverse=True))
    assert min(ys) >= 0.0 and max(ys) <= 100.0
