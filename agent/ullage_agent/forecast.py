"""When will the pool be unable to serve work that was already admitted? Pure functions over a bounded window.

Growth of hot blocks is estimated by Theil–Sen (the median of all pairwise slopes), which a few odd readings
cannot bend. Supply is free plus reclaimable blocks: prefix cache gives way to live sequences. Demand is what
admitted and waiting requests may still ask for; where it is at most the supply, admitted work provably fits and
no exhaustion is in sight however fast the pool fills. An engine that cannot say its demand is judged by growth.

A prospect (`projection.py`) says how far present work and arrivals at the present pace will go, by learned lengths.

Non-goals: predicting changes in the arrival of new requests.
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


Band = tuple[float | None, float | None, float | None]
"""Seconds to exhaustion: p10, p50, p90; None where it is not in sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What the projection says of the pool. The band comes from the uncertainty of arrivals."""

    peak_blocks: float
    """Most hot blocks within the horizon, at the present pace of arrivals."""
    reaches: Band
    """Seconds until the pool is full: at the upper end of the band, at the present pace, at the lower end."""


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


def forecast(window: Window, snapshot: Snapshot, prospect: Prospect | None = None, *, quiet_s: float = 0.0) -> Forecast:
    """Time until the supply is gone, with its band; all None where that is not in sight.

    Growth alone runs on for ever, so it is believed only where the prospect, if there is one, agrees that present
    work and arrivals come near the pool's size, or where the pool is almost full. Nothing is in sight while no counter
    of the engine has moved for long (`quiet_s`): a pool in which nothing happens does not fill.
    """
    rate = growth(window)
    supply, demand = supply_blocks(snapshot), snapshot.outstanding_blocks
    early, middle, late = _exhaustion(rate, supply, demand)
    if prospect is not None and middle != 0.0:
        early, middle, late = _weighed((early, middle, late), prospect, snapshot, supply, demand)
    if quiet_s >= STILL_S and middle != 0.0:
        early, middle, late = None, None, None
    return Forecast(
        exhaustion_p10_s=early,
        exhaustion_p50_s=middle,
        exhaustion_p90_s=late,
        growth_blocks_per_s=None if rate is None else rate.middle,
        demand_blocks=demand,
        supply_blocks=supply,
        projected_peak_blocks=None if prospect is None else round(prospect.peak_blocks),
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


STILL_S = 15.0
"""Longer than the longest engine step seen, a prefill of eight seconds."""
NEAR_FULL = 0.06
"""A supply below this share of the pool is used up by growth, whatever lengths were learned."""
COMES_NEAR = 0.92
"""Share of the pool that the prospect's peak must reach for growth to be believed."""


def _weighed(trend: Band, prospect: Prospect, snapshot: Snapshot, supply: int | None, demand: int | None) -> Band:
    total = snapshot.total_blocks
    if total is None or supply is None or (demand is not None and demand <= supply):
        return trend
    if supply < NEAR_FULL * total:
        return trend
    if prospect.peak_blocks < COMES_NEAR * total:
        return None, None, None
    early, middle, late = prospect.reaches
    return _sooner(trend[0], early), _sooner(trend[1], middle), _sooner(trend[2], late)


def _sooner(one: float | None, other: float | None) -> float | None:
    known = [seconds for seconds in (one, other) if seconds is not None]
    return min(known, default=None)


def _exhaustion(rate: Growth | None, supply: int | None, demand: int | None) -> Band:
    if supply is None or (demand is not None and demand <= supply):
        return None, None, None
    if supply == 0:
        return 0.0, 0.0, 0.0  # it has happened: the next block asked for cannot be had
    if rate is None:
        return None, None, None
    return _seconds(supply, rate.high), _seconds(supply, rate.middle), _seconds(supply, rate.low)


def _seconds(supply: int, slope: float) -> float | None:
    return supply / slope if slope > 0 else None
