"""Risk of running out of KV cache: named terms of 0..100 each, and their maximum as the score.

Pure and without memory: the same snapshot and forecast always give the same score, so hysteresis and cooldowns
belong to whoever acts on it. A term whose inputs the engine cannot say is absent, not zero; without any term
there is no score.

Terms:
    classic    `min(100, 100 * (0.6 * pressure + 0.4 * external))` with `pressure = hot / total` and external
               fragmentation. Cached blocks are no pressure, but a pool without a free block has external 1.0.
    forecast   how soon the pool can no longer serve what was already admitted, by `FORECAST_CURVE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_agent.wire import Forecast, Fragmentation, Snapshot

FORECAST_CURVE: tuple[tuple[float, float], ...] = ((5.0, 100.0), (30.0, 85.0), (120.0, 50.0), (600.0, 0.0))
"""Seconds to exhaustion (p50) → points, straight lines between, flat outside.

30 s → 85 is where eviction starts by default: about as long as an eviction, its effect and one retry take.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskInputs:
    """Everything a term may look at."""

    snapshot: Snapshot
    fragmentation: Fragmentation
    forecast: Forecast


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
    external = inputs.fragmentation.external
    if hot is None or not total or external is None:
        return None
    return min(100.0, 100 * (0.6 * (hot / total) + 0.4 * external))


def imminence(inputs: RiskInputs) -> float | None:
    """Time to exhaustion by `FORECAST_CURVE`; 0 when it was looked for and is not in sight."""
    forecast = inputs.forecast
    if forecast.exhaustion_p50_s is not None:
        return points_on_curve(forecast.exhaustion_p50_s, FORECAST_CURVE)
    demand, supply = forecast.demand_blocks, forecast.supply_blocks
    if supply is None:
        return None
    fits = demand is not None and demand <= supply
    return 0.0 if fits or forecast.growth_blocks_per_s is not None else None


def points_on_curve(value: float, curve: tuple[tuple[float, float], ...]) -> float:
    """Straight lines between the curve's corners (ascending in x), flat outside them."""
    left_x, left_y = curve[0]
    if value <= left_x:
        return left_y
    for right_x, right_y in curve[1:]:
        if value <= right_x:
            share = (value - left_x) / (right_x - left_x)
            return left_y + share * (right_y - left_y)
        left_x, left_y = right_x, right_y
    return left_y


Term = Callable[[RiskInputs], float | None]

TERMS: tuple[tuple[str, Term], ...] = (("classic", classic), ("forecast", imminence))
"""Name and function of each term, in order of precedence among equals."""
