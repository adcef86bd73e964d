"""Decide what to do about memory risk. Pure: no clock, no network, no memory of its own.

`decide` asks a fixed table of checks in order and takes the first answer. Gathering the inputs (`gather`) and
carrying out the decision (`apply`) happen elsewhere, so cluster, local mode and replay share this code.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage_operator.policy import bookkeeping, ladder
from ullage_operator.policy.situation import Situation
from ullage_operator.policy.types import Decision, Inputs, Reason, Verdict

Check = Callable[[Situation], Decision | None]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("paused", ladder.check_paused),
    ("overdue", bookkeeping.check_overdue),
    ("all stale", ladder.check_all_stale),
    ("proposal", bookkeeping.check_proposal),
    ("unanswered", bookkeeping.check_unanswered),
    ("effect", bookkeeping.check_effect),
    ("rate", ladder.check_rate),
    ("cooldown", ladder.check_cooldown),
    ("evict", ladder.check_evict),
    ("throttle", ladder.check_throttle),
    ("release", ladder.check_release),
    ("exhausted", ladder.check_exhausted),
    ("some stale", ladder.check_some_stale),
    ("healthy", ladder.check_healthy),
)
"""The whole policy, in order. The first check that answers decides; the last one always does."""


def decide(inputs: Inputs, now: float) -> Decision:
    """The one thing to do now. `now` is Unix seconds; the same arguments always give the same decision."""
    situation = Situation(inputs, now)
    return next(decision for _, check in CHECKS if (decision := check(situation)) is not None)


__all__ = ["CHECKS", "Decision", "Inputs", "Reason", "Verdict", "decide"]
