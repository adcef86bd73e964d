"""A dashboard drawn as SVG from what its queries answer: a picture for the docs, made where no Grafana is.

Panels stand where Grafana would put them, with its titles; series, numbers and tables are the answers. Nothing is made
up: a panel without data says so. Non-goal: Grafana's looks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import boards
from stack import Prometheus

COLUMN, ROW = 46, 24
"""Pixels of Grafana's grid."""
MARGIN = 6
LEFT, RIGHT = 46, 40
"""Room for the figures of both axes."""
NAMED = 6
"""Series whose names find room."""
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#e02f44", "#37c2c2", "#c4a484")
INK, DIM, PAPER, CARD, GRID = "#d8d9da", "#8e8e93", "#111217", "#1a1c22", "#2c2f36"
Series = tuple[str, list[tuple[float, float]]]
Size = tuple[int, int]
Span = tuple[float, float]


def draw(prometheus: Prometheus, board: Path) -> str:
    """The picture of a board with all variables at All, over the time since Prometheus began."""
    content = boards.load(board)
    panels = list(content["panels"])
    span = prometheus.began, time.time()
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) * ROW + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{24 * COLUMN}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        f'<text x="{MARGIN}" y="20" font-size="15">{escape(content["title"])}</text>',
    ]
    for panel in panels:
        parts += _panel(prometheus, panel, span)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(prometheus: Prometheus, panel: dict[str, Any], span: Span) -> Iterator[str]:
    place = panel["gridPos"]
    x, y = place["x"] * COLUMN + MARGIN, place["y"] * ROW + 30
    width, height = place["w"] * COLUMN - 2 * MARGIN, place["h"] * ROW - MARGIN
    if panel["type"] == "row":
        yield f'<text x="{x}" y="{y + 17}" font-size="13" fill="{DIM}">{escape(panel["title"])}</text>'
        return
    yield f'<g transform="translate({x},{y})"><rect width="{width}" height="{height}" rx="3" fill="{CARD}"/>'
    yield f'<text x="8" y="16">{escape(panel["title"])}</text>'
    found = list(_series(prometheus, panel, span[1]))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if not found:
        yield f'<text x="8" y="{height / 2}" fill="{DIM}">no data</text>'
    elif panel["type"] == "timeseries":
        yield from _lines(found, unit, (width, height), span, _right(panel))
    elif panel["type"] == "heatmap":
        yield from _cells(found, (width, height), span)
    else:
        yield from _numbers(found, unit, width, height)
    yield "</g>"


def _series(prometheus: Prometheus, panel: dict[str, Any], until: float) -> Iterator[Series]:
    for target in panel["targets"]:
        for one in prometheus.over_time(boards.fill(target["expr"], {}), until=until):
            points = [(float(t), float(v)) for t, v in one["values"]]
            finite = [(t, v) for t, v in points if math.isfinite(v)]
            if finite:
                yield _legend(target["legendFormat"], one["metric"]), finite


def _legend(pattern: str, labels: dict[str, str]) -> str:
    text = pattern
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    names = " ".join(value for name, value in sorted(labels.items()) if name not in ("__name__", "instance"))
    text = text if "{{" in pattern or not names else f"{names} {text}"
    return " ".join(re.sub(r"{{\w+}}/?", "", text).split())


def _right(panel: dict[str, Any]) -> str | None:
    overrides = panel["fieldConfig"].get("overrides") or []
    matchers = [o["matcher"]["options"] for o in overrides if o["matcher"]["id"] == "byRegexp"]
    return str(matchers[0]).rstrip(".*") if matchers else None


def _lines(found: list[Series], unit: str, size: Size, span: Span, right: str | None) -> Iterator[str]:
    ordered = sorted(found, key=lambda series: bool(right and series[0].startswith(right)))
    sides = [bool(right and name.startswith(right)) for name, _ in ordered]
    for side in sorted(set(sides)):
        members = [series for series, at in zip(ordered, sides, strict=True) if at is side]
        highest = max(v for _, points in members for _, v in points) or 1.0
        yield from _scale(highest, "short" if side else unit, size, right=side)
        for name, points in members:
            index = ordered.index((name, points))
            ink = COLOURS[index % len(COLOURS)]
            steps = " ".join(f"{_across(t, size, span):.1f},{_up(v / highest, size):.1f}" for t, v in points)
            yield f'<polyline fill="none" stroke="{ink}" points="{steps}"/>'
            if index < NAMED:
                at = LEFT + index * (size[0] - LEFT) / NAMED
                yield f'<text x="{at:.0f}" y="{size[1] - 8}" fill="{ink}" font-size="9">{escape(name[:17])}</text>'


def _cells(found: list[Series], size: Size, span: Span) -> Iterator[str]:
    """Buckets as rows of cells, the darker the fewer; `le` is the upper edge, so a bucket is it less the one below."""
    rows = sorted(((float(name), dict(points)) for name, points in found), key=lambda row: row[0])
    below: dict[float, float] = {}
    cells: list[tuple[int, float, float]] = []
    for index, (_, points) in enumerate(rows):
        cells += [(index, t, v - below.get(t, 0.0)) for t, v in points.items()]
        below = points
    highest = max(v for _, _, v in cells) or 1.0
    tall = (_up(0.0, size) - _up(1.0, size)) / len(rows)
    for index, t, v in cells:
        if v > 0:
            at = f'x="{_across(t, size, span):.1f}" y="{_up(0.0, size) - (index + 1) * tall:.1f}"'
            yield f'<rect {at} width="4" height="{tall:.1f}" fill="{COLOURS[3]}" fill-opacity="{v / highest:.2f}"/>'
    for index in range(0, len(rows), 4):
        label = f'x="{LEFT - 4}" y="{_up(0.0, size) - index * tall:.0f}"'
        yield f'<text {label} text-anchor="end" fill="{DIM}" font-size="9">{rows[index][0]:g} s</text>'


def _scale(highest: float, unit: str, size: Size, *, right: bool) -> Iterator[str]:
    for fraction in (0.0, 0.5, 1.0):
        level = _up(fraction, size)
        at, anchor = (size[0] - 4, "end") if right else (LEFT - 4, "end")
        text = f'x="{at}" y="{level + 3:.0f}" text-anchor="{anchor}" fill="{DIM}" font-size="9"'
        yield f"<text {text}>{_say(highest * fraction, unit)}</text>"
        if not right:
            yield f'<path d="M{LEFT} {level:.0f}H{size[0] - RIGHT}" stroke="{GRID}"/>'


def _across(time: float, size: Size, span: Span) -> float:
    return LEFT + (time - span[0]) / (span[1] - span[0]) * (size[0] - RIGHT - LEFT)


def _up(fraction: float, size: Size) -> float:
    return size[1] - 30 - max(0.0, fraction) * (size[1] - 56)


def _numbers(found: list[Series], unit: str, width: int, height: int) -> Iterator[str]:
    room = max(1, (height - 30) // 20)
    for index, (name, points) in enumerate(found[:room]):
        y = 42 + index * 20
        yield f'<text x="8" y="{y}" fill="{DIM}">{escape(name[:60])}</text>'
        yield f'<text x="{width - 8}" y="{y}" text-anchor="end" font-size="14">{_say(points[-1][1], unit)}</text>'


def _say(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    if unit in ("bytes", "Bps"):
        return f"{value / 1e6:.1f} MB" + ("/s" if unit == "Bps" else "")
    suffix = {"s": " s", "reqps": "/s", "ops": "/s"}.get(unit, "")
    return f"{value:.3g}{suffix}"
