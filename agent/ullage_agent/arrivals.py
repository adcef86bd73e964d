"""At what pace requests come, and whether something other than memory holds them up. Pure.

Readings are those of the last minute (`service.Moments`). Arrivals are what running and waiting requests gained and
what finished, in pieces of five seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ullage_agent.forecast import supply_blocks
from ullage_agent.service import Moments, remember, service
from ullage_agent.wire import Snapshot

ARRIVALS_S = 30.0
"""Arrivals are counted over this long: longer is slower to see a change, shorter is noise."""
PIECE_S = 5.0
"""Arrivals are counted in pieces this long to tell a burst."""
MIN_PIECES = 3
HELD_UP_READINGS = 3
"""A queue that was seen so often beside room did not wait for memory."""
AT_LIMIT = 0.9
"""Of the sequences that ran then, what must run now for the limit to be near."""
ADMISSIONS_S = 10.0
ROOM = 0.1
"""Share of the pool that is room: more than a prompt takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Arrivals a second, and over how many seconds they were counted."""

    per_s: float
    counted_s: float

    @property
    def variance(self) -> float:
        """Of the pace, as arrivals come at random; a pace of nothing is known no better than of one arrival."""
        return max(self.per_s, 1.0 / self.counted_s) / self.counted_s


def steady_arrivals(moments: Moments) -> Pace | None:
    """The pace over the last half minute without a burst: those who came with it run or wait already, and it would be
    a mistake to expect it again every half minute. None where the engine does not say enough."""
    counts = _pieces(moments)
    if not counts:
        return None
    rest = counts[:-1]
    usual = sum(rest) / len(rest) if len(rest) >= MIN_PIECES else None
    if usual is not None and counts[-1] > usual + 4.0 * math.sqrt(usual + 1.0):
        counts = rest
    counted_s = len(counts) * PIECE_S
    return Pace(per_s=sum(counts) / counted_s, counted_s=counted_s)


def admissions_held_up(moments: Moments) -> float | None:
    """Admissions a second of an engine that something other than memory holds up: its limit of sequences, or the pace
    of prefill. It is known by a queue that was seen beside room at several readings of the last minute, while about as
    many sequences ran as now; the queue may be gone for a moment. None where memory may be the limit."""
    last = moments[-1].snapshot
    if last.running is None or not _room(last):
        return None
    crowds = [m.snapshot.running or 0 for m in moments if m.snapshot.waiting and _room(m.snapshot)]
    if len(crowds) < HELD_UP_READINGS or last.running < AT_LIMIT * max(crowds):
        return None
    found = service(remember(moments[:-1], moments[-1], ADMISSIONS_S))
    return None if found is None else found.admissions_per_s


def mean_running(moments: Moments) -> float:
    """Sequences that ran, on average of the readings that arrivals are counted over."""
    recent = [
        moment.snapshot.running
        for moment in moments
        if moments[-1].at - moment.at <= ARRIVALS_S and moment.snapshot.running is not None
    ]
    return sum(recent) / len(recent) if recent else 0.0


def _pieces(moments: Moments) -> list[float]:
    """Arrivals in each piece, ascending."""
    pieces: dict[int, float] = {}
    last = moments[-1].at
    for before, now in pairwise(remember(moments[:-1], moments[-1], ARRIVALS_S)):
        gains = [_gain(before.snapshot, now.snapshot, name) for name in ("finished_total", "running", "waiting")]
        if None in gains:
            return []
        covered = range(int((last - now.at) // PIECE_S), int((last - before.at - 1e-9) // PIECE_S) + 1)
        count = sum(gain for gain in gains if gain is not None) / len(covered)
        for piece in covered:  # several where readings were missed
            pieces[piece] = pieces.get(piece, 0.0) + count
    return sorted(max(0.0, count) for count in pieces.values())


def _room(state: Snapshot) -> bool:
    supply = supply_blocks(state)
    return bool(state.total_blocks and supply is not None and supply >= ROOM * state.total_blocks)


def _gain(before: Snapshot, now: Snapshot, name: str) -> int | None:
    old, new = getattr(before, name), getattr(now, name)
    return None if old is None or new is None else int(new - old)
