"""The command line of `ullage replay`."""

from __future__ import annotations

import sys
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..options import OutputOption
from ..tables import Output, as_json

if TYPE_CHECKING:
    from ullage_agent.wire import Action
    from ullage_operator.model import InferenceService

MOST = 4
"""Policies side by side."""


class EffectsOption(StrEnum):
    """Where the effect of steps comes from."""

    AUTO = "auto"
    ESTIMATED = "estimated"
    RECORDED = "recorded"


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recording, or JSON of Prometheus' query_range.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY", help="Manifest, or KEY=VALUE,… on the first; twice to compare."),
    ] = None,
    pod: Annotated[str | None, typer.Option(metavar="NAME", help="Engine, where the file holds several.")] = None,
    can: Annotated[
        str | None, typer.Option(metavar="ACTIONS", help="What the engine can: evict,compact,throttle,release.")
    ] = None,
    effects: Annotated[
        EffectsOption, typer.Option(help="auto: recorded where actions were recorded, else estimated.")
    ] = EffectsOption.AUTO,
    sweep_seconds: Annotated[float, typer.Option(min=0.0, help="Between two decisions.")] = 2.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the timeline.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run recorded data through forecast, risk and policy: what would have been done, and when.

    The agent's own analysis and the operator's own decisions, on your data; two policies side by side.
    """
    from . import report
    from .lane import Lane
    from .readings import read_file

    recording = read_file(file, pod)
    estimate = effects is EffectsOption.ESTIMATED or (effects is EffectsOption.AUTO and not recording.acts)
    lanes = [
        Lane(name=name, service=service, estimate=estimate, capabilities=_actions(can, recording.engine),
             sweep_s=sweep_seconds)
        for name, service in _policies(policy or [], _interval([m.at for m in recording.moments]))
    ]  # fmt: skip
    for lane in lanes:
        lane.run(recording)
    if plot is not None:
        from .picture import picture

        try:
            plot.write_text(picture(recording, lanes), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--plot: {plot}: {error.strerror}; give a file that can be written") from error
        print(f"picture: {plot}", file=sys.stderr)
    print(as_json(report.as_dict(recording, lanes)) if output is Output.JSON else report.text(recording, lanes))


def _policies(texts: list[str], interval: float) -> list[tuple[str, InferenceService]]:
    from .policies import policy, polled

    if len(texts) > MOST:
        raise InputError(f"--policy: {len(texts)} policies cannot be shown side by side; give at most {MOST}")
    found: list[tuple[str, InferenceService]] = []
    named: list[str | None] = [*texts] if texts else [None]
    for text in named:
        base = found[0][1] if found else None
        found.append((_name(text), polled(policy(text, base), interval)))
    return found


def _name(text: str | None) -> str:
    if text is None:
        return "default policy"
    return Path(text).stem if Path(text).exists() else text


def _interval(times: list[float]) -> float:
    """The usual time between readings."""
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 1.0


def _actions(can: str | None, engine: str) -> tuple[Action, ...]:
    from .lane import CAPABILITIES, GATED

    if can is None:
        return CAPABILITIES.get(engine, GATED)
    known: dict[str, Action] = {"evict": "evict", "compact": "compact", "throttle": "throttle", "release": "release"}
    words = [word.strip() for word in can.split(",") if word.strip()]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise InputError(f"--can: {unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(known[word] for word in words)
