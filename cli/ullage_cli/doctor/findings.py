"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "info", "unknown", "warning", "error"]
"""unknown: what the check needs could not be read. warning: works, but not as meant. error: does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found."""

    level: Level
    subject: str
    """Object or part that it is about."""
    message: str
    fix: str = ""
    """What to do about it."""


def ok(subject: str, message: str) -> Finding:
    return Finding(level="ok", subject=subject, message=message)


def info(subject: str, message: str) -> Finding:
    return Finding(level="info", subject=subject, message=message)


def unknown(subject: str, message: str, fix: str = "") -> Finding:
    return Finding(level="unknown", subject=subject, message=message, fix=fix)


def warning(subject: str, message: str, fix: str) -> Finding:
    return Finding(level="warning", subject=subject, message=message, fix=fix)


def error(subject: str, message: str, fix: str) -> Finding:
    return Finding(level="error", subject=subject, message=message, fix=fix)
