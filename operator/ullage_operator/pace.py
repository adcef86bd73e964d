"""How soon a service is looked at again. Decides no remedy; a wrong answer here costs time only.

Sweeps keep a rate: what one takes is part of the time until the next. A service in which something is going on is
looked at more often, as long as few are: an operator whose whole fleet is in trouble must not slow down for all.
"""

from __future__ import annotations

from collections.abc import Hashable

from ullage_operator.model import InferenceService
from ullage_operator.observation import Observation
from ullage_operator.policy import Reason
from ullage_operator.sweep import SweepResult

BRISK = 4
"""Looks at a service in which something is going on, for one at others."""
BRISK_SERVICES = 64
"""Services that are looked at so often at one time."""
NEAR_S = 60.0
"""Seconds until the forecast end of the cache from which on it counts as near."""
REST = 0.1
"""Shortest pause between two sweeps, as a share of their interval: an operator that falls behind leaves room."""

QUIET = frozenset({Reason.HEALTHY, Reason.PAUSED, Reason.STALE_DATA, Reason.AWAITING_APPROVAL})
"""Decisions after which nothing is expected soon."""


class Pace:
    """The time between sweeps of each service."""

    def __init__(self, sweep_seconds: float, *, brisk_services: int = BRISK_SERVICES) -> None:
        """`sweep_seconds`: interval of a service in which nothing is going on."""
        self._interval_s = sweep_seconds
        self._places = brisk_services
        self._brisk: set[Hashable] = set()

    def pause(self, service: Hashable, *, astir: bool, spent_s: float) -> float:
        """Seconds to wait after a round that took `spent_s`."""
        self._brisk.discard(service)
        interval = self._interval_s
        if astir and len(self._brisk) < self._places:
            self._brisk.add(service)
            interval /= BRISK
        return max(interval - spent_s, REST * interval)

    def forget(self, service: Hashable) -> None:
        """A service is gone."""
        self._brisk.discard(service)


def astir(service: InferenceService, result: SweepResult, *, now: float) -> bool:
    """Whether something is going on: an action is under way, or risk is high or about to be."""
    if result.decision.reason not in QUIET:
        return True
    limit = service.stale_after_s
    return any(_rising(service, o) for o in result.observations if o.fresh(now=now, stale_after_s=limit))


def _rising(service: InferenceService, observation: Observation) -> bool:
    forecast = observation.report.forecast if observation.report else None
    end_s = forecast.exhaustion_p50_s if forecast else None
    near = end_s is not None and end_s <= NEAR_S
    return near or observation.score >= service.spec.remediation.release_threshold
