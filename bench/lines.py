"""Line charts as SVG, written directly, as `bars` does for bars."""

from __future__ import annotations

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
    """Lines over common points of x; y from 0 to 1."""

    title: str
    ticks: Sequence[str]
    """Labels of the points of x, evenly spaced."""
    lines: Mapping[str, Sequence[float]]
    dashed: frozenset[str] = frozenset()


def svg(title: str, charts: Sequence[Chart]) -> str:
    """The charts side by side."""
    width = (WIDTH + RIGHT) * len(charts)
    parts = [text(width / 2, 20, title, size=15, anchor="middle")]
    for index, chart in enumerate(charts):
        parts += _chart(chart, index * (WIDTH + RIGHT))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        f'font-family="sans-serif">\n<rect width="{width}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _chart(chart: Chart, left: int) -> list[str]:
    step = (WIDTH - LEFT - 20) / max(1, len(chart.ticks) - 1)
    xs = [left + LEFT + i * step for i in range(len(chart.ticks))]
    parts = [text(left + (LEFT + WIDTH) / 2, 42, chart.title, size=12, anchor="middle")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{xs[0]:.1f}" y1="{_y(share):.1f}" x2="{xs[-1]:.1f}" y2="{_y(share):.1f}" stroke="#ddd"/>'
        )
        parts.append(text(xs[0] - 6, _y(share) + 4, f"{share:g}", size=10, anchor="end"))
    parts += [text(x, BASE + 18, tick, size=11, anchor="middle") for x, tick in zip(xs, chart.ticks, strict=True)]
    for index, (name, values) in enumerate(chart.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        style = f'stroke="{colour}" stroke-width="2"' + (' stroke-dasharray="5 4"' if name in chart.dashed else "")
        points = " ".join(f"{x:.1f},{_y(value):.1f}" for x, value in zip(xs, values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        x, at = xs[-1] + 14, TOP + 14 + 16 * index
        parts.append(f'<line x1="{x:.1f}" y1="{at - 4}" x2="{x + 20:.1f}" y2="{at - 4}" {style}/>')
        parts.append(text(xs[-1] + 40, at, name, size=11, anchor="start"))
    return parts


def _y(share: float) -> float:
    return BASE - (BASE - TOP) * min(1.0, max(0.0, share))
