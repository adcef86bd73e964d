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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def at_equal_false_alarms(curve: Mapping[float, Tally], baseline: Tally) -> dict[str, float | int | None]:
    """What the score foresees at the lowest alarm level down to which it has no more false alarms than the baseline."""
    found: dict[str, float | int | None] = {"level": None, "recall": None, "lead_p50_s": None}
    for level in sorted(curve, reverse=True):
        if curve[level].false_alarms > baseline.false_alarms:
            break
        found = {"level": level, **curve[level].figures()}
    wanted = ("level", "recall", "lead_p50_s", "false_alarms_per_hour", "false_minutes_per_hour")
    return {name: found.get(name) for name in wanted}
