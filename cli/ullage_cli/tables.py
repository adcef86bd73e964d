"""Plain columns for people and JSON for programs: how all commands but the live views print.

Columns are aligned with spaces, without lines or colour, so that the same text serves a terminal, a pipe and a mail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

GAP = "   "


class Output(StrEnum):
    """How a command prints what it found."""

    TABLE = "table"
    JSON = "json"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A header and rows, aligned: the first `left` columns to the left, the others (figures) to the right."""
    lines = [header, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]

    def cell(line: Sequence[str], index: int) -> str:
        return line[index].ljust(widths[index]) if index < left else line[index].rjust(widths[index])

    return "\n".join(GAP.join(cell(line, index) for index in range(len(header))).rstrip() for line in lines)


def as_json(value: Any) -> str:
    """One JSON document, for a program that reads a command's output."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
