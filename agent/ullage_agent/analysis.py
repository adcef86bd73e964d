"""Turns a stream of readings into assessments: the one place that remembers, shared by poller, replay and benches.

Deterministic: the same readings at the same times give the same assessments. No IO and no clock of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ullage_agent.adapters.base import Reading
from ullage_agent.forecast import ForecastConfig, Prospect, Sample, Window, forecast, growth, observe
from ullage_agent.fragmentation import fragmentation
from ullage_agent.lengths import LengthLearner, Lengths
from ullage_agent.liveness import Pulse, feel, judge
from ullage_agent.projection import Load, project
from ullage_agent.risk import DeviceOutlook, Risk, RiskInputs, assess
from ullage_agent.service import Moment, Moments, remember, service
from ullage_agent.wire import Device, Forecast, Fragmentation, Host, Liveness, Rank, Service, Snapshot

PROJECTION_S = 120.0
THRASH_S = 20.0
"""Thrash is judged over this long: whoever evicted must see soon whether it helped."""
ARRIVALS_S = 30.0
"""Arrivals are counted over this long: longer is slower to see a burst, shorter is noise."""
PIECE_S = 5.0
"""Arrivals are counted in pieces this long to tell a burst."""
MIN_PIECES = 3
PLENTY = 0.15
"""Share of a device or group that must be left before its growth is a risk."""
BAND = 1.28
"""Standard deviations from p50 to p90, of a count of arrivals (Poisson)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was read beside the engine, at the same time."""

    devices: tuple[Device, ...] = ()
    host: Host | None = None
    canary_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that follows from one reading."""

    fragmentation: Fragmentation
    forecast: Forecast
    risk: Risk
    service: Service | None
    liveness: Liveness
    surroundings: Surroundings = field(default_factory=Surroundings)


class Analysis:
    """One engine's recent past. `take` is its only operation."""

    def __init__(self, config: ForecastConfig | None = None) -> None:
        self._config = config or ForecastConfig()
        self._windows: dict[str, Window] = {}
        self._moments: Moments = ()
        self._lengths = LengthLearner()
        self._pulse: Pulse | None = None

    def take(self, reading: Reading, at: float, around: Surroundings | None = None) -> Findings:
        """Take in a reading that began at `at` (monotonic seconds), and say what follows."""
        around = around or Surroundings()
        instance, state = reading.identity.instance, reading.snapshot
        moment = Moment(at=at, instance=instance, snapshot=state, histograms=reading.histograms)
        self._moments = remember(self._moments, moment)
        self._pulse = feel(self._pulse, instance, state, at)
        lengths = self._lengths.learn(at, instance, state, reading.histograms)
        figures, found = fragmentation(state), service(self._moments)
        outlook = self._forecast(reading, at, lengths)
        inputs = RiskInputs(
            snapshot=state,
            fragmentation=figures,
            forecast=outlook,
            service=service(remember(self._moments[:-1], moment, THRASH_S)),
            devices=tuple(self._device(device, at) for device in around.devices),
            host=around.host,
            host_exhaustion_s=self._host(around.host, at),
        )
        return Findings(
            fragmentation=figures,
            forecast=outlook,
            risk=assess(inputs),
            service=found,
            liveness=judge(self._pulse, state, at, around.canary_error),
            surroundings=around,
        )

    def _forecast(self, reading: Reading, at: float, lengths: Lengths | None) -> Forecast:
        """Of an engine with several ranks, the rank that runs out first."""
        state = reading.snapshot
        if not state.ranks:
            return self._forecast_part(reading, state, at, lengths, "")
        parts = [
            replace(self._forecast_part(reading, _as_snapshot(state, rank), at, lengths, rank.name), rank=rank.name)
            for rank in state.ranks
        ]
        return min(parts, key=_urgency)

    def _forecast_part(
        self, reading: Reading, state: Snapshot, at: float, lengths: Lengths | None, name: str
    ) -> Forecast:
        window = self._grow(f"pool {name}", at, reading.identity.instance, state.sequence, state.hot_blocks)
        ahead = prospect(state, self._moments, lengths) if lengths else None
        quiet = 0.0 if self._pulse is None else at - self._pulse.moved_at
        return forecast(window, state, ahead, quiet_s=quiet)

    def _device(self, device: Device, at: float) -> DeviceOutlook:
        used, total = device.used_bytes, device.total_bytes
        window = self._grow(f"device {device.index}", at, device.uuid or "", None, used)
        left = None if used is None or total is None else total - used
        return DeviceOutlook(device=device, exhaustion_s=_time_left(window, left, total))

    def _host(self, host: Host | None, at: float) -> float | None:
        if host is None:
            return None
        window = self._grow("host", at, "", None, host.used_bytes)
        known = host.used_bytes is not None and host.limit_bytes is not None
        left = (host.limit_bytes or 0) - (host.used_bytes or 0) if known else None
        return _time_left(window, left, host.limit_bytes)

    def _grow(self, key: str, at: float, instance: str, sequence: int | None, amount: int | None) -> Window:
        window = self._windows.get(key, ())
        if amount is None:
            return window
        sample = Sample(at=at, instance=instance, sequence=sequence, hot_blocks=amount)
        self._windows[key] = observe(window, sample, self._config)
        return self._windows[key]


def prospect(state: Snapshot, moments: Moments, lengths: Lengths) -> Prospect | None:
    """Where present work and arrivals lead; None where the engine says too little."""
    recent = service(remember(moments[:-1], moments[-1], ARRIVALS_S))
    tokens, total, hot = state.block_tokens, state.total_blocks, state.hot_blocks
    if recent is None or tokens is None or total is None or hot is None or state.running is None:
        return None
    speed, arrivals = recent.generated_tokens_per_s, steady_arrivals(moments)
    busy = _mean_running(moments, ARRIVALS_S)
    if not speed or arrivals is None or not busy:
        return None
    share = 1.0 if not state.ranks else 1.0 / len(state.ranks)
    load = Load(
        held_tokens=float(hot * tokens),
        running=state.running,
        waiting=state.waiting or 0,
        tokens_per_s=speed / busy,
        prompt_tokens=lengths.prompt_mean * (1.0 - (recent.prefix_hit_ratio or 0.0)) + tokens / 2,
    )
    spread = BAND * math.sqrt(max(arrivals * share, 1.0 / recent.window_s) / recent.window_s)
    outlook = project(load, lengths, PROJECTION_S)
    courses = [outlook.course(max(0.0, arrivals * share + step)) for step in (spread, 0.0, -spread)]
    early, middle, late = (course.reaches(total * tokens) for course in courses)
    return Prospect(
        peak_blocks=courses[1].peak / tokens,
        reaches=(early, middle, late),
    )


def steady_arrivals(moments: Moments) -> float | None:
    """Arrivals a second over the last half minute without a burst: those who came with it run or wait already, and
    it would be a mistake to expect it again every half minute."""
    pieces: dict[int, float] = {}
    last = moments[-1].at
    for before, now in pairwise(remember(moments[:-1], moments[-1], ARRIVALS_S)):
        gains = [_gain(before.snapshot, now.snapshot, name) for name in ("finished_total", "running", "waiting")]
        if None in gains:
            return None
        covered = range(int((last - now.at) // PIECE_S), int((last - before.at - 1e-9) // PIECE_S) + 1)
        count = sum(gain for gain in gains if gain is not None) / len(covered)
        for piece in covered:  # several where readings were missed
            pieces[piece] = pieces.get(piece, 0.0) + count
    counts = sorted(max(0.0, count) for count in pieces.values())
    if not counts:
        return None
    rest = counts[:-1]
    usual = sum(rest) / len(rest) if len(rest) >= MIN_PIECES else None
    if usual is not None and counts[-1] > usual + 4.0 * math.sqrt(usual + 1.0):
        counts = rest
    return sum(counts) / (len(counts) * PIECE_S)


def _gain(before: Snapshot, now: Snapshot, name: str) -> int | None:
    old, new = getattr(before, name), getattr(now, name)
    return None if old is None or new is None else int(new - old)


def _mean_running(moments: Moments, window_s: float) -> float:
    recent = [
        moment.snapshot.running
        for moment in moments
        if moments[-1].at - moment.at <= window_s and moment.snapshot.running is not None
    ]
    return sum(recent) / len(recent) if recent else 0.0


def _as_snapshot(whole: Snapshot, rank: Rank) -> Snapshot:
    """A rank as if it were an engine of its own."""
    return replace(
        whole,
        total_blocks=rank.total_blocks,
        hot_blocks=rank.hot_blocks,
        reclaimable_blocks=rank.reclaimable_blocks,
        free_blocks=None,
        outstanding_blocks=None,
        running=rank.running,
        waiting=rank.waiting,
    )


def _urgency(outlook: Forecast) -> tuple[float, float]:
    seconds = math.inf if outlook.exhaustion_p50_s is None else outlook.exhaustion_p50_s
    supply = math.inf if outlook.supply_blocks is None else outlook.supply_blocks
    return seconds, supply


def _time_left(window: Window, left: int | None, whole: int | None) -> float | None:
    """Seconds until nothing is left at the present growth; not while plenty is, as when weights are loaded."""
    rate = growth(window)
    if rate is None or left is None or whole is None or left > PLENTY * whole or rate.middle <= 0:
        return None
    return max(0.0, left / rate.middle)
