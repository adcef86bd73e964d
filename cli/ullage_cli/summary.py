"""What happened, for people and as one line of JSON for programs. Numbers come from reports and records only. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ullage_operator.model import Remediation

from . import words
from .board import Board, stages
from .load import Tally

_SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that served, seen from its end. None: nobody could say."""

    risk_peak: float | None
    risk_after: float | None
    """At the last reading."""
    remediations: tuple[Remediation, ...]
    requests_ok: int | None
    requests_failed: int | None
    refusals: int
    failures: tuple[str, ...]
    tokens_per_s: float
    """Between the first and the last token of the run."""
    seconds: float
    """Since everything was ready."""
    cut_short: str | None = None
    """What ended the demo load before it was done."""
    requests_cut_off: int = 0
    """Neither answered nor failed: the run ended first."""

    @property
    def bytes_freed(self) -> int:
        """By all remediations, as the engines answered."""
        return sum(record.status.bytes_freed or 0 for record in self.remediations)

    @property
    def blocks_freed(self) -> int:
        """By all remediations, as the engines answered."""
        return sum(record.status.blocks_freed or 0 for record in self.remediations)

    def to_json(self) -> dict[str, Any]:
        """The last line of the output."""
        return {
            "risk_peak": _rounded(self.risk_peak),
            "risk_after": _rounded(self.risk_after),
            "bytes_freed": self.bytes_freed,
            "blocks_freed": self.blocks_freed,
            "remediations": len(self.remediations),
            "requests_ok": self.requests_ok,
            "requests_failed": self.requests_failed,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "seconds": round(self.seconds, 1),
        }


def outcome(board: Board, tally: Tally | None, seconds: float, cut_short: str | None = None) -> Outcome:
    """Sum a run up; without a demo load the engines' own counters stand for the requests."""
    reading = board.reading
    return Outcome(
        risk_peak=board.peak,
        risk_after=reading.risk if reading else None,
        remediations=tuple(board.remediations.values()),
        requests_ok=tally.ok if tally else (reading.finished if reading else None),
        requests_failed=tally.failed if tally else None,
        refusals=tally.refusals if tally else 0,
        failures=tuple(tally.failures) if tally else (),
        tokens_per_s=board.mean_tokens_per_s(),
        seconds=seconds,
        cut_short=cut_short,
        requests_cut_off=tally.abandoned if tally else 0,
    )


def text(result: Outcome) -> str:
    """A few lines that say what happened."""
    lines = [
        f"Served for {words.duration(result.seconds)} at {result.tokens_per_s:.1f} tokens/s: "
        f"{words.number(result.requests_ok)} requests answered, {words.number(result.requests_failed)} failed."
    ]
    if result.cut_short is not None:
        lines.append(f"Cut short by {result.cut_short}: the demo was not done, {_cut_off(result.requests_cut_off)}.")
    if result.refusals:
        lines.append(f"Refused for a moment and then answered: {result.refusals} times.")
    lines += [f"  failed {count} times: {why}" for why, count in _most_common(result.failures)]
    lines.append(_risk_line(result))
    lines += [f"  {_remediation_line(record)}" for record in result.remediations]
    return "\n".join(lines)


def json_line(result: Outcome) -> str:
    """One JSON object on one line."""
    return json.dumps(result.to_json(), separators=(", ", ": "))


def _risk_line(result: Outcome) -> str:
    if result.risk_peak is None or result.risk_after is None:
        return "The risk was never read."
    acted = len(result.remediations)
    if not acted:
        return f"Risk peaked at {result.risk_peak:.0f} and is {result.risk_after:.0f} now; nothing had to be done."
    plural = "" if acted == 1 else "s"
    freed = f"{result.blocks_freed} blocks ({words.mebibytes(result.bytes_freed)})"
    return (
        f"Risk peaked at {result.risk_peak:.0f} and is {result.risk_after:.0f} now; "
        f"{acted} remediation{plural} freed {freed}:"
    )


def _cut_off(count: int) -> str:
    return f"{count} request{' was' if count == 1 else 's were'} cut off"


def _remediation_line(record: Remediation) -> str:
    parts = []
    if record.spec.action == "evict" and record.status.blocks_freed is not None:
        parts.append(f"freed {record.status.blocks_freed} blocks")
    if record.status.after is not None:
        before = record.status.before or record.spec.inputs
        parts.append(f"risk {before.score:.0f} → {record.status.after.score:.0f}")
    return f"{words.step(record)}: {', '.join([*parts, stages(record)[-1]])}"


def _most_common(failures: tuple[str, ...]) -> list[tuple[str, int]]:
    return Counter(failures).most_common(_SHOWN_FAILURES)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
