"""Decide what to do about memory risk. Pure: no clock, no network, no memory of its own.

`decide` asks a fixed table of checks in order and takes the first answer. Gathering the inputs (`gather`) and
carrying out the decision (`apply`) happen elsewhere, so cluster, local mode and replay share this code.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage_operator.policy import bookkeeping, ladder, scaling
from ullage_operator.policy.begin import DISRUPTIVE
from ullage_operator.policy.scaling import watch
from ullage_operator.policy.situation import Situation
from ullage_operator.policy.types import Decision, Inputs, Reason, Verdict, Watch

Check = Callable[[Situation], Decision | None]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("paused", ladder.check_paused),
    ("overdue", bookkeeping.check_overdue),
    ("growth", scaling.check_growth),
    ("shrink", scaling.check_shrink),
    ("all stale", ladder.check_all_stale),
    ("unanswered", bookkeeping.check_unanswered),
    ("effect", bookkeeping.check_effect),
    ("proposal", bookkeeping.check_proposal),
    ("emergency", ladder.check_emergency),
    ("lasting", scaling.check_lasting),
    ("bridge", ladder.check_bridge),
    ("rate", ladder.check_rate),
    ("cooldown", ladder.check_cooldown),
    ("evict", ladder.check_evict),
    ("compact", ladder.check_compact),
    ("throttle", ladder.check_throttle),
    ("scale up", ladder.check_scale_up),
    ("release", ladder.check_release),
    ("exhausted", ladder.check_exhausted),
    ("some stale", ladder.check_some_stale),
    ("awaiting", ladder.check_awaiting),
    ("scale down", scaling.check_scale_down),
    ("healthy", ladder.check_healthy),
)
"""The whole policy, in order. The first check that answers decides; the last one always does."""


def decide(inputs: Inputs, now: float) -> Decision:
    """The one thing to do now. `now` is Unix seconds; the same arguments always give the same decision."""
    situation = Situation(inputs, now)
    return next(decision for _, check in CHECKS if (decision := check(situation)) is not None)


__all__ = ["CHECKS", "DISRUPTIVE", "Decision", "Inputs", "Reason", "Verdict", "Watch", "decide", "watch"]
