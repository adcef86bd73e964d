"""Lanes as a timeline: risk and hot share of each policy, with what it did. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..svg import Chart, Curve, Mark, Panel, draw
from .data import Recording, first_preemption
from .lane import Lane

MARKS = 24


def picture(recording: Recording, lanes: Sequence[Lane]) -> str:
    """An SVG document."""
    threshold = lanes[0].service.spec.remediation.risk_threshold
    told = [(moment.at, moment.score) for moment in recording.moments]
    panels = [
        Panel(
            title=f"risk of {lane.name}, and what it did",
            curves=[
                Curve(name="risk", points=[(point.at, point.risk) for point in lane.points]),
                *([Curve(name="as recorded", points=told)] if any(score is not None for _, score in told) else []),
            ],
            marks=[
                Mark(at=h.at, text=h.action or h.reason, style=1)
                for h in lane.happenings
                if h.verdict in ("Act", "Propose", "Observe")
            ][:MARKS],
            limits=[(lane.service.spec.remediation.risk_threshold, "threshold")],
            low=0,
            high=100,
        )
        for lane in lanes
    ]
    preempted = first_preemption(recording)
    panels.append(
        Panel(
            title="share of the pool that running sequences hold, in percent",
            curves=[
                Curve(
                    name=lane.name,
                    points=[(point.at, None if point.hot is None else 100 * point.hot) for point in lane.points],
                )
                for lane in lanes
            ],
            marks=[] if preempted is None else [Mark(at=preempted, text="first preemption", style=3)],
            low=0,
            high=100,
        )
    )
    title = f"{recording.source}, risk from {threshold:g}" if len(lanes) == 1 else recording.source
    return draw(Chart(title=title, x_title="seconds", panels=panels))
