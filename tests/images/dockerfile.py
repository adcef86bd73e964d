"""A Dockerfile as stages of instructions."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("agent", "operator", "engine")


@dataclass
class Stage:
    """From one FROM to the next; instructions in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        """Arguments of every such instruction."""
        return [arguments for found, arguments in self.instructions if found == name]

    def only(self, name: str) -> str:
        """Arguments of the one such instruction."""
        (arguments,) = self.all(name)
        return arguments

    def command(self, name: str) -> list[str]:
        """The list that ENTRYPOINT, or CMD within HEALTHCHECK, is given."""
        return [str(word) for word in json.loads(self.only(name).split("CMD ")[-1])]

    def pairs(self, name: str) -> dict[str, str]:
        """Names and values of ENV or LABEL."""
        words = [word for arguments in self.all(name) for word in shlex.split(arguments)]
        return dict(word.split("=", 1) for word in words)


def stages(component: str) -> list[Stage]:
    """Stages of a component's Dockerfile; the last is the image."""
    text = re.sub(r"^#.*\n", "", (ROOT / component / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            found.append(Stage(arguments.split(" AS ")[0]))
        elif name and found:
            found[-1].instructions.append((name, arguments.strip()))
    return found


def image(component: str) -> Stage:
    """The stage that becomes the image."""
    return stages(component)[-1]
