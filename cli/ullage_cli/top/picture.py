"""The fleet drawn for a terminal, and as plain columns for a pipe. Pure.

Colours come from the Okabe-Ito palette and never carry a meaning alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .. import words
from ..exposition import AgentMetrics
from ..tables import columns
from ..view import ASCII, FREE, HOT, RECLAIMABLE, UNICODE, Glyphs
from .fleet import EngineRow, Fleet, Order, ServiceRow, Trail, ordered

STYLES = {"calm": "#56B4E9", "elevated": "#E69F00", "critical": "bold #D55E00", "unknown": "dim"}
BAR = 20
ACTION_ROWS = 5
PROBLEM_ROWS = 3
FRAME_ROWS = 4
"""Lines that are always there: the title, the header, the footer and the space above the actions."""
__all__ = ["ASCII", "UNICODE", "frame", "plain"]


def frame(
    fleet: Fleet, trail: Trail, *, order: Order, width: int, height: int, glyphs: Glyphs = UNICODE, keys: bool = True
) -> RenderableType:
    """One picture that fits the terminal; what does not fit is counted."""
    actions = fleet.actions[:ACTION_ROWS]
    problems = [f"{row.name}: {row.problem}" for service in fleet.services for row in service.engines if row.problem]
    problems = [*([fleet.problem] if fleet.problem else []), *problems][:PROBLEM_ROWS]
    room = max(3, height - FRAME_ROWS - len(problems) - (len(actions) + 1 if actions else 0))
    parts: list[RenderableType] = [_title(fleet, order)]
    lines = [line for service in ordered(fleet.services, order) for line in _lines(service, trail, glyphs)]
    shown = lines if len(lines) <= room else lines[: room - 1]
    parts.append(_services(shown, width))
    if len(shown) < len(lines):
        parts.append(Text(f" … and {len(lines) - len(shown)} more lines", style="dim"))
    if actions:
        parts += [Text(" remediations", style="bold"), _actions(fleet)]
    parts += [Text(f" ! {said}", style=STYLES["critical"], no_wrap=True, overflow="ellipsis") for said in problems]
    if keys:
        parts.append(Text(" q quit   s sort   space pause", style="dim", no_wrap=True))
    return Group(*parts)


def plain(fleet: Fleet, order: Order = "risk") -> str:
    """Columns: a line for each service and one for each of its engines."""
    header = ["SERVICE", "PHASE", "MODE", "READY", "RISK", "BY", "FULL IN", "HOT", "CACHED", "RUN", "WAIT"]
    rows: list[list[str]] = []
    problems: list[str] = []
    for service in ordered(fleet.services, order):
        name = f"{service.namespace}/{service.name}"
        risk = [_risk(service.risk), service.term or "–", _seconds(service.exhaustion_s)]
        rows.append([name, service.phase, service.mode, _ready(service), *risk, "", "", "", ""])
        rows += [[f"  {engine.name}", *_engine_cells(engine)] for engine in service.engines]
        problems += [f"! {engine.name}: {engine.problem}" for engine in service.engines if engine.problem]
    if not rows:
        return f"no services: {fleet.source}"
    lines = [columns(header, rows, left=3)]
    for row in fleet.actions[:ACTION_ROWS]:
        ago = words.duration(max(0.0, fleet.at - row.at))
        lines.append(f"{ago} ago  {row.phase}  {row.action} on {row.pod}: {row.message}")
    return "\n".join([*lines, *problems, *([f"! {fleet.problem}"] if fleet.problem else [])])


def _engine_cells(engine: EngineRow) -> list[str]:
    found = engine.metrics
    if found is None:
        return ["", "", "", "–", "–", "–", "–", "–", "–", "–"]
    shares = [_share(found.share("hot")), _share(found.share("reclaimable"))]
    figures = [_risk(found.risk), found.winner or "–", _seconds(found.exhaustion_s), *shares]
    return [found.liveness, "", "", *figures, _count(found.running), _count(found.waiting)]


def _title(fleet: Fleet, order: Order) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(" ullage top", style="bold")
    engines = sum(len(service.engines) for service in fleet.services)
    text.append(f"  {fleet.source}  {_many(len(fleet.services), 'service')}, {_many(engines, 'engine')}  by {order}")
    return text


def _services(lines: Sequence[Sequence[RenderableType]], width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False, show_edge=False)
    table.add_column("service", no_wrap=True, overflow="ellipsis", max_width=max(16, width - 74))
    table.add_column("ready", justify="right", no_wrap=True)
    table.add_column("risk", no_wrap=True, min_width=17)
    table.add_column("full in", justify="right", no_wrap=True)
    table.add_column("KV cache" if width >= 80 else "", no_wrap=True)
    table.add_column("run", justify="right", no_wrap=True)
    table.add_column("wait", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    if not lines:
        table.add_row(Text("no services here", style="dim"))
    return table


def _lines(service: ServiceRow, trail: Trail, glyphs: Glyphs) -> list[list[RenderableType]]:
    history = trail.risks.get((service.namespace, service.name), [])
    head: list[RenderableType] = [
        Text.assemble((f"{service.namespace}/{service.name}", "bold"), (f"  {service.phase}, {service.mode}", "dim")),
        _ready(service),
        _score(service.risk, service.term),
        _seconds(service.exhaustion_s),
        _spark(history, glyphs),
        "",
        "",
    ]
    return [head, *(_engine(row, glyphs) for row in service.engines)]


def _engine(row: EngineRow, glyphs: Glyphs) -> list[RenderableType]:
    found, name = row.metrics, Text(f"  {row.name}")
    if row.problem:
        name.append("  !", style=STYLES["critical"])
    if found is None:
        return [name, "", _score(None, ""), "–", "", "–", "–"]
    if found.limit_tokens is not None:
        name.append(f"  throttled at {found.limit_tokens:.0f}", style=STYLES["elevated"])
    return [
        name,
        "",
        _score(found.risk, found.winner),
        _seconds(found.exhaustion_s),
        pool_bar(found, glyphs, BAR),
        _count(found.running),
        _count(found.waiting),
    ]


def pool_bar(found: AgentMetrics, glyphs: Glyphs, width: int) -> Text:
    """The pool as one line: hot, reclaimable, free; parts that exist get at least one character."""
    hot, cached = found.share("hot"), found.share("reclaimable")
    if hot is None:
        return Text("–", style="dim")
    first = min(width, max(1, round(hot * width))) if hot > 0 else 0
    second = 0
    if cached:
        second = min(width - first, max(1, round(cached * width)))
    rest = width - first - second
    bar = Text.assemble((glyphs.hot * first, HOT), (glyphs.reclaimable * second, RECLAIMABLE))
    bar.append(glyphs.free * rest, style=FREE)
    return bar


def _actions(fleet: Fleet) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True, style="dim", min_width=9)
    table.add_column(no_wrap=True, min_width=11)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for row in fleet.actions[:ACTION_ROWS]:
        ago = f"{words.duration(max(0.0, fleet.at - row.at))} ago"
        table.add_row(ago, row.phase, f"{row.action} on {row.pod}: {row.message}")
    return table


def _score(risk: float | None, term: str) -> Text:
    word = words.risk_word(risk)
    return Text(f"{_risk(risk):>3} {word if not term or risk is None else term}", style=STYLES[word])


def _spark(risks: Sequence[float | None], glyphs: Glyphs) -> Text:
    text = Text(no_wrap=True)
    for risk in risks[-BAR:]:
        if risk is None:
            text.append(" ")
        else:
            step = min(len(glyphs.spark) - 1, int(risk / 100 * len(glyphs.spark)))
            text.append(glyphs.spark[step], style=STYLES[words.risk_word(risk)])
    return text


def _ready(service: ServiceRow) -> str:
    return f"{'–' if service.ready is None else service.ready}/{service.wanted}"


def _risk(risk: float | None) -> str:
    return "–" if risk is None else f"{risk:.0f}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else words.duration(seconds)


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _count(count: float | None) -> str:
    return "–" if count is None else f"{count:.0f}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
