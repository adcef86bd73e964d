"""Lanes in words and as a document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import words
from ..tables import columns
from .data import Recording, first_preemption
from .lane import Happening, Lane, Outcome, outcome

SHOWN = 12
"""Happenings of each policy that are printed."""


def text(recording: Recording, lanes: Sequence[Lane]) -> str:
    """For people."""
    preempted = first_preemption(recording)
    told = f"first preemption after {words.duration(preempted)}" if preempted is not None else "no preemption told"
    parts = [
        f"{recording.source}: {words.duration(recording.seconds)}, {len(recording.moments)} readings of "
        f"{recording.engine}; {told}",
        "",
        table([outcome(lane, preempted) for lane in lanes]),
    ]
    for lane in lanes:
        parts += ["", f"{lane.name}:", *_timeline(lane.happenings)]
    if recording.acts:
        parts += ["", "really done while recording:"]
        parts += [
            f"  {words.duration(act.at):>6}  {act.action} {act.outcome} ({act.origin}): {act.message}"
            for act in recording.acts[:SHOWN]
        ]
    return "\n".join([*parts, "", *notes(lanes)])


def table(outcomes: Sequence[Outcome]) -> str:
    """The policies side by side."""
    rows: list[tuple[str, list[str]]] = [
        ("peak risk", [_number(o.peak) for o in outcomes]),
        ("at its threshold or above", [words.duration(o.at_risk_s) for o in outcomes]),
        ("pool full", [words.duration(o.full_s) for o in outcomes]),
        ("throttled", [words.duration(o.throttled_s) for o in outcomes]),
        ("first action after", [_seconds(o.first_action_s) for o in outcomes]),
        ("before the first preemption", [_seconds(o.lead_s) for o in outcomes]),
        ("actions", [_actions(o.actions) for o in outcomes]),
        ("effective / not", [f"{o.effective} / {o.ineffective}" for o in outcomes]),
        ("blocks freed", [f"{o.blocks_freed:,}" for o in outcomes]),
    ]
    return columns(["", *(o.name for o in outcomes)], [[name, *values] for name, values in rows])


def notes(lanes: Sequence[Lane]) -> list[str]:
    """What to know before believing it."""
    lines = []
    if any(lane.estimate for lane in lanes):
        lines.append(
            "note: what steps would have brought is estimated: evicted blocks are missing for as long as a sequence "
            "stays on average; whom a throttle would have kept out is not known, so it frees nothing here."
        )
    else:
        lines.append("note: readings are as recorded; they are taken to show the effect of what was really done.")
    lines.append("note: one engine, no cluster: steps that change the number of engines are not taken.")
    return lines


def as_dict(recording: Recording, lanes: Sequence[Lane]) -> dict[str, Any]:
    """For programs."""
    preempted = first_preemption(recording)
    return {
        "source": recording.source,
        "seconds": recording.seconds,
        "readings": len(recording.moments),
        "engine": recording.engine,
        "firstPreemptionSeconds": preempted,
        "recordedActions": [asdict(act) for act in recording.acts],
        "policies": [
            {
                **_camel(asdict(outcome(lane, preempted))),
                "effects": "estimated" if lane.estimate else "recorded",
                "happenings": [_camel(asdict(happening)) for happening in lane.happenings],
                "risk": [[round(point.at, 3), point.risk] for point in lane.points],
            }
            for lane in lanes
        ],
    }


def _timeline(happenings: Sequence[Happening]) -> list[str]:
    if not happenings:
        return ["  nothing to do"]
    lines = [
        f"  {words.duration(h.at):>6}  risk {_number(h.risk):>3}  {h.reason}: {h.message}" for h in happenings[:SHOWN]
    ]
    more = len(happenings) - SHOWN
    return [*lines, f"  … and {more} more"] if more > 0 else lines


def _actions(actions: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in actions.items()) or "none"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return words.duration(value) if value >= 0 else f"−{words.duration(-value)}"


def _camel(found: dict[str, Any]) -> dict[str, Any]:
    def name(key: str) -> str:
        first, *rest = key.removesuffix("_s").split("_")
        return first + "".join(part.title() for part in rest) + ("Seconds" if key.endswith("_s") else "")

    return {name(key): value for key, value in found.items()}
