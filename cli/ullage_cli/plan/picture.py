"""A plan as a picture: how many sequences fit, by context length, for every cache. Pure."""

from __future__ import annotations

from dataclasses import replace

from ..svg import Chart, Curve, Mark, Panel, draw
from .planning import Plan, make_plan

CONTEXTS = tuple(512 << power for power in range(9))


def picture(plan: Plan) -> str:
    """An SVG document."""
    request = plan.request
    plans = [
        make_plan(replace(request, load=replace(request.load, context=context, concurrency=None)))
        for context in CONTEXTS
    ]
    curves = [
        Curve(
            name=fit.cache.name,
            points=[(found.request.load.context, found.fits[index].sequences) for found in plans],
        )
        for index, fit in enumerate(plan.fits)
    ]
    inside = CONTEXTS[0] <= request.load.context <= CONTEXTS[-1]
    marks = [Mark(at=request.load.context, text=f"{request.load.context:,} tokens", style=5)] if inside else []
    asked = request.load.concurrency
    panel = Panel(
        title="sequences that fit at once",
        curves=curves,
        marks=marks,
        limits=[] if asked is None else [(asked, f"asked: {asked}")],
        log_y=True,
        low=1,
    )
    title = f"{plan.shape.name} on {request.machine.name}"
    return draw(Chart(title=title, x_title="tokens of a sequence", panels=[panel], log_x=True, ticks=CONTEXTS))
