"""Turns a stream of readings into assessments: the one place that remembers, shared by poller, replay and benches.

Deterministic: the same readings at the same times give the same assessments. No IO and no clock of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ullage_agent.adapters.base import Reading
from ullage_agent.allocator import AllocatorWatch
from ullage_agent.forecast import ForecastConfig, Prospect, Sample, Window, forecast, growth, observe
from ullage_agent.fragmentation import fragmentation
from ullage_agent.lengths import LengthLearner, Lengths
from ullage_agent.liveness import Pulse, feel, judge
from ullage_agent.prospect import prospect
from ullage_agent.risk import DeviceOutlook, Risk, RiskInputs, assess
from ullage_agent.service import Moment, Moments, remember, service
from ullage_agent.wire import Device, Forecast, Fragmentation, Host, Liveness, Rank, Service, Snapshot

THRASH_S = 20.0
"""Thrash is judged over this long: whoever evicted must see soon whether it helped."""
PLENTY = 0.15
"""Share of a device or group that must be left before its growth is a risk."""


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
        self._allocator = AllocatorWatch()
        self._prospects: dict[str, Prospect | None] = {}

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
            devices=self._devices(around.devices, reading, at),
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
        quiet = 0.0 if self._pulse is None else at - self._pulse.moved_at
        window = self._grow(f"pool {name}", at, reading.identity.instance, state.sequence, state.hot_blocks)
        if not quiet:  # an engine in which nothing moved has told nothing new, whoever has come to wait meanwhile
            self._prospects[name] = prospect(state, self._moments, lengths) if lengths else None
        return forecast(window, state, self._prospects.get(name), quiet_s=quiet)

    def _devices(self, devices: tuple[Device, ...], reading: Reading, at: float) -> tuple[DeviceOutlook, ...]:
        """The engine's pool and allocator are taken to be on the only device; of several nobody says where."""
        state = reading.snapshot
        need = self._allocator.look(
            at, reading.identity.instance, state.allocator_reserved_bytes, state.allocator_allocated_bytes
        )
        outlooks = tuple(self._device(device, at) for device in devices)
        if len(outlooks) != 1:
            return outlooks
        pool = (state.total_blocks or 0) * (state.block_bytes or 0)
        return (replace(outlooks[0], pool_bytes=pool, need=need),)

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


def _urgency(outlook: Forecast) -> tuple[float, float, float]:
    chance = outlook.exhaustion_chance or 0.0
    seconds = math.inf if outlook.exhaustion_p50_s is None else outlook.exhaustion_p50_s
    supply = math.inf if outlook.supply_blocks is None else outlook.supply_blocks
    return -chance, seconds, supply


def _time_left(window: Window, left: int | None, whole: int | None) -> float | None:
    """Seconds until nothing is left at the present growth; not while plenty is, as when weights are loaded."""
    rate = growth(window)
    if rate is None or left is None or whole is None or left > PLENTY * whole or rate.middle <= 0:
        return None
    return max(0.0, left / rate.middle)
