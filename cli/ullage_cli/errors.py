"""Errors of the command line.

CliError               ends the command with one line `error: …` and its exit status
├── InputError         something the user gave cannot work; nothing was left running (status 2)
└── BrokenLoop         a part of the running loop died or stopped answering (status 1)
    └── ChildDied      a child process ended by itself
"""

from __future__ import annotations

from pathlib import Path


class CliError(Exception):
    """Base of all errors raised on purpose by the command line; the message is one line."""

    exit_status = 1


class InputError(CliError):
    """The message names the object, the field, the value and the remedy."""

    exit_status = 2


class BrokenLoop(CliError):
    """The loop cannot go on: an engine, an agent or the front is gone or stuck."""


class ChildDied(BrokenLoop):
    """A child process ended by itself."""

    def __init__(self, name: str, status: int, last_lines: str, log: Path) -> None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        super().__init__(f"{name} {how}: {last_lines or 'it printed nothing'} (log: {log})")
