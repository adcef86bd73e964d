"""Recorded data as all of `replay` sees it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ullage_agent.adapters.base import Reading
from ullage_agent.analysis import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One reading, or the reason why there was none."""

    at: float
    """Seconds since the first."""
    wall: float
    """Unix seconds."""
    reading: Reading | None
    around: Surroundings = field(default_factory=Surroundings)
    score: float | None = None
    """The score that the agent gave then; None where it is not told."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """An action that really ended while recording."""

    at: float
    action: str
    outcome: str
    origin: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Everything in a file."""

    source: str
    moments: tuple[Moment, ...]
    acts: tuple[Act, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first reading to the last."""
        return self.moments[-1].at if self.moments else 0.0

    @property
    def engine(self) -> str:
        """Type of the engine that was read."""
        return next((moment.reading.identity.type for moment in self.moments if moment.reading), "")


def first_preemption(recording: Recording) -> float | None:
    """When the engine's own counter of preemptions first moved; None: never, or not told."""
    last: int | None = None
    for moment in recording.moments:
        now = moment.reading.snapshot.preemptions_total if moment.reading else None
        if now is not None:
            if last is not None and now > last:
                return moment.at
            last = now
    return None


def _available(free: int | None, reclaimable: int | None) -> int | None:
    """What an engine that tells runs can have in one allocation: through block tables, all that is available."""
    return None if free is None or reclaimable is None else free + reclaimable
