"""The one version, wherever it is written: `stamp.py` says it, `stamp.py --set 0.2.0` stamps it.

`PLACES` is the list. A place whose version differs from the others, or that lost its version, is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r"[0-9]+\.[0-9]+\.[0-9]+(?:(?:a|b|rc)[0-9]+)?"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the version stands: everything that `pattern` finds in a file, the version being its group."""

    path: str
    pattern: str
    count: int
    """How often it must be found."""


PLACES = (
    Place("pyproject.toml", rf'^version = "({VERSION})"$', 1),
    Place("manifests/operator/deployment.yaml", rf"\bullage-(?:operator|engine|agent):({VERSION})$", 3),
    Place("operator/Dockerfile", rf"^ARG VERSION=({VERSION})$", 1),
    Place("agent/Dockerfile", rf"^ARG VERSION=({VERSION})$", 1),
    Place("engine/Dockerfile", rf"^ARG VERSION=({VERSION})$", 1),
    Place("operator/Dockerfile", rf"--tag ullage-operator:({VERSION}) ", 1),
    Place("agent/Dockerfile", rf"--tag ullage-agent:({VERSION}) ", 1),
    Place("engine/Dockerfile", rf"--tag ullage-engine:({VERSION})(?:-cpu)? ", 2),
)


class Disagreement(Exception):
    """Places say different versions, or one says none."""


def current(root: Path = ROOT) -> str:
    """The version.

    Raises:
        Disagreement: there is not one.
    """
    found = {(place.path, version) for place in PLACES for version in _versions(root, place)}
    versions = {version for _, version in found}
    if len(versions) != 1:
        said = ", ".join(f"{path}: {version}" for path, version in sorted(found))
        raise Disagreement(f"{said}; run make version VERSION=…")
    return versions.pop()


def stamp(version: str, root: Path = ROOT) -> None:
    """Write the version everywhere.

    Raises:
        ValueError: not a version.
        Disagreement: a place has none; then nothing was written.
    """
    if re.fullmatch(VERSION, version) is None:
        raise ValueError(f"{version!r} is no version; give one like 0.2.0 or 0.2.0rc1")
    texts = {place.path: (root / place.path).read_text() for place in PLACES}
    for place in PLACES:
        _versions(root, place)
        texts[place.path] = re.sub(place.pattern, partial(_replaced, version), texts[place.path], flags=re.MULTILINE)
    for path, text in texts.items():
        (root / path).write_text(text)


def _versions(root: Path, place: Place) -> list[str]:
    found = re.findall(place.pattern, (root / place.path).read_text(), re.MULTILINE)
    if len(found) != place.count:
        raise Disagreement(f"{place.path} names the version {len(found)} times, not {place.count}: {place.pattern}")
    return found


def _replaced(version: str, match: re.Match[str]) -> str:
    start, end = (edge - match.start() for edge in match.span(1))
    return match[0][:start] + version + match[0][end:]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the version, or set it. Status 1: the places disagree; 2: not a version."""
    parser = argparse.ArgumentParser(description="The one version, wherever it is written.")
    parser.add_argument("--set", metavar="VERSION", help="stamp this version everywhere")
    arguments = parser.parse_args(argv)
    try:
        if arguments.set is not None:
            stamp(arguments.set)
        sys.stdout.write(f"{current()}\n")
    except (Disagreement, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1 if isinstance(error, Disagreement) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
