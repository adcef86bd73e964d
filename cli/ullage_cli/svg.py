"""Line charts as SVG, written directly: a picture of a few curves needs no plotting library.

Colours come from the Okabe-Ito palette; each curve also has its own dash pattern and its name at its end, so none is
told apart by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 760, 70, 150
TITLE, PANEL, GAP, FOOT = 34, 190, 46, 30
STYLES = (
    ("#0072B2", ""),
    ("#D55E00", "7 3"),
    ("#009E73", "2 3"),
    ("#CC79A7", "9 3 2 3"),
    ("#E69F00", "4 2"),
    ("#56B4E9", "1 2"),
)
INK = "#444444"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points from left to right; a None breaks the line."""

    name: str
    points: Sequence[tuple[float, float | None]]
    steps: bool = False
    """Hold each value until the next, as a setting does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line with a word beside it."""

    at: float
    text: str
    style: int = 0
    """Which curve's style it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart above its x axis."""

    title: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines."""
    low: float | None = None
    high: float | None = None
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels one below the other over one x axis."""

    title: str
    x_title: str
    panels: Sequence[Panel]
    log_x: bool = False
    ticks: Sequence[float] = field(default_factory=tuple)
    """Of the x axis; none: chosen."""


def draw(chart: Chart) -> str:
    """The chart as one SVG document."""
    height = TITLE + len(chart.panels) * (PANEL + GAP) + FOOT
    xs = [x for panel in chart.panels for curve in panel.curves for x, _ in curve.points]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    across = _scale(low, high, LEFT, WIDTH - RIGHT, log=chart.log_x)
    parts = [_text(LEFT, 20, chart.title, size=15)]
    for index, panel in enumerate(chart.panels):
        parts += _panel(panel, TITLE + index * (PANEL + GAP) + 18, across, (low, high))
    bottom = TITLE + len(chart.panels) * (PANEL + GAP) - GAP + 18
    for tick in chart.ticks or ticks(low, high):
        parts.append(_text(across(tick), bottom + 16, short(tick), anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, chart.x_title, anchor="middle"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif">\n<title>{escape(chart.title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / 6
    unit = 10 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """`2048` as `2k`, `0.25`, `1.5M`."""
    for limit, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= limit and value % limit == 0:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


Place = Callable[[float], float]


def _scale(low: float, high: float, start: float, end: float, *, log: bool) -> Place:
    def place(value: float) -> float:
        if log:
            share = math.log(max(value, low) / low) / math.log(high / low) if high > low > 0 else 0.0
        else:
            share = (value - low) / (high - low) if high > low else 0.0
        return start + share * (end - start)

    return place


def _panel(panel: Panel, top: float, across: Place, ends: tuple[float, float]) -> list[str]:
    bottom = top + PANEL
    values = [y for curve in panel.curves for _, y in curve.points if y is not None and (y > 0 or not panel.log_y)]
    low = panel.low if panel.low is not None else min(values, default=0.0)
    high = panel.high if panel.high is not None else max(values, default=1.0)
    high = high if high > low else low + 1.0
    up = _scale(low, high, bottom, top, log=panel.log_y)
    left, right = across(ends[0]), across(ends[1])
    parts = [_text(LEFT, top - 6, panel.title, size=12)]
    for tick in _decades(low, high) if panel.log_y else ticks(low, high):
        parts.append(_line(left, up(tick), right, up(tick), "#dddddd"))
        parts.append(_text(LEFT - 6, up(tick) + 4, short(tick), anchor="end"))
    for value, name in panel.limits:
        parts.append(_line(left, up(value), right, up(value), INK, "3 3"))
        parts.append(_text(right + 4, up(value) + 4, name, size=10))
    parts.append(_line(left, bottom, right, bottom, INK))
    parts += _marks(panel.marks, top, bottom, across)
    parts += _curves(panel.curves, across, up, (top, bottom), log_y=panel.log_y)
    return parts


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(max(low, 1e-12))), math.ceil(math.log10(max(high, 1e-12)))
    return [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]


def _marks(marks: Sequence[Mark], top: float, bottom: float, across: Place) -> list[str]:
    parts = []
    for index, mark in enumerate(marks):
        colour, dash = STYLES[mark.style % len(STYLES)]
        parts.append(_line(across(mark.at), top, across(mark.at), bottom, colour, dash))
        parts.append(_text(across(mark.at) + 3, top + 10 + 11 * (index % 6), mark.text, size=10, colour=colour))
    return parts


def _curves(curves: Sequence[Curve], across: Place, up: Place, box: tuple[float, float], *, log_y: bool) -> list[str]:
    parts: list[str] = []
    taken: list[float] = []
    for index, curve in enumerate(curves):
        colour, dash = STYLES[index % len(STYLES)]
        points = [(x, y if y is None or not log_y or y > 0 else None) for x, y in curve.points]
        path = _path(points, across, up, steps=curve.steps)
        if not path:
            continue
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{pattern}/>')
        x, y = next((x, y) for x, y in reversed(points) if y is not None)
        at = up(y) + 4
        while any(abs(at - other) < 12 for other in taken):
            at += 12 if at < (box[0] + box[1]) / 2 else -12
        taken.append(at)
        parts.append(_text(max(across(x), WIDTH - RIGHT) + 6, at, curve.name, size=11, colour=colour))
    return parts


def _path(points: Sequence[tuple[float, float | None]], across: Place, up: Place, *, steps: bool) -> str:
    words: list[str] = []
    pen_down = False
    for x, y in points:
        if y is None:
            pen_down = False
            continue
        if steps and pen_down:
            words.append(f"H{across(x):.1f}")
        words.append(f"{'L' if pen_down else 'M'}{across(x):.1f} {up(y):.1f}")
        pen_down = True
    return " ".join(words)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{pattern}/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
