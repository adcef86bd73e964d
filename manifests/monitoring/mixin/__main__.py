"""`python -m mixin --write DIR | --check DIR | --rules FILE`: render, compare, or render the rules into one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from mixin.parts import Settings, seconds
from mixin.render import RULE_FILES, files


def main(argv: Sequence[str] | None = None) -> int:
    """Status 1: the files in DIR are not what the definition renders."""
    arguments = _parser().parse_args(argv)
    settings = Settings(runbooks=arguments.runbooks, longest_hold=arguments.longest_hold)
    if arguments.rules is not None:
        groups = [group for rules in RULE_FILES for group in rules.render(settings)["groups"]]
        arguments.rules.write_text(yaml.safe_dump({"groups": groups}, sort_keys=False))
        return 0
    if arguments.write is not None:
        for path, text in files(settings).items():
            target = arguments.write / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return 0
    stale = [path for path, text in files(settings).items() if _read(arguments.check / path) != text]
    for path in stale:
        sys.stderr.write(f"{arguments.check / path} is not what the definition renders; run make monitoring\n")
    return 1 if stale else 0


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mixin", description="Render rules and dashboards.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="DIR", help="write all files under DIR")
    what.add_argument("--check", type=Path, metavar="DIR", help="say which files under DIR are out of date")
    what.add_argument("--rules", type=Path, metavar="FILE", help="write all rules into one plain rule file")
    parser.add_argument(
        "--runbooks", default=Settings().runbooks, metavar="URL", help="where the runbooks are published"
    )
    parser.add_argument(
        "--longest-hold",
        type=_duration,
        metavar="TIME",
        help="no alert waits longer than this, such as 2s, before it fires; for demonstrations",
    )
    return parser


def _duration(text: str) -> str:
    try:
        seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


if __name__ == "__main__":
    sys.exit(main())
