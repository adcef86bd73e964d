"""Figures and remediations in words; shared by the view, the plain lines and the summary. Pure."""

from __future__ import annotations

from ullage_operator.model import Remediation

from .board import Happening


def duration(seconds: float) -> str:
    """`45 s`, `3:05`, `1:02:00`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def mebibytes(count: int) -> str:
    """`7.8 MiB`."""
    return f"{count / 2**20:.1f} MiB"


def ratio(value: float | None) -> str:
    """A share as `0.82`, or a dash where it is not known."""
    return "–" if value is None else f"{value:.2f}"


def number(value: int | None) -> str:
    """A count, or a dash where it is not known."""
    return "–" if value is None else str(value)


def exhaustion(seconds: tuple[float | None, float | None, float | None]) -> str:
    """Forecast p10, p50, p90 as `full in ~12 s (5 s to 30 s)`."""
    low, middle, high = seconds
    if middle is None:
        return "exhaustion not in sight"
    if low is None or high is None:
        return f"full in ~{duration(middle)}"
    return f"full in ~{duration(middle)} ({duration(low)} to {duration(high)})"


def risk_word(score: float | None) -> str:
    """The score as a word, so that no colour is needed to read it."""
    if score is None:
        return "unknown"
    if score >= 85:
        return "critical"
    return "elevated" if score > 60 else "calm"


def step(record: Remediation) -> str:
    """What a remediation does: `evict 20 % on demo-0`."""
    spec = record.spec
    amount = ""
    if spec.action == "evict" and spec.parameters.ratio is not None:
        amount = f" {spec.parameters.ratio * 100:.0f} %"
    if spec.action == "throttle" and spec.parameters.max_prompt_tokens is not None:
        amount = f" above {spec.parameters.max_prompt_tokens} tokens"
    return f"{spec.action}{amount} on {spec.pod}"


def intention(record: Remediation) -> str:
    """What a remediation does, and why: `evict 20 % on demo-0, risk 88 by classic`."""
    inputs = record.spec.inputs
    winner = f" by {inputs.winner}" if inputs.winner else ""
    return f"{step(record)}, risk {inputs.score:.0f}{winner}"


def describe(happening: Happening) -> str:
    """What a remediation's stage means in figures."""
    record, status = happening.record, happening.record.status
    where = f"{record.spec.action} on {record.spec.pod}"
    match happening.stage:
        case "decided":
            return intention(record)
        case "done" if record.spec.action == "evict":
            return f"{where}: freed {status.blocks_freed} blocks, {mebibytes(status.bytes_freed or 0)}"
        case "effective" | "not effective" if status.after is not None:
            before = status.before or record.spec.inputs
            return f"{where}: risk {before.score:.0f} → {status.after.score:.0f}"
        case _:
            return f"{where}: {status.message}"
