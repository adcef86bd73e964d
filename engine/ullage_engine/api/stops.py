"""Finds stop strings in text that comes in pieces.

Purpose: release only text that can no longer become part of a stop string, and cut exactly before the first.
The result does not depend on how the text was cut into pieces. Non-goal: stop tokens, which the core knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text safe to send; `stopped` when a stop string followed it, after which nothing more is released."""

    text: str
    stopped: bool


class StopFilter:
    """Holds back what may be the beginning of a stop string.

    Of several, the one complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def feed(self, piece: str) -> Released:
        """Add text; returns what became safe."""
        if self._stopped:
            return Released("", True)
        text = self._held + piece
        cut = self._first_stop(text)
        if cut is not None:
            self._held, self._stopped = "", True
            return Released(text[:cut], True)
        safe = len(text) - self._partial(text)
        self._held = text[safe:]
        return Released(text[:safe], False)

    def finish(self) -> str:
        """What was held back, when no further text comes."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
