import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.forecast import (
    MIN_SPACING_S,
    ForecastConfig,
    Sample,
    Window,
    forecast,
    growth,
    observe,
    supply_blocks,
)
from ullage_agent.wire import Snapshot

CONFIG = ForecastConfig()


def window(*hot: int, start: float = 100.0, step: float = 1.0) -> Window:
    return tuple(
        Sample(at=start + index * step, instance="a", sequence=index, hot_blocks=count)
        for index, count in enumerate(hot)
    )


def pool(*, hot: int = 100, free: int = 20, cached: int = 30, demand: int | None = 1000) -> Snapshot:
    return Snapshot(
        sampled_at=0,
        total_blocks=hot + free + cached,
        hot_blocks=hot,
        free_blocks=free,
        reclaimable_blocks=cached,
        outstanding_blocks=demand,
    )


def test_steady_growth_eats_free_and_reclaimable() -> None:
    outlook = forecast(window(80, 85, 90, 95, 100), pool())
    assert outlook.growth_blocks_per_s == 5.0
    assert outlook.supply_blocks == 50
    assert outlook.exhaustion_p10_s == outlook.exhaustion_p50_s == outlook.exhaustion_p90_s == 10.0


def test_one_wild_reading_does_not_bend_the_rate() -> None:
    steady = growth(window(*range(0, 40, 2)))
    wild = growth(window(*range(0, 20, 2), 5000, *range(22, 40, 2)))
    assert steady is not None and wild is not None
    assert wild.middle == steady.middle == 2.0


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (pool(demand=50), None),  # fits exactly
        (pool(demand=51), 10.0),
        (pool(demand=None), 10.0),  # unknown demand: growth alone
        (pool(free=0, cached=0, demand=1), 0.0),  # has happened
        (pool(free=0, cached=0, demand=0), None),
        (pool(free=0, cached=0, demand=None), 0.0),
        (Snapshot(sampled_at=0, outstanding_blocks=5), None),  # unknown supply
    ],
)
def test_demand_against_supply(snapshot: Snapshot, expected: float | None) -> None:
    assert forecast(window(80, 85, 90, 95, 100), snapshot).exhaustion_p50_s == expected


@pytest.mark.parametrize("hot", [(100, 100, 100, 100), (100, 90, 80, 70)])
def test_not_in_sight_without_growth(hot: tuple[int, ...]) -> None:
    assert forecast(window(*hot), pool()).exhaustion_p50_s is None


@pytest.mark.parametrize("hot", [(), (1,), (1, 50)])
def test_too_few_readings_are_no_trend(hot: tuple[int, ...]) -> None:
    outlook = forecast(window(*hot), pool())
    assert outlook.growth_blocks_per_s is None
    assert outlook.exhaustion_p50_s is None


def test_a_full_pool_needs_no_trend() -> None:
    assert forecast((), pool(free=0, cached=0)).exhaustion_p50_s == 0.0


@pytest.mark.parametrize(
    "odd",
    [
        Sample(at=103.0, instance="b", sequence=9, hot_blocks=1),  # another process
        Sample(at=50.0, instance="a", sequence=9, hot_blocks=1),  # the clock went back
        Sample(at=103.0, instance="a", sequence=0, hot_blocks=1),  # the engine's sequence went back
    ],
)
def test_what_does_not_continue_the_window_starts_a_new_one(odd: Sample) -> None:
    assert observe(window(1, 2, 3), odd, CONFIG) == (odd,)


def test_the_same_engine_sequence_continues() -> None:
    again = Sample(at=103.0, instance="a", sequence=2, hot_blocks=3)
    assert observe(window(1, 2, 3), again, CONFIG) == (*window(1, 2, 3), again)


def test_crowded_readings_replace_each_other() -> None:
    late = Sample(at=102.0 + MIN_SPACING_S / 2, instance="a", sequence=3, hot_blocks=9)
    assert observe(window(1, 2, 3), late, CONFIG) == (*window(1, 2), late)


def test_window_is_bounded_by_age_and_number() -> None:
    kept: Window = ()
    for sample in window(*range(500), step=0.1):
        kept = observe(kept, sample, ForecastConfig(horizon_s=30.0, max_samples=60))
        assert len(kept) <= 60
    kept = observe(kept, Sample(at=1000.0, instance="a", sequence=999, hot_blocks=1), CONFIG)
    assert len(kept) == 1


def test_supply_of_an_engine_that_does_not_split_unused_blocks() -> None:
    assert supply_blocks(Snapshot(sampled_at=0, total_blocks=95, hot_blocks=90)) == 5
    assert supply_blocks(Snapshot(sampled_at=0, total_blocks=95)) is None


steps = st.tuples(st.floats(-5.0, 60.0), st.integers(0, 2**53), st.sampled_from("ab"), st.integers(0, 50))
counts = st.none() | st.integers(0, 2**53)


@given(st.lists(steps, max_size=30), counts, counts, counts)
def test_any_history_gives_an_ordered_finite_outlook(
    history: list[tuple[float, int, str, int]], free: int | None, cached: int | None, demand: int | None
) -> None:
    kept: Window = ()
    now = 1000.0
    for step, hot, instance, sequence in history:
        now += step
        sample = Sample(at=now, instance=instance, sequence=sequence, hot_blocks=hot)
        kept = observe(kept, sample, CONFIG)
        assert kept[-1] is sample
        assert all(b.at - a.at >= MIN_SPACING_S * 0.999 for a, b in itertools.pairwise(kept))
    outlook = forecast(
        kept,
        Snapshot(sampled_at=0, free_blocks=free, reclaimable_blocks=cached, outstanding_blocks=demand),
    )
    band = (outlook.exhaustion_p10_s, outlook.exhaustion_p50_s, outlook.exhaustion_p90_s)
    ordered = [math.inf if value is None else value for value in band]
    assert ordered == sorted(ordered)
    assert all(value is None or (math.isfinite(value) and value >= 0) for value in band)


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_more_supply_never_brings_exhaustion_nearer(rate: int, supply: int, extra: int) -> None:
    kept = window(*(index * rate for index in range(5)))
    near = forecast(kept, pool(free=supply, cached=0, demand=None)).exhaustion_p50_s
    far = forecast(kept, pool(free=supply + extra, cached=0, demand=None)).exhaustion_p50_s
    assert near is not None and far is not None
    assert far >= near
