"""Risk of running out of memory: named terms of 0..100 each, and their maximum as the score.

Pure and without memory: the same inputs always give the same score, so hysteresis and cooldowns belong to whoever
acts on it. A term whose inputs nobody can say is absent, not zero; without any term there is no score. The curves
are pictured in `docs/risk.md`.

Terms:
    classic    `min(100, 100 * (0.6 * pressure + 0.4 * external))` with `pressure = hot / total` and external
               fragmentation of what can be handed out, cached blocks included: as they are no pressure, they are
               supply. With nothing to hand out it is 1.0.
    forecast   whether the pool can soon no longer serve what was admitted and what comes: the chance of that within
               half a minute, by `CHANCE_CURVE`. While no lengths were learned, the time by growth, by
               `FORECAST_CURVE`, and at most what `UNLEARNED_CURVE` or `UNOPPOSED_CURVE` allows.
    thrash     work lost to preemption, over twenty seconds: preemptions per finished request by `PREEMPTION_CURVE`
               and recomputed tokens as a share of all by `RECOMPUTE_CURVE`; the greater counts.
    device     the tightest accelerator: free memory as a share of all but the KV pool, which is allocated for good,
               by `DEVICE_CURVE`; the time until it is gone at its present growth by `FORECAST_CURVE`; the largest
               request of the engine's allocator against what is free and what it wastes, by `FIT_CURVE`. Waste that
               was seen to be in pieces too small is not counted (`allocator.py`).
    host       control group: used share by `HOST_CURVE`, time to the limit by `FORECAST_CURVE`, stalls by
               `PSI_CURVE`, and the unfilled rest of the offload tier against the room that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_agent.allocator import Need
from ullage_agent.curve import Curve, points_on_curve
from ullage_agent.fragmentation import unusable
from ullage_agent.wire import Device, Forecast, Fragmentation, Host, Service, Snapshot

FORECAST_CURVE: Curve = ((5.0, 100.0), (30.0, 85.0), (120.0, 50.0), (600.0, 0.0))
"""Seconds to exhaustion (p50) → points.

30 s → 85 is where eviction starts by default: about as long as an eviction, its effect and one retry take.
"""
CHANCE_CURVE: Curve = ((0.0, 0.0), (0.72, 85.0), (1.0, 100.0))
"""Chance of exhaustion within half a minute → points. At 0.72 false alarms are as rare as of a limit at 90 % usage."""
UNLEARNED_CURVE: Curve = ((0.4, 40.0), (1.0, 100.0))
"""Hot share of the pool → most points of the forecast term while no lengths were learned: every pool that begins to
serve fills fast at first, and growth alone can't tell a beginning from an end."""
UNOPPOSED_CURVE: Curve = ((0.4, 40.0), (0.65, 100.0))
"""The same while no request finishes at all: nothing has been seen that would stop the growth."""
PREEMPTION_CURVE: Curve = ((0.0, 0.0), (0.05, 50.0), (0.3, 85.0), (1.0, 100.0))
"""Preemptions per finished request → points: at 0.3 every third answer was computed twice."""
RECOMPUTE_CURVE: Curve = ((0.0, 0.0), (0.02, 30.0), (0.15, 85.0), (0.4, 100.0))
"""Recomputed tokens as a share of all computed → points."""
DEVICE_CURVE: Curve = ((0.002, 100.0), (0.01, 85.0), (0.03, 50.0), (0.08, 0.0))
"""Free device memory as a share of all → points."""
HOST_CURVE: Curve = ((0.80, 0.0), (0.90, 50.0), (0.95, 85.0), (0.99, 100.0))
"""Used memory as a share of the control group's limit → points."""
PSI_CURVE: Curve = ((0.05, 0.0), (0.2, 50.0), (0.5, 85.0), (0.9, 100.0))
"""Share of ten seconds in which all tasks waited for memory (full) → points."""
FIT_CURVE: Curve = ((0.7, 0.0), (1.0, 60.0), (1.5, 85.0), (3.0, 100.0))
"""What may still be asked for at once or by and by (the allocator's largest request, the unfilled rest of the offload
tier), over the room for it → points: above 1 it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutlook:
    """One device and where it is heading. Bytes and seconds."""

    device: Device
    exhaustion_s: float | None = None
    """Seconds until nothing is free at the present growth; None: not in sight."""
    pool_bytes: int = 0
    """Of it, what the KV pool takes for good."""
    need: Need | None = None
    """What the engine's allocator may ask for, where this is its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskInputs:
    """Everything a term may look at."""

    snapshot: Snapshot
    fragmentation: Fragmentation
    forecast: Forecast
    service: Service | None = None
    """Of the last twenty seconds."""
    devices: tuple[DeviceOutlook, ...] = ()
    host: Host | None = None
    host_exhaustion_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Score, the term that set it, and all terms that could be computed."""

    score: float | None
    winner: str | None
    terms: dict[str, float] = field(default_factory=dict)


def assess(inputs: RiskInputs) -> Risk:
    """Compute every term of `TERMS`; of equal ones the first in the table wins."""
    computed = {name: term(inputs) for name, term in TERMS}
    terms = {name: points for name, points in computed.items() if points is not None}
    if not terms:
        return Risk(score=None, winner=None)
    winner = max(terms, key=lambda name: terms[name])
    return Risk(score=terms[winner], winner=winner, terms=terms)


def classic(inputs: RiskInputs) -> float | None:
    """Pressure and external fragmentation, weighted 0.6 to 0.4."""
    hot, total = inputs.snapshot.hot_blocks, inputs.snapshot.total_blocks
    external = unusable(inputs.snapshot)
    if hot is None or not total or external is None:
        return None
    return min(100.0, 100 * (0.6 * (hot / total) + 0.4 * external))


def imminence(inputs: RiskInputs) -> float | None:
    """Chance of exhaustion, or the time until it by growth; 0 when it was looked for and is not in sight."""
    forecast, state = inputs.forecast, inputs.snapshot
    if forecast.exhaustion_chance is not None:
        return points_on_curve(forecast.exhaustion_chance, CHANCE_CURVE)
    if forecast.exhaustion_p50_s is not None:
        points = points_on_curve(forecast.exhaustion_p50_s, FORECAST_CURVE)
        if not state.total_blocks or state.hot_blocks is None:
            return points
        unopposed = inputs.service is None or not inputs.service.finishes_per_s
        most = UNOPPOSED_CURVE if unopposed else UNLEARNED_CURVE
        return min(points, points_on_curve(_tightest_usage(state), most))
    demand, supply = forecast.demand_blocks, forecast.supply_blocks
    if supply is None:
        return None
    fits = demand is not None and demand <= supply
    return 0.0 if fits or forecast.growth_blocks_per_s is not None else None


def thrash(inputs: RiskInputs) -> float | None:
    """Work lost to preemption. One preemption alone is none: a pool may be full for a moment."""
    found = inputs.service
    if found is None:
        return None
    rates = [rate for rate in (found.preemptions_per_s, found.inferred_preemptions_per_s) if rate is not None]
    points: list[float] = []
    if rates:
        count = max(rates) * found.window_s
        finished = max(1.0, (found.finishes_per_s or 0.0) * found.window_s)
        points.append(points_on_curve(count / finished, PREEMPTION_CURVE) if count > 1.0 else 0.0)
    if found.recomputed_share is not None:
        points.append(points_on_curve(found.recomputed_share, RECOMPUTE_CURVE))
    return max(points, default=None)


def device(inputs: RiskInputs) -> float | None:
    """The tightest device, by what is free of it and by how long that lasts."""
    points: list[float] = []
    for outlook in inputs.devices:
        total, used = outlook.device.total_bytes, outlook.device.used_bytes
        if not total or used is None:
            continue
        free, pool = max(0, total - used), outlook.pool_bytes
        rest = total - pool if pool <= used and pool < total else total
        points.append(points_on_curve(free / rest, DEVICE_CURVE))
        if outlook.need is not None:
            room = max(1, free + outlook.need.waste)
            points.append(points_on_curve(outlook.need.request / room, FIT_CURVE))
        if outlook.exhaustion_s is not None:
            points.append(points_on_curve(outlook.exhaustion_s, FORECAST_CURVE))
    return max(points, default=None)


def host(inputs: RiskInputs) -> float | None:
    """The control group against its limit, its stalls, and the offload tier that grows in it."""
    found = inputs.host
    if found is None:
        return None
    points: list[float] = []
    if found.psi_full_avg10 is not None:
        points.append(points_on_curve(found.psi_full_avg10, PSI_CURVE))
    if found.limit_bytes and found.used_bytes is not None:
        points.append(points_on_curve(found.used_bytes / found.limit_bytes, HOST_CURVE))
        if inputs.host_exhaustion_s is not None:
            points.append(points_on_curve(inputs.host_exhaustion_s, FORECAST_CURVE))
        points.append(_tier(inputs.snapshot, found.used_bytes, found.limit_bytes))
    return max(points, default=None)


def _tightest_usage(state: Snapshot) -> float:
    """Hot share of the pool; of the fullest one where an engine has several."""
    parts = [(rank.hot_blocks, rank.total_blocks) for rank in state.ranks] or [(state.hot_blocks, state.total_blocks)]
    return max((hot / total for hot, total in parts if hot is not None and total), default=1.0)


def _tier(snapshot: Snapshot, used: int, limit: int) -> float:
    """A tier that was allocated at the start is in `used` already; it cannot be greater than that."""
    size, filled = snapshot.host_total_bytes, snapshot.host_used_bytes
    if size is None or filled is None or size <= max(filled, used):
        return 0.0
    return points_on_curve((size - filled) / max(1, limit - used), FIT_CURVE)


Term = Callable[[RiskInputs], float | None]

TERMS: tuple[tuple[str, Term], ...] = (
    ("classic", classic),
    ("forecast", imminence),
    ("thrash", thrash),
    ("device", device),
    ("host", host),
)
"""Name and function of each term, in order of precedence among equals."""
