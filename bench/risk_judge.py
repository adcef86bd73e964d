"""How a detector's alarms are judged against what happened. Pure.

Alarms at most 30 s apart are one episode. An event (memory ran out, after a minute without) counts as foreseen when an
episode began before it and lasted until at most 60 s before it; its lead is the time from that beginning, at most
120 s, and 0 when it was not foreseen. An episode is a false alarm when from its beginning to 60 s after its end memory
was never what was missing; one that the end of the recording leaves open is not counted. How many of the false ones saw
at least 97 % in use until then is told as `near_misses`; false they remain.

An alarm that is always on has few episodes. `false_minutes_per_hour` tells it: the time in alarm in which memory was
missing neither then nor within the minute after.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from risk_simulator import Scenario

ALARM = 85.0
MERGE_S = 30.0
AFTER_S = 60.0
MAX_LEAD_S = 120.0
READING_S = 1.0
"""Each reading stands for so long."""
NEAR_MISS = 0.97
LEVELS = (*range(50, 85, 5), *range(85, 100), 99.5, 99.8)
"""Scores that are tried as the level of an alarm, to see what is gained and lost."""

Alarms = list[tuple[float, bool]]


@dataclass(frozen=True)
class Tally:
    """What one detector did in some scenarios."""

    leads: tuple[float, ...] = ()
    """Seconds of each event; 0 when it was not foreseen."""
    foreseen: int = 0
    false_alarms: int = 0
    near_misses: int = 0
    """Of the false alarms."""
    false_s: float = 0.0
    hours: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            (*self.leads, *other.leads), self.foreseen + other.foreseen, self.false_alarms + other.false_alarms,
            self.near_misses + other.near_misses, self.false_s + other.false_s, self.hours + other.hours,
        )  # fmt: skip

    @property
    def recall(self) -> float:
        return self.foreseen / len(self.leads) if self.leads else 0.0

    def figures(self) -> dict[str, float | int | None]:
        leads = sorted(self.leads)
        return {
            "recall": round(self.recall, 4) if leads else None,
            "lead_p50_s": round(statistics.median(leads), 1) if leads else None,
            "lead_p10_s": round(leads[len(leads) // 10], 1) if leads else None,
            "false_alarms_per_hour": round(self.false_alarms / self.hours, 3) if self.hours else None,
            "false_minutes_per_hour": round(self.false_s / 60 / self.hours, 2) if self.hours else None,
            "events": len(leads),
            "false_alarms": self.false_alarms,
            "near_misses": self.near_misses,
            "hours": round(self.hours, 2),
        }


def episodes(alarms: Alarms) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at, on in alarms:
        if not on:
            continue
        if found and at - found[-1][1] <= MERGE_S:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


def tally(alarms: Alarms, scenario: Scenario, nearly_full: Callable[[float, float], bool]) -> Tally:
    """Judge one scenario. `nearly_full` tells whether usage was at least `NEAR_MISS` between two moments."""
    short = sorted({*scenario.events, *scenario.shortages})

    def needless(begin: float, end: float) -> bool:
        following = bisect_left(short, begin)
        missing = following < len(short) and short[following] <= end + AFTER_S
        return end + AFTER_S <= scenario.duration and not missing

    spells = episodes(alarms)
    leads = []
    for event in scenario.events:
        before = [event - begin for begin, end in spells if begin < event and event <= end + AFTER_S]
        leads.append(min(MAX_LEAD_S, max(before, default=0.0)))
    false = [(begin, end) for begin, end in spells if needless(begin, end)]
    return Tally(
        leads=tuple(leads),
        foreseen=sum(lead > 0 for lead in leads),
        false_alarms=len(false),
        near_misses=sum(nearly_full(begin, end + AFTER_S) for begin, end in false),
        false_s=READING_S * sum(on and needless(at, at) for at, on in alarms),
        hours=scenario.duration / 3600,
    )


def equal_level(false_alarms: Mapping[float, int], limit: int) -> float | None:
    """The lowest alarm level down to which there are no more false alarms than `limit`."""
    found = None
    for level in sorted(false_alarms, reverse=True):
        if false_alarms[level] > limit:
            break
        found = level
    return found


def at_equal_false_alarms(curve: Mapping[float, Tally], baseline: Tally) -> dict[str, float | int | None]:
    """What the score foresees at the level at which it has no more false alarms than the baseline."""
    level = equal_level({level: did.false_alarms for level, did in curve.items()}, baseline.false_alarms)
    figures = curve[level].figures() if level is not None else {}
    wanted = ("recall", "lead_p50_s", "false_alarms_per_hour", "false_minutes_per_hour")
    return {"level": level, **{name: figures.get(name) for name in wanted}}


def recall_gain(
    curve: Mapping[float, Sequence[Tally]], baseline: Sequence[Tally], draws: int = 1000
) -> tuple[float, float] | None:
    """A 90 % interval of what recall the score gains over the baseline, at no more false alarms; None without events.

    A bootstrap over scenarios, because what happens in one hangs together; `curve` and `baseline` hold one tally of
    each, in the same order. In every draw the level is found anew; where even the highest has more false alarms than
    the baseline, nothing is foreseen.
    """
    random = Random(0)
    gains = []
    for _ in range(draws):
        drawn = random.choices(range(len(baseline)), k=len(baseline))
        theirs = [baseline[one] for one in drawn]
        false = {level: sum(did[one].false_alarms for one in drawn) for level, did in curve.items()}
        level = equal_level(false, sum(did.false_alarms for did in theirs))
        ours = [curve[level][one] for one in drawn] if level is not None else []
        events = sum(len(did.leads) for did in theirs)
        if events:
            gains.append((sum(did.foreseen for did in ours) - sum(did.foreseen for did in theirs)) / events)
    gains.sort()
    return (gains[len(gains) // 20], gains[-1 - len(gains) // 20]) if gains else None
