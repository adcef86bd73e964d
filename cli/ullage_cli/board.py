"""What is known at this moment, for the view, the load and the summary. Fed by readings and records only.

`combine` is pure; `Board` keeps history. Non-goal: drawing (`view`) and deciding (the operator's policy).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ullage_agent.wire import RiskReport, Snapshot
from ullage_operator.model import Phase, Remediation

from .pace import Pressure

HISTORY_S = 60
_SPEED_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All engines at one time: blocks and requests are sums, risk and fragmentation the worst one's."""

    at: float
    """Monotonic seconds."""
    reporting: int = 0
    """Engines with a usable reading."""
    worst: str | None = None
    """Engine with the greatest risk; the following seven are about it."""
    risk: float | None = None
    winner: str | None = None
    terms: Mapping[str, float]
    external: float | None = None
    internal: float | None = None
    allocator: float | None = None
    exhaustion_s: tuple[float | None, float | None, float | None] = (None, None, None)
    """Seconds to exhaustion: p10, p50, p90."""
    block_tokens: int | None = None
    block_bytes: int | None = None
    total: int | None = None
    hot: int | None = None
    reclaimable: int | None = None
    free: int | None = None
    running: int | None = None
    waiting: int | None = None
    shortfall: int | None = None
    """Blocks that admitted work may still ask for, less those free or reclaimable."""
    finished: int | None = None
    generated: int | None = None
    errors: tuple[str, ...] = ()
    """Why engines or agents could not be read."""


def combine(reports: Mapping[str, RiskReport], errors: Sequence[str], at: float) -> Reading:
    """One reading from the reports of all engines, by name."""
    snapshots = [report.snapshot for report in reports.values() if report.snapshot is not None]
    troubles = [f"{name}: {report.error}" for name, report in reports.items() if report.error]
    scored = {name: report for name, report in reports.items() if report.score is not None}
    worst = max(scored, key=lambda name: scored[name].score or 0.0, default=None)
    report = scored[worst] if worst is not None else None
    fragmentation = report.fragmentation if report else None
    forecast = report.forecast if report else None
    return Reading(
        at=at,
        reporting=len(scored),
        worst=worst,
        risk=report.score if report else None,
        winner=report.winner if report else None,
        terms=dict(report.terms) if report else {},
        external=fragmentation.external if fragmentation else None,
        internal=fragmentation.internal if fragmentation else None,
        allocator=fragmentation.allocator if fragmentation else None,
        exhaustion_s=(
            (forecast.exhaustion_p10_s, forecast.exhaustion_p50_s, forecast.exhaustion_p90_s)
            if forecast
            else (None, None, None)
        ),
        block_tokens=snapshots[0].block_tokens if snapshots else None,
        block_bytes=snapshots[0].block_bytes if snapshots else None,
        total=_sum(snapshots, "total_blocks"),
        hot=_sum(snapshots, "hot_blocks"),
        reclaimable=_sum(snapshots, "reclaimable_blocks"),
        free=_sum(snapshots, "free_blocks"),
        running=_sum(snapshots, "running"),
        waiting=_sum(snapshots, "waiting"),
        shortfall=_shortfall(list(reports.values())),
        finished=_sum(snapshots, "finished_total"),
        generated=_sum(snapshots, "generated_tokens_total"),
        errors=(*errors, *troubles),
    )


def _shortfall(reports: Sequence[RiskReport]) -> int | None:
    total = 0
    for report in reports:
        forecast = report.forecast
        if forecast is None or forecast.demand_blocks is None or forecast.supply_blocks is None:
            return None
        total += forecast.demand_blocks - forecast.supply_blocks
    return total if reports else None


def _sum(snapshots: Sequence[Snapshot], field: str) -> int | None:
    values = [getattr(snapshot, field) for snapshot in snapshots]
    return sum(values) if values and None not in values else None


Stage = Literal["decided", "done", "effective", "not effective", "failed", "expired"]

_ENDED: dict[Phase, Stage] = {
    "Succeeded": "effective",
    "Ineffective": "not effective",
    "Failed": "failed",
    "Expired": "expired",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A remediation reached a stage."""

    at: float
    """Monotonic seconds."""
    stage: Stage
    record: Remediation


def stages(record: Remediation) -> list[Stage]:
    """The stages that a record has passed, in order."""
    passed: list[Stage] = ["decided"]
    if record.status.answered_at is not None and record.status.phase != "Failed":
        passed.append("done")
    if record.status.phase in _ENDED:
        passed.append(_ENDED[record.status.phase])
    return passed


class Board:
    """The latest reading, a minute of risk, the peak, and what happened to each remediation."""

    def __init__(self, *, pod_uids: Collection[str]) -> None:
        """`pod_uids`: this run's engines; a record about another is an earlier run's, even if it ends in this one."""
        self._pod_uids = frozenset(pod_uids)
        self.reading: Reading | None = None
        self.peak: float | None = None
        self.risks: deque[tuple[float, float | None]] = deque(maxlen=4 * HISTORY_S)
        self.remediations: dict[str, Remediation] = {}
        """Those of this run, in order of decision."""
        self.happenings: list[Happening] = []
        self._generated: deque[tuple[float, int]] = deque(maxlen=4 * HISTORY_S)
        self._busy_from: tuple[float, int] | None = None
        self._busy_to: tuple[float, int] | None = None
        self._next: asyncio.Future[None] | None = None

    def take(self, reading: Reading, changed: Sequence[Remediation]) -> list[Happening]:
        """Note a reading and the records that changed with it; returns the new happenings."""
        self.reading = reading
        self.risks.append((reading.at, reading.risk))
        if reading.risk is not None:
            self.peak = max(self.peak or 0.0, reading.risk)
        if reading.generated is not None:
            self._note_generated(reading.at, reading.generated)
        ours = [record for record in changed if record.spec.pod_uid in self._pod_uids]
        fresh = [happening for record in ours for happening in self._note(record, reading.at)]
        self.happenings.extend(fresh)
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        return fresh

    def _note(self, record: Remediation, at: float) -> list[Happening]:
        before = self.remediations.get(record.metadata.name)
        self.remediations[record.metadata.name] = record
        known = stages(before) if before is not None else []
        return [Happening(at=at, stage=each, record=record) for each in stages(record) if each not in known]

    @property
    def settled(self) -> int:
        """Remediations of this run that have ended."""
        return sum(record.final for record in self.remediations.values())

    def tokens_per_s(self, window_s: float = _SPEED_WINDOW_S) -> float:
        """Tokens generated by all engines, averaged over the last `window_s` seconds."""
        if not self._generated:
            return 0.0
        end, count = self._generated[-1]
        start, base = next(each for each in self._generated if each[0] >= end - window_s)
        return max(0, count - base) / (end - start) if end > start else 0.0

    def mean_tokens_per_s(self) -> float:
        """Tokens generated by all engines between the first and the last time their number rose."""
        (start, base), (end, count) = self._busy_from or (0.0, 0), self._busy_to or (0.0, 0)
        return (count - base) / (end - start) if end > start else 0.0

    def _note_generated(self, at: float, count: int) -> None:
        before = self._generated[-1] if self._generated else None
        if before is not None and count > before[1]:
            self._busy_from = self._busy_from or before
            self._busy_to = (at, count)
        self._generated.append((at, count))

    async def next_pressure(self) -> Pressure:
        """What the demo load needs to know, at the next reading."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)
        reading = self.reading
        return Pressure(
            risk=reading.risk if reading else None,
            engines=reading.reporting if reading else 0,
            total_blocks=reading.total if reading else None,
            block_tokens=reading.block_tokens if reading else None,
            running=reading.running if reading else None,
            waiting=reading.waiting if reading else None,
            shortfall_blocks=reading.shortfall if reading else None,
            tokens_per_s=self.tokens_per_s(),
            settled=self.settled,
        )
