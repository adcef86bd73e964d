"""Draws the curves of the risk terms as one SVG, from the constants in `ullage_agent.risk`.

python bench/risk_curves.py docs/risk_curves.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from ullage_agent import risk
from ullage_agent.curve import Curve

PANELS = (
    ("CHANCE_CURVE", "chance of exhaustion within half a minute", 1.0),
    ("FORECAST_CURVE", "seconds to exhaustion by growth", 600.0),
    ("UNLEARNED_CURVE", "hot share, no lengths learned: most points", 1.0),
    ("UNOPPOSED_CURVE", "the same, and nothing finishes", 1.0),
    ("PREEMPTION_CURVE", "preemptions per finished request", 1.2),
    ("RECOMPUTE_CURVE", "recomputed share of tokens", 0.6),
    ("DEVICE_CURVE", "free share of device memory", 0.1),
    ("HOST_CURVE", "used share of the limit", 1.0),
    ("PSI_CURVE", "share of time stalled (full)", 1.0),
    ("FIT_CURVE", "what may be asked for / room for it", 4.0),
)
WIDTH, HEIGHT, PAD, COLUMNS = 220, 150, 28, 4


def panel(column: int, row: int, name: str, title: str, right: float) -> str:
    curve: Curve = getattr(risk, name)
    points = [(0.0, curve[0][1]), *curve, (right, curve[-1][1])]
    inner_w, inner_h = WIDTH - 2 * PAD, HEIGHT - 2 * PAD
    corners = " ".join(
        f"{PAD + inner_w * min(x, right) / right:.1f},{PAD + inner_h * (1 - y / 100):.1f}" for x, y in points
    )
    alarm = PAD + inner_h * 0.15
    return (
        f'<g transform="translate({column * WIDTH},{row * HEIGHT})">'
        f'<rect x="{PAD}" y="{PAD}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#ccc"/>'
        f'<path d="M{PAD} {alarm:.1f}h{inner_w}" stroke="#c62828" stroke-dasharray="3 3"/>'
        f'<polyline points="{corners}" fill="none" stroke="#1565c0" stroke-width="2"/>'
        f'<text x="{PAD}" y="{PAD - 8}" font-size="11" font-weight="bold">{name.removesuffix("_CURVE").lower()}</text>'
        f'<text x="{PAD}" y="{HEIGHT - 6}" font-size="9">{title}</text>'
        f'<text x="{PAD - 4}" y="{PAD + 4}" font-size="9" text-anchor="end">100</text>'
        f'<text x="{PAD - 4}" y="{HEIGHT - PAD}" font-size="9" text-anchor="end">0</text>'
        f'<text x="{WIDTH - PAD}" y="{HEIGHT - PAD + 10}" font-size="9" text-anchor="end">{right:g}</text></g>'
    )


def draw() -> str:
    rows = -(-len(PANELS) // COLUMNS)
    parts = [panel(index % COLUMNS, index // COLUMNS, *found) for index, found in enumerate(PANELS)]
    size = f"0 0 {COLUMNS * WIDTH} {rows * HEIGHT}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
