"""Findings in words, and as a document; the exit status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .findings import Finding, Level

SIGNS: dict[Level, str] = {"ok": "ok", "info": "--", "unknown": "??", "warning": "!", "error": "x"}


def text(findings: Sequence[Finding]) -> str:
    """One line for each finding, and what to do below it."""
    lines = []
    for found in findings:
        lines.append(f"{SIGNS[found.level]:>2}  {found.subject}: {found.message}")
        if found.fix:
            lines.append(f"      -> {found.fix}")
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """The end in one line."""
    count = {level: sum(found.level == level for found in findings) for level in SIGNS}
    if count["error"] or count["warning"]:
        verdict = f"{count['error']} to fix, {count['warning']} to look at"
    else:
        verdict = "nothing to fix"
    unseen = f"; {count['unknown']} could not be checked" if count["unknown"] else ""
    return f"{verdict}; {count['ok']} as they should be{unseen}"


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "findings": [
            {"level": f.level, "subject": f.subject, "message": f.message, **({"fix": f.fix} if f.fix else {})}
            for f in findings
        ],
        "summary": summary(findings),
        "exitStatus": status(findings),
    }


def status(findings: Sequence[Finding]) -> int:
    """1 where something does not work; 0 also with warnings, and where something could not be seen."""
    return 1 if any(found.level == "error" for found in findings) else 0
