"""When will the pool be unable to serve work that was already admitted? Pure functions over a bounded window.

Growth of hot blocks is estimated by Theil–Sen (the median of all pairwise slopes), which a few odd readings
cannot bend. Supply is free plus reclaimable blocks: prefix cache gives way to live sequences. Demand is what
admitted and waiting requests may still ask for; where it is at most the supply, admitted work provably fits and
no exhaustion is in sight however fast the pool fills. An engine that cannot say its demand is judged by growth.

A prospect (`prospect.py`) says how likely present work and arrivals at the present pace fill the pool, and by when, by
learned lengths.

Non-goals: predicting changes in the arrival of new requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median

from ullage_agent.passage import time_of
from ullage_agent.wire import Forecast, Snapshot

MIN_SPACING_S = 0.01
"""Readings closer than this replace each other: their slope would be noise."""
MIN_SAMPLES = 3
"""Fewer say nothing about growth: the first readings after a start are not a trend."""
LATELY_S = 8.0
"""Growth without learned lengths must be there over this long too."""
STILL_S = 15.0
"""Longer than the longest engine step seen, a prefill of eight seconds."""
SOON_S = 30.0
"""`exhaustion_chance` is that of so many seconds."""


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
    """What the projection says of the pool."""

    peak_blocks: float
    """Most hot blocks within the horizon, on average."""
    times: tuple[float, ...]
    chances: tuple[float, ...]
    """Of having been full by each time."""
    learned: bool = True
    """Whether enough requests have finished to believe it without growth that bears it out."""

    def time_of(self, chance: float) -> float | None:
        """Seconds until the pool was full with this chance; None: not in sight."""
        return time_of(chance, self.times, self.chances)

    def chance_by(self, seconds: float) -> float:
        """Chance of being full within so many seconds."""
        return max(
            (chance for time, chance in zip(self.times, self.chances, strict=True) if time <= seconds), default=0.0
        )


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


def persistent(window: Window) -> Growth | None:
    """Growth that is still there: that of the last seconds where it is less than that of the whole window, as in a
    pool that begins to serve and fills ever slower."""
    whole = growth(window)
    lately = growth(tuple(sample for sample in window if window[-1].at - sample.at <= LATELY_S))
    if whole is None or lately is None:
        return whole
    low, middle, high = (min(getattr(whole, name), getattr(lately, name)) for name in ("low", "middle", "high"))
    return Growth(low=low, middle=middle, high=high)


def forecast(window: Window, snapshot: Snapshot, prospect: Prospect | None = None, *, quiet_s: float = 0.0) -> Forecast:
    """Time until the supply is gone, with its band; all None where that is not in sight.

    Growth alone runs on for ever, so it counts only until there is a prospect from learned lengths; one of lengths that
    are only just known must bear it out. Nothing is in sight while no counter of the engine has moved for long
    (`quiet_s`): a pool in which nothing happens does not fill.
    """
    rate = growth(window)
    supply, demand = supply_blocks(snapshot), snapshot.outstanding_blocks
    band, chance = _exhaustion(rate, supply, demand), None
    learned = prospect is not None and prospect.learned
    if prospect is not None and _open(supply, demand):
        expected = prospect.time_of(0.1), prospect.time_of(0.5), prospect.time_of(0.9)
        band = expected if learned else _later(expected, band)
    elif band[1] != 0.0 and _open(supply, demand):
        band = _exhaustion(persistent(window), supply, demand)
    if prospect is not None and learned:
        chance = prospect.chance_by(SOON_S) if _open(supply, demand) else float(band[1] == 0.0)
    if quiet_s >= STILL_S and band[1] != 0.0:
        band, chance = (None, None, None), None if chance is None else 0.0
    return Forecast(
        exhaustion_p10_s=band[0],
        exhaustion_p50_s=band[1],
        exhaustion_p90_s=band[2],
        growth_blocks_per_s=None if rate is None else rate.middle,
        demand_blocks=demand,
        supply_blocks=supply,
        projected_peak_blocks=round(prospect.peak_blocks) if prospect is not None and learned else None,
        exhaustion_chance=chance,
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


def _exhaustion(rate: Growth | None, supply: int | None, demand: int | None) -> Band:
    if supply is None or (demand is not None and demand <= supply):
        return None, None, None
    if supply == 0:
        return 0.0, 0.0, 0.0  # it has happened: the next block asked for cannot be had
    if rate is None:
        return None, None, None
    return _seconds(supply, rate.high), _seconds(supply, rate.middle), _seconds(supply, rate.low)


def _open(supply: int | None, demand: int | None) -> bool:
    """Whether exhaustion is neither here nor out of the question."""
    return supply is not None and supply > 0 and not (demand is not None and demand <= supply)


def _later(one: Band, other: Band) -> Band:
    early, middle, late = (None if a is None or b is None else max(a, b) for a, b in zip(one, other, strict=True))
    return early, middle, late


def _seconds(supply: int, slope: float) -> float | None:
    return supply / slope if slope > 0 else None
