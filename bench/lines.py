"""Line charts as SVG, written directly, as `bars` does for bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bars import text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BASE = 420, 300, 46, 190, 56, 250
COLOURS = (
    "#1565c0", "#c62828", "#2e7d32", "#ef6c00", "#6a1b9a", "#00838f", "#5d4037", "#ad1457", "#827717", "#455a64",
    "#000000",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over common points of x; y from 0 to `top`, what lies above is cut off, and NaN is left out."""

    title: str
    ticks: Sequence[str]
    """Labels of the points of x, evenly spaced."""
    lines: Mapping[str, Sequence[float]]
    dashed: frozenset[str] = frozenset()
    top: float = 1.0


def svg(*rows: tuple[str, Sequence[Chart]]) -> str:
    """Rows of charts side by side, each under a title."""
    width = (WIDTH + RIGHT) * max(len(charts) for _, charts in rows)
    height = HEIGHT * len(rows)
    parts = [
        f'<clipPath id="plot"><rect x="0" y="{TOP - 2}" width="{WIDTH}" height="{BASE - TOP + 8}"/></clipPath>',
    ]
    for at, (title, charts) in enumerate(rows):
        parts += [f'<g transform="translate(0 {at * HEIGHT})">', text(width / 2, 20, title, size=15, anchor="middle")]
        for index, chart in enumerate(charts):
            parts += [f'<g transform="translate({index * (WIDTH + RIGHT)} 0)">', *_chart(chart), "</g>"]
        parts.append("</g>")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _chart(chart: Chart) -> list[str]:
    step = (WIDTH - LEFT - 20) / max(1, len(chart.ticks) - 1)
    xs = [LEFT + i * step for i in range(len(chart.ticks))]
    parts = [text((LEFT + WIDTH) / 2, 42, chart.title, size=12, anchor="middle")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{xs[0]:.1f}" y1="{_y(share):.1f}" x2="{xs[-1]:.1f}" y2="{_y(share):.1f}" stroke="#ddd"/>'
        )
        parts.append(text(xs[0] - 6, _y(share) + 4, f"{share * chart.top:g}", size=10, anchor="end"))
    parts += [text(x, BASE + 18, tick, size=11, anchor="middle") for x, tick in zip(xs, chart.ticks, strict=True)]
    for index, (name, values) in enumerate(chart.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        style = f'stroke="{colour}" stroke-width="2"' + (' stroke-dasharray="5 4"' if name in chart.dashed else "")
        there = [(x, value) for x, value in zip(xs, values, strict=True) if not math.isnan(value)]
        points = " ".join(f"{x:.1f},{_y(value / chart.top):.1f}" for x, value in there)
        parts.append(f'<polyline points="{points}" fill="none" clip-path="url(#plot)" {style}/>')
        x, at = xs[-1] + 14, TOP + 14 + 16 * index
        parts.append(f'<line x1="{x:.1f}" y1="{at - 4}" x2="{x + 20:.1f}" y2="{at - 4}" {style}/>')
        parts.append(text(xs[-1] + 40, at, name, size=11, anchor="start"))
    return parts


def _y(share: float) -> float:
    return BASE - (BASE - TOP) * share
