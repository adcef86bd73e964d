"""What one working step of the loop cost, for those who keep figures of it.

Non-goal: state between steps, which is `snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step that computed something."""

    tokens: int
    """Tokens computed, prefill, decode and drafts together."""
    sequences: int
    """Sequences they belong to."""
    duration_s: float
    queued_s: tuple[float, ...] = ()
    """Of each request that this step was the first to work on: seconds from its submission to the step's begin."""
    accepted: tuple[int, ...] = ()
    """Of each draft that was verified, how many of its tokens stood."""


StepListener = Callable[[StepStats], None]
"""Called in the step loop's thread after each working step; must return at once and not raise."""
