"""Time as the agent sees it, injected everywhere: wall clock for people, monotonic clock for decisions."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of now, both in seconds. Neither blocks nor raises."""

    def monotonic(self) -> float:
        """Never goes back, has no meaning beyond differences."""
        ...

    def wall(self) -> float:
        """Unix time; may jump when the machine's clock is set."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to: for tests, replays and demonstrations."""

    def __init__(self, *, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both clocks; a negative amount is a clock that was set back."""
        self._monotonic += seconds
        self._wall += seconds
