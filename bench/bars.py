"""Bar charts as SVG, written directly: no plotting library is needed to record a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL, HEIGHT, TOP, BASE = 260, 240, 56, 200
COLOUR = "#1565c0"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a bar for each label, from zero."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float]]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side."""
    width = PANEL * len(panels)
    parts = [text(width / 2, 20, title, size=15, anchor="middle")]
    for index, panel in enumerate(panels):
        parts += _panel(panel, index * PANEL)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        f'font-family="sans-serif">\n<rect width="{width}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, left: int) -> list[str]:
    highest = max(value for _, value in panel.bars) or 1.0
    step = (PANEL - 60) / len(panel.bars)
    parts = [text(left + PANEL / 2, 42, f"{panel.title} ({panel.unit})", size=12, anchor="middle")]
    for index, (label, value) in enumerate(panel.bars):
        x, height = left + 30 + index * step, (BASE - TOP - 16) * value / highest
        middle = x + step / 2
        parts += [
            f'<rect x="{x + step * 0.15:.1f}" y="{BASE - height:.1f}" width="{step * 0.7:.1f}" '
            f'height="{height:.1f}" fill="{COLOUR}"/>',
            text(middle, BASE - height - 4, f"{value:.3g}", size=11, anchor="middle"),
            text(middle, BASE + 16, label, size=11, anchor="middle"),
        ]
    parts.append(f'<line x1="{left + 24}" y1="{BASE}" x2="{left + PANEL - 24}" y2="{BASE}" stroke="#444"/>')
    return parts


def text(x: float, y: float, words: str, *, size: int, anchor: str) -> str:
    """One line of text at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
