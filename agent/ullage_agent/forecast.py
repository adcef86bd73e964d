"""When will the pool be unable to serve work that was already admitted? Pure functions over a bounded window.

Growth of hot blocks is estimated by Theil–Sen (the median of all pairwise slopes), which a few odd readings
cannot bend. Supply is free plus reclaimable blocks: prefix cache gives way to live sequences. Demand is what
admitted and waiting requests may still ask for; where it is at most the supply, admitted work provably fits and
no exhaustion is in sight however fast the pool fills. An engine that cannot say its demand is judged by growth.

Non-goals: predicting arrivals of new requests, and learning the lengths of answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median

from ullage_agent.wire import Forecast, Snapshot

MIN_SPACING_S = 0.01
"""Readings closer than this replace each other: their slope would be noise."""
MIN_SAMPLES = 3
"""Fewer say nothing about growth: the first readings after a start are not a trend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """How far back the growth rate looks."""

    horizon_s: float = 30.0
    """Readings older than this are dropped."""
    max_samples: int = 60
    """Bound on the window, and so on the work: n samples cost n²/2 slopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading as the forecast needs it."""

    at: float
    """Monotonic seconds of the agent."""
    instance: str
    sequence: int | None
    hot_blocks: int


Window = tuple[Sample, ...]
"""Readings of one engine instance, oldest first, strictly ascending in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Blocks per second: the median pairwise slope and the band of the middle 80 % of them."""

    low: float
    middle: float
    high: float


def observe(window: Window, sample: Sample, config: ForecastConfig) -> Window:
    """The window with `sample` added; a new one if it does not continue the old."""
    if window and not _continues(window[-1], sample):
        window = ()
    if window and sample.at - window[-1].at < MIN_SPACING_S:
        window = window[:-1]
    recent = (old for old in window if sample.at - old.at <= config.horizon_s)
    return (*recent, sample)[-config.max_samples :]


def growth(window: Window) -> Growth | None:
    """Robust growth rate of hot blocks; None while the window is too short to tell."""
    if len(window) < MIN_SAMPLES:
        return None
    slopes = sorted((b.hot_blocks - a.hot_blocks) / (b.at - a.at) for a, b in combinations(window, 2))
    tail = len(slopes) // 10
    return Growth(low=slopes[tail], middle=median(slopes), high=slopes[-1 - tail])


def forecast(window: Window, snapshot: Snapshot) -> Forecast:
    """Time until growth has eaten the supply, with its band; all None where that is not in sight."""
    rate = growth(window)
    supply, demand = supply_blocks(snapshot), snapshot.outstanding_blocks
    early, middle, late = _exhaustion(rate, supply, demand)
    return Forecast(
        exhaustion_p10_s=early,
        exhaustion_p50_s=middle,
        exhaustion_p90_s=late,
        growth_blocks_per_s=None if rate is None else rate.middle,
        demand_blocks=demand,
        supply_blocks=supply,
    )


def supply_blocks(snapshot: Snapshot) -> int | None:
    """Blocks that can be handed out without preempting anyone.

    Engines that do not tell free from cached blocks still say how many are in use.
    """
    if snapshot.free_blocks is not None and snapshot.reclaimable_blocks is not None:
        return snapshot.free_blocks + snapshot.reclaimable_blocks
    if snapshot.total_blocks is not None and snapshot.hot_blocks is not None:
        return max(0, snapshot.total_blocks - snapshot.hot_blocks)
    return None


def _continues(last: Sample, new: Sample) -> bool:
    if new.instance != last.instance or new.at < last.at:
        return False
    return new.sequence is None or last.sequence is None or new.sequence >= last.sequence


def _exhaustion(
    rate: Growth | None, supply: int | None, demand: int | None
) -> tuple[float | None, float | None, float | None]:
    if supply is None or (demand is not None and demand <= supply):
        return None, None, None
    if supply == 0:
        return 0.0, 0.0, 0.0  # it has happened: the next block asked for cannot be had
    if rate is None:
        return None, None, None
    return _seconds(supply, rate.high), _seconds(supply, rate.middle), _seconds(supply, rate.low)


def _seconds(supply: int, slope: float) -> float | None:
    return supply / slope if slope > 0 else None
