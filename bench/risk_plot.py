"""Plots as SVG, written directly: no plotting library is needed to record a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from risk_simulator import Point

    from ullage_agent.analysis import Findings

WIDTH, HEIGHT, MARGIN = 900, 320, 44
COLOURS = {"score": "#c62828", "usage %": "#1565c0", "running": "#2e7d32", "waiting": "#8e24aa"}


def plot_trace(
    path: Path, name: str, points: Sequence[Point], found: Sequence[tuple[float, Findings]], truth: float | None
) -> None:
    """Score, usage and queue of a recorded trace over time, with the alarm line and the true event."""
    states = [(point.at, point.reading.snapshot) for point in points if point.reading is not None]
    lines = {
        "score": [(at, findings.risk.score or 0.0) for at, findings in found],
        "usage %": [(at, 100.0 * (state.hot_blocks or 0) / (state.total_blocks or 1)) for at, state in states],
        "running": [(at, float(state.running or 0)) for at, state in states],
        "waiting": [(at, float(state.waiting or 0)) for at, state in states],
    }
    marks = [] if truth is None else [(truth, "first preemption")]
    path.write_text(svg(f"vLLM 0.32, {name} trace", lines, marks, 85.0))


def plot_tradeoff(
    path: Path, curve: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float, str]], chosen: str
) -> None:
    """Recall in per cent against false alarms an hour: the score at every alarm level as a curve, others as points."""
    right = float(math.ceil(max(x for x, _, _ in others)))
    inner_w, inner_h = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + inner_w * min(x, right) / right, MARGIN + inner_h * (1 - y / 100.0)

    title = "Recall (%) against false alarms an hour"
    chart = svg(title, {"score": [(right, -100.0)]}, (), None, unit="false alarms an hour")
    corners = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y, _ in curve if x <= right)
    marks = [f'<polyline points="{corners}" fill="none" stroke="#c62828" stroke-width="1.6"/>']
    here = [(x, y, f"score at {chosen}", "#c62828") for x, y, level in curve if level == chosen]
    for x, y, words, colour in (*here, *((x, y, words, "#1565c0") for x, y, words in others)):
        left, top = place(x, y)
        marks.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{colour}"/>')
        beside = top - 8 if words.startswith("score") else top + 12  # above its curve, the others below
        marks.append(f'<text x="{left + 7:.1f}" y="{beside:.1f}" fill="{colour}">{escape(words)}</text>')
    path.write_text(chart.replace("</svg>", "\n".join([*marks, "</svg>"])))


def svg(
    title: str,
    lines: dict[str, list[tuple[float, float]]],
    marks: Sequence[tuple[float, str]],
    level: float | None,
    *,
    top: float = 100.0,
    unit: str = "seconds",
) -> str:
    """A small chart: named lines over x, vertical marks, at most one horizontal level."""
    right = max(x for line in lines.values() for x, _ in line) or 1.0
    inner_w, inner_h = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(x: float, y: float) -> str:
        return f"{MARGIN + inner_w * x / right:.1f},{MARGIN + inner_h * (1 - min(top, y) / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        y = MARGIN + inner_h * (1 - value / top)
        parts.append(
            f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/><text x="8" y="{y + 4:.1f}">{value:g}</text>'
        )
    for value in ticks(right):
        x = MARGIN + inner_w * value / right
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 10}" text-anchor="end">{escape(unit)}</text>')
    if level is not None:
        y = float(place(0, level).split(",")[1])
        parts.append(f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="#c62828" stroke-dasharray="4 3"/>')
    for x, words in marks:
        at = float(place(x, 0).split(",")[0])
        parts.append(f'<path d="M{at} {MARGIN}V{HEIGHT - MARGIN}" stroke="black" stroke-dasharray="2 2"/>')
        parts.append(f'<text x="{at + 4}" y="{MARGIN - 6}">{escape(words)}</text>')
    palette = iter(["#c62828", "#1565c0", "#2e7d32", "#8e24aa", "#ef6c00"])
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS.get(name) or next(palette)
        corners = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{WIDTH - 420 + index * 90}" y="18" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(right: float) -> list[float]:
    """Round numbers from 0 to `right`, six to eleven of them."""
    unit = 10.0 ** math.floor(math.log10(right))
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0) if right <= 10 * unit * part)
    return [step * number for number in range(int(right / step + 1e-9) + 1)]
