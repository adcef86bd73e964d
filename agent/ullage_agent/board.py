"""The one place where the poller leaves what it found and everyone else reads it. Never waits, never fails.

Keeps the last good assessment when the engine stops answering: its age says how much it is still worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage_agent.adapters.base import Reading
from ullage_agent.clock import Clock
from ullage_agent.risk import Risk
from ullage_agent.wire import Action, Device, Forecast, Fragmentation, Host, Liveness, RiskReport, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One reading and what follows from it."""

    reading: Reading
    fragmentation: Fragmentation
    forecast: Forecast
    risk: Risk
    capabilities: tuple[Action, ...]
    service: Service | None = None
    liveness: Liveness | None = None
    devices: tuple[Device, ...] = ()
    host: Host | None = None
    features: tuple[str, ...] = ()
    began_at: float
    """Monotonic seconds when the reading began: the oldest that any of it can be."""


class Board:
    """Last assessment, last error, and how the polls went. Used from the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.assessment: Assessment | None = None
        self.error: str | None = None
        """Why the last poll failed; None when it did not, or none was made."""
        self.last_duration_s: float | None = None
        self.polls_ok = 0
        self.polls_failed = 0

    def publish(self, assessment: Assessment, duration_s: float) -> None:
        """A poll went well."""
        self.assessment, self.error = assessment, None
        self.last_duration_s = duration_s
        self.polls_ok += 1

    def fail(self, error: str, duration_s: float) -> None:
        """A poll failed: the last good assessment stays and ages."""
        self.error = error
        self.last_duration_s = duration_s
        self.polls_failed += 1

    def sample_age_s(self) -> float | None:
        """Age of the last good reading now; None before the first."""
        if self.assessment is None:
            return None
        return max(0.0, self._clock.monotonic() - self.assessment.began_at)

    def report(self) -> RiskReport | None:
        """The wire form as of now; None before the first good reading."""
        last = self.assessment
        if last is None:
            return None
        return RiskReport(
            engine=last.reading.identity,
            generated_at=self._clock.wall(),
            sample_age_s=self.sample_age_s(),
            score=last.risk.score,
            winner=last.risk.winner,
            terms=dict(last.risk.terms),
            snapshot=last.reading.snapshot,
            fragmentation=last.fragmentation,
            forecast=last.forecast,
            service=last.service,
            liveness=last.liveness,
            devices=last.devices,
            host=last.host,
            capabilities=last.capabilities,
            features=last.features,
            violations=last.reading.violations,
            error=self.error,
        )
