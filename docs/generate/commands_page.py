"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer

from ullage_cli.commands import app

HEAD = """\
# Reference: `ullage`

Generated from the program by `python docs/generate`; [cli](cli.md) shows how the commands are used. As `kubectl ullage`
the same program is a plugin of kubectl. Exit status: 0 done; 1 something does not work or does not fit; 2 bad input,
with one line `error: …`; 130 stopped.
"""


def page() -> str:
    """The page."""
    group: Any = typer.main.get_command(app)
    return "\n".join([HEAD, *(_command(name, command) for name, command in group.commands.items())])


def _command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["ullage", name, *(_metavar(argument) for argument in arguments)])
    lines = [f"## `{usage} [OPTIONS]`", "", " ".join((command.help or "").split()), ""]
    if command.params:
        lines += ["| | meaning | default |", "|---|---|---|"]
        lines += [_row(parameter) for parameter in command.params]
    return "\n".join(lines) + "\n"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = _metavar(parameter)
    else:
        shown = ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {_metavar(parameter)}")
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    told = "" if default in (None, False, ()) or parameter.required else str(getattr(default, "value", default))
    return f"| `{shown}` | {' '.join((parameter.help or '').split())} | {told} |".replace("  |", " |")


def _metavar(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar).replace("|", "\\|")
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "\\|".join(str(choice.value) for choice in annotation)
    return {"int": "N", "float": "X"}.get(getattr(annotation, "__name__", ""), "TEXT")
