"""How likely a pool is to be full by a time, from mean and variance of what it will hold. Pure.

What is held is taken as a normal process that forgets: a deviation from the mean fades as the requests that made it
end. Two estimates of the chance of having been full; the greater counts, because each is too low where the other is
good:
- of a Brownian motion with the drift and the variance that the mean and the variance have come to by a moment. Good
  near the capacity, and where the mean itself goes there;
- by the density of the first passage, to first order as by Durbin (1985), exact for a Brownian motion with drift:

      q(t) = f(t) · (m'(t) + (v'(t) / v(t) + forgetting) · (capacity - m(t)))

  with f(t) the density at the capacity. Good where the mean stays below and only chance can fill the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT_2 = math.sqrt(2.0)
_ROOT_2PI = math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What a pool holds at each time from now on, as a distribution. Tokens and seconds; equal steps of time."""

    times: Sequence[float]
    means: Sequence[float]
    variances: Sequence[float]
    forgetting: float
    """Share of a deviation that is gone each second."""


def filled_by(spread: Spread, capacity: float) -> tuple[float, ...]:
    """Chance that the capacity was reached by each time; never falls."""
    room = capacity - spread.means[0]
    highest = 1.0 if room <= 0 else 0.0
    chances, passages, before = [highest], 0.0, 0.0
    for index in range(1, len(spread.times)):
        mean, variance = spread.means[index], spread.variances[index]
        if highest < 1.0:
            highest = max(highest, _straight(room, mean - spread.means[0], variance))
        density = _first_passage(spread, index, capacity - mean)
        passages += (spread.times[index] - spread.times[index - 1]) * (density + before) / 2
        before = density
        chances.append(max(highest, 1.0 - math.exp(-passages)))
    return tuple(chances)


def time_of(chance: float, times: Sequence[float], chances: Sequence[float]) -> float | None:
    """When the chance of having been full reaches `chance`; None where it does not."""
    before_time = before = 0.0
    for time, reached in zip(times, chances, strict=True):
        if reached >= chance:
            if reached <= before:
                return time
            return before_time + (time - before_time) * max(0.0, chance - before) / (reached - before)
        before_time, before = time, reached
    return None


def _first_passage(spread: Spread, index: int, gap: float) -> float:
    variance, before = spread.variances[index], spread.variances[index - 1]
    if not variance or gap <= 0:
        return 0.0
    step = spread.times[index] - spread.times[index - 1]
    drift = (spread.means[index] - spread.means[index - 1]) / step
    widening = (variance - before) / step / variance if before else 1.0 / spread.times[index]
    approach = drift + (widening + spread.forgetting) * gap
    density = math.exp(-0.5 * gap * gap / variance) / (math.sqrt(variance) * _ROOT_2PI)
    return max(0.0, approach) * density


def _straight(room: float, moved: float, variance: float) -> float:
    """Chance that a Brownian motion with this drift and variance at the end has covered `room` on the way there."""
    if not variance:
        return 1.0 if moved >= room else 0.0
    deviation = math.sqrt(variance)
    reflected = 2.0 * moved * room / variance
    beyond = math.exp(min(700.0, reflected)) * _below((-room - moved) / deviation)
    return min(1.0, _below((moved - room) / deviation) + beyond)


def _below(deviations: float) -> float:
    return 0.5 * math.erfc(-deviations / _ROOT_2)
