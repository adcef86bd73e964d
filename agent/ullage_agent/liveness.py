"""Whether an engine gets on with its work. Pure.

A health route is no evidence: a process whose output thread is dead still answers it. Evidence is that counters move
while work is in flight. An engine that claims to have nothing to do can be dead too (every gauge 0, completions
hang), which only a canary request shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage_agent.adapters.contract import STALE_STEP_S
from ullage_agent.wire import Liveness, Snapshot

STALL_S = 60.0
"""Work in flight and no counter moving for this long is a stall: a long prefill is one engine step, and engines that
count at the end of a step were seen to stand still for ten seconds."""

Marks = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What was last seen to move, and when (monotonic seconds)."""

    instance: str
    marks: Marks
    moved_at: float


def feel(pulse: Pulse | None, instance: str, snapshot: Snapshot, at: float) -> Pulse:
    """The pulse after a reading."""
    marks: Marks = (
        snapshot.finished_total,
        snapshot.prompt_tokens_total,
        snapshot.generated_tokens_total,
        snapshot.admitted_total,
        snapshot.preemptions_total,
        snapshot.running,
        snapshot.hot_blocks,
    )
    if pulse is None or pulse.instance != instance or pulse.marks != marks or at < pulse.moved_at:
        return Pulse(instance=instance, marks=marks, moved_at=at)
    return pulse


def judge(pulse: Pulse, snapshot: Snapshot, at: float, canary_error: str | None = None) -> Liveness:
    """What the pulse means now. `canary_error`: why the last canary got no answer, if it did not."""
    quiet = max(0.0, at - pulse.moved_at)
    busy = _sum(snapshot.running, snapshot.waiting)
    if canary_error is not None:
        return Liveness(state="dead", quiet_s=quiet, detail=f"a request of one token got no answer: {canary_error}")
    if snapshot.step_age_s is not None and snapshot.step_age_s > STALE_STEP_S:
        detail = f"the step loop last passed {snapshot.step_age_s:.0f} s ago"
        return Liveness(state="stalled", quiet_s=quiet, detail=detail)
    if busy is None:
        return Liveness(state="unknown", quiet_s=quiet, detail="the engine does not say whether it has work")
    if not busy:
        return Liveness(state="idle", quiet_s=quiet)
    if quiet < STALL_S:
        return Liveness(state="working", quiet_s=quiet)
    return Liveness(state="stalled", quiet_s=quiet, detail=f"{busy} requests in flight, no counter moved")


def _sum(running: int | None, waiting: int | None) -> int | None:
    known = [count for count in (running, waiting) if count is not None]
    return sum(known) if known else None
