"""The pictures of the concepts page: plain SVG out of boxes, arrows and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from ullage_cli.plan.asking import Asked, request_of
from ullage_cli.plan.picture import picture
from ullage_cli.plan.planning import make_plan

HOT, CACHED, FREE, INK = "#D55E00", "#56B4E9", "#ffffff", "#333333"
"""Okabe-Ito; every use has its word beside it."""


def document(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">\n<title>{escape(title)}</title>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def box(x: float, y: float, width: float, height: float, text: str = "", fill: str = "#f2f2f2", ink: str = INK) -> str:
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{INK}"/>']
    lines = text.split("\n") if text else []
    for index, line in enumerate(lines):
        at = y + height / 2 + 4 + 15 * (index - (len(lines) - 1) / 2)
        parts.append(label(x + width / 2, at, line, ink=ink, bold=index == 0 and len(lines) > 1))
    return "\n".join(parts)


def label(x: float, y: float, text: str, anchor: str = "middle", ink: str = INK, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="12" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(text)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, text: str = "", dash: str = "") -> str:
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}"{pattern} marker-end="url(#tip)"/>'
    return line if not text else f"{line}\n{label((x1 + x2) / 2, (y1 + y2) / 2 - 5, text)}"


def pool() -> str:
    """What the pool holds, and what of it is pressure."""
    parts, states = [], "HHHHHHCCHHHHCFFCHHCFFFHHCF"
    for index, state in enumerate(states):
        fill = {"H": HOT, "C": CACHED, "F": FREE}[state]
        parts.append(box(20 + index * 24, 30, 22, 30, fill=fill))
        parts.append(label(31 + index * 24, 50, state, ink="#ffffff" if state == "H" else INK))
    parts.append(label(20, 20, "a pool of 26 blocks; each holds 16 tokens of all layers and heads", "start"))
    rows = ((HOT, "H hot", "held by running sequences: the real pressure"),
            (CACHED, "C cached", "kept for prefix reuse only: gives way at once, so it is supply"),
            (FREE, "F free", "unused; the longest run of free blocks is 3"))  # fmt: skip
    for index, (fill, name, meaning) in enumerate(rows):
        y = 82 + index * 22
        parts += [box(20, y, 14, 14, fill=fill), label(42, y + 12, name, "start", bold=True)]
        parts.append(label(120, y + 12, meaning, "start"))
    return document(664, 156, "A pool of KV cache blocks by state", parts)


def loop() -> str:
    """Who talks to whom."""
    parts = [
        box(20, 30, 300, 190, fill="#fafafa"),
        label(170, 48, "pod of an engine", bold=True),
        box(40, 64, 120, 56, "engine\n:8000 OpenAI API"),
        box(180, 64, 120, 56, "agent\nrisk 0 to 100"),
        arrow(180, 92, 162, 92),
        label(40, 150, "reads once a second,", "start"),
        label(40, 166, "acts through a socket", "start"),
        label(40, 182, "of the pod's own", "start"),
        box(180, 134, 120, 32, ":9401 TLS, token"),
        box(180, 178, 120, 32, ":9400 metrics"),
        box(440, 64, 150, 56, "operator\ngather, decide, apply"),
        arrow(438, 96, 302, 146),
        label(352, 104, "reports, actions"),
        box(420, 176, 190, 36, "Prometheus, Alertmanager"),
        arrow(418, 194, 302, 194),
        arrow(515, 174, 515, 122),
        label(522, 152, "alerts", "start"),
        box(670, 30, 180, 46, "InferenceService\nwhat is wanted"),
        box(670, 92, 180, 46, "Remediation\nwhat was done, and why"),
        arrow(592, 82, 668, 56),
        arrow(592, 102, 668, 112),
    ]
    return document(870, 236, "Engine, agent and operator", parts)


def ladder() -> str:
    """The steps of remedy."""
    steps = (
        ("evict", "drop the coldest blocks"),
        ("compact", "join the free blocks"),
        ("throttle", "refuse long prompts"),
        ("scale up", "one engine more"),
    )
    told = (
        "Risk at the threshold: the first step that can be had.",
        "Its effect is measured; the next step only if it had none.",
    )
    parts = [label(20, 30 + 17 * index, line, "start") for index, line in enumerate(told)]
    for index, (name, meaning) in enumerate(steps):
        x, y = 20 + index * 200, 150 - index * 42
        parts.append(box(x, y, 160, 48, f"{name}\n{meaning}"))
        if index:
            parts.append(arrow(x - 38, y + 58, x - 2, y + 32))
    return document(800, 216, "The ladder of remedies", parts)


def plan() -> str:
    """What fits, by context length: the picture that `ullage plan --plot` draws."""
    return picture(make_plan(request_of(Asked(model="llama-3-8b", gpu="A100-80GB"), measured=False)))


PICTURES: dict[str, Callable[[], str]] = {"pool": pool, "loop": loop, "ladder": ladder, "plan": plan}
