"""How an engine serves: rates and latency quantiles over the last minute, from differences of its counters. Pure.

A counter that goes back means another process, and the window starts anew. What an engine counts late is inferred:
a request that stops running while more wait, and that has not finished, was preempted, whatever the counter says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ullage_agent.histogram import Histogram
from ullage_agent.wire import Service, Snapshot

WINDOW_S = 60.0
MAX_MOMENTS = 120
MIN_SPAN_S = 1.5
"""Shorter windows give rates that are noise."""

_MONOTONE = ("finished_total", "prompt_tokens_total", "generated_tokens_total", "admitted_total")
_LATENCIES = (("ttft", "ttft"), ("inter_token", "inter_token"), ("end_to_end", "end_to_end"))
_QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One reading as the service window needs it."""

    at: float
    """Monotonic seconds of the agent."""
    instance: str
    snapshot: Snapshot
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


Moments = tuple[Moment, ...]
"""Readings of one engine process, oldest first."""


def remember(moments: Moments, new: Moment, window_s: float = WINDOW_S) -> Moments:
    """The window with `new` added; a new one if it does not continue the old. One moment older than the window is
    kept, so that a window is never shorter than asked."""
    if moments and not _continues(moments[-1], new):
        moments = ()
    kept = [moment for moment in moments if new.at - moment.at <= window_s]
    older = moments[len(moments) - len(kept) - 1 : len(moments) - len(kept)] if len(kept) < len(moments) else ()
    return (*older, *kept, new)[-MAX_MOMENTS:]


def service(moments: Moments) -> Service | None:
    """Rates and quantiles of a window; None while it is too short."""
    if len(moments) < 2:
        return None
    first, last = moments[0], moments[-1]
    span = last.at - first.at
    if span < MIN_SPAN_S:
        return None
    old, new = first.snapshot, last.snapshot
    finished = _gain(old.finished_total, new.finished_total)
    running, waiting = _change(old.running, new.running), _change(old.waiting, new.waiting)
    preempted = _gain(old.preemptions_total, new.preemptions_total)
    admitted = _gain(old.admitted_total, new.admitted_total)
    if admitted is None and finished is not None and running is not None:
        admitted = max(0, running + finished)
    arrived = None if None in (finished, running, waiting) else max(0, _sum(finished, running, waiting))
    return Service(
        window_s=span,
        admissions_per_s=_per(admitted, span),
        arrivals_per_s=_per(arrived, span),
        finishes_per_s=_per(finished, span),
        preemptions_per_s=_per(preempted, span),
        inferred_preemptions_per_s=_per(_inferred(moments), span),
        recomputed_share=_recomputed(old, new),
        generated_tokens_per_s=_per(_gain(old.generated_tokens_total, new.generated_tokens_total), span),
        prefix_hit_ratio=_hit_ratio(old, new),
        **_latencies(first, last),
    )


def _continues(last: Moment, new: Moment) -> bool:
    if last.instance != new.instance or new.at <= last.at:
        return False
    for name in _MONOTONE:
        before, now = getattr(last.snapshot, name), getattr(new.snapshot, name)
        if before is not None and now is not None and now < before:
            return False
    return True


def _inferred(moments: Moments) -> int | None:
    """Requests that stopped running without an end while the queue grew, summed over the window."""
    count, known = 0, False
    for before, now in pairwise(moments):
        running = _change(before.snapshot.running, now.snapshot.running)
        waiting = _change(before.snapshot.waiting, now.snapshot.waiting)
        finished = _gain(before.snapshot.finished_total, now.snapshot.finished_total)
        if running is None or waiting is None or finished is None:
            continue
        known = True
        if running < 0 < waiting:
            count += max(0, -running - finished)
    return count if known else None


def _recomputed(old: Snapshot, new: Snapshot) -> float | None:
    again = _gain(old.recomputed_tokens_total, new.recomputed_tokens_total)
    prompt = _gain(old.prompt_tokens_total, new.prompt_tokens_total)
    answer = _gain(old.generated_tokens_total, new.generated_tokens_total)
    if again is None or prompt is None or answer is None:
        return None
    work = max(prompt + answer, again)
    return again / work if work else 0.0


def _hit_ratio(old: Snapshot, new: Snapshot) -> float | None:
    asked = _gain(old.prefix_query_tokens_total, new.prefix_query_tokens_total)
    found = _gain(old.prefix_hit_tokens_total, new.prefix_hit_tokens_total)
    return None if not asked or found is None else min(1.0, found / asked)


def _latencies(first: Moment, last: Moment) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key, name in _LATENCIES:
        if key in last.histograms:
            recent = last.histograms[key].since(first.histograms.get(key))
            found |= {f"{name}_{label}_s": recent.quantile(share) for share, label in _QUANTILES}
    return found


def _gain(old: int | None, new: int | None) -> int | None:
    return None if old is None or new is None or new < old else new - old


def _change(old: int | None, new: int | None) -> int | None:
    return None if old is None or new is None else new - old


def _sum(*counts: int | None) -> int:
    return sum(count for count in counts if count is not None)


def _per(count: int | None, span: float) -> float | None:
    return None if count is None else count / span
