"""The last quarter of an hour of scores and the last actions, for the page. Bounded; nothing decides by it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ullage_agent.clock import Clock
from ullage_agent.wire import Action, ActionResult

KEEP_S = 900.0
MAX_POINTS = 1800
MAX_ACTIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePoint:
    """Score and terms of one reading."""

    at: float
    """Monotonic seconds."""
    score: float | None
    terms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionNote:
    """One action as it ended."""

    wall: float
    """Unix seconds when it ended."""
    action: Action
    outcome: str
    message: str
    reason: str
    origin: str
    """`request`, or `reflex` where the agent acted by itself."""


class History:
    """Used from the event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._points: deque[ScorePoint] = deque(maxlen=MAX_POINTS)
        self.actions: deque[ActionNote] = deque(maxlen=MAX_ACTIONS)
        """Newest last."""

    def note_score(self, score: float | None, terms: dict[str, float], at: float) -> None:
        """Enter the score of a reading that began at `at`."""
        self._points.append(ScorePoint(at=at, score=score, terms=terms))

    def note_action(self, action: Action, result: ActionResult | str, reason: str, origin: str) -> None:
        """Enter how an action ended; a text is the error that ended it."""
        self.actions.append(
            ActionNote(
                wall=self._clock.wall(),
                action=action,
                outcome="Error" if isinstance(result, str) else result.outcome,
                message=result if isinstance(result, str) else result.message,
                reason=reason[:200],
                origin=origin,
            )
        )

    def points(self) -> list[ScorePoint]:
        """Those of the last quarter of an hour, oldest first."""
        now = self._clock.monotonic()
        return [point for point in self._points if now - point.at <= KEEP_S]
