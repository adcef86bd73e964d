"""The live view: what the board knows, drawn for a terminal of 80x24 or more.

Drawing only: `frame` is a pure function of the board. Colours come from the Okabe-Ito palette and never
carry a meaning alone: every state also has its own character or word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import words
from .board import HISTORY_S, Board, Happening, Reading, Stage

HOT, RECLAIMABLE, FREE = "#D55E00", "#56B4E9", "#999999"
_SEVERITY = {"calm": "#56B4E9", "elevated": "#E69F00", "critical": "bold #D55E00", "unknown": "dim"}
_STAGE_STYLE: dict[Stage, str] = {"effective": "#56B4E9", "not effective": "#E69F00", "failed": "bold #D55E00"}
_REMEDIATION_ROWS = 7
_READING_HOLDS_S = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Characters of the bars; the second set is for terminals without Unicode."""

    hot: str = "█"
    reclaimable: str = "▒"
    free: str = "·"
    spark: str = "▁▂▃▄▅▆▇█"


UNICODE = Glyphs()
ASCII = Glyphs(hot="#", reclaimable="=", free=".", spark="_.:-=+*#")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Requests as the load counted them; without a load as the engines did (failed ones: not known)."""

    ok: int | None
    failed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything one frame shows beside the board."""

    service: str
    model: str
    url: str
    replicas: int
    elapsed_s: float
    phase: str
    """Phase of the load, or what is being waited for."""
    counts: Counts
    threshold: float
    """Risk from which the policy acts."""


def frame(board: Board, scene: Scene, glyphs: Glyphs = UNICODE, width: int = 80) -> RenderableType:
    """One picture of at most 23 lines."""
    inner = max(40, width - 4)
    reading = board.reading or Reading(at=0.0, terms={})
    return Group(
        _title(scene),
        _panel("KV cache", _memory(reading, glyphs, inner), _pool_size(reading)),
        _panel("risk", _risk(board, reading, scene, glyphs, inner), f"acts from {scene.threshold:g}"),
        _panel("requests", _requests(board, reading, scene), scene.phase),
        _panel("remediations", _remediations(board.happenings, reading.at), _remedy_count(board)),
    )


def _title(scene: Scene) -> Text:
    plural = "" if scene.replicas == 1 else "s"
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {scene.service}", style="bold")
    text.append(f"  {scene.model} at {scene.url}/v1  {scene.replicas} replica{plural}  ")
    text.append(words.duration(scene.elapsed_s), style="bold")
    return text


def _panel(title: str, body: RenderableType, note: str) -> Panel:
    return Panel(
        body,
        title=title,
        title_align="left",
        subtitle=Text(note, style="dim") if note else None,
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="dim",
    )


def _pool_size(reading: Reading) -> str:
    if reading.total is None or reading.block_bytes is None or reading.block_tokens is None:
        return "no reading yet"
    size = words.mebibytes(reading.total * reading.block_bytes)
    return f"{reading.total} blocks of {reading.block_tokens} tokens, {size}"


def _memory(reading: Reading, glyphs: Glyphs, width: int) -> RenderableType:
    fragmentation = Text.assemble(
        ("fragmentation   ", "dim"),
        f"external {words.ratio(reading.external)}   internal {words.ratio(reading.internal)}   ",
        f"allocator {words.ratio(reading.allocator)}",
    )
    return Group(usage_bar(reading, glyphs, width), _legend(reading, glyphs), fragmentation)


def usage_bar(reading: Reading, glyphs: Glyphs, width: int) -> Text:
    """The pool as one line: hot, reclaimable, free. Parts that exist get at least one character."""
    if not reading.total or reading.hot is None or reading.reclaimable is None:
        return Text("no reading yet", style="dim")
    parts = (reading.hot, reading.reclaimable, reading.total - reading.hot - reading.reclaimable)
    hot, reclaimable, free = _cells(parts, width)
    return Text.assemble(
        (glyphs.hot * hot, HOT), (glyphs.reclaimable * reclaimable, RECLAIMABLE), (glyphs.free * free, FREE)
    )


def _cells(parts: Sequence[int], width: int) -> list[int]:
    """Split `width` in proportion to `parts`; each part above 0 gets at least one, the largest gives."""
    whole = sum(parts)
    cells = [max(1, width * part // whole) if part > 0 else 0 for part in parts]
    cells[max(range(len(parts)), key=lambda index: parts[index])] += width - sum(cells)
    return cells


def _legend(reading: Reading, glyphs: Glyphs) -> Text:
    def share(part: int | None) -> str:
        if part is None or not reading.total:
            return "–"
        return f"{part} ({100 * part / reading.total:.0f} %)"

    return Text.assemble(
        (glyphs.hot, HOT),
        f" hot {share(reading.hot)}   ",
        (glyphs.reclaimable, RECLAIMABLE),
        f" reclaimable {share(reading.reclaimable)}   ",
        (glyphs.free, FREE),
        f" free {share(reading.free)}",
    )


def _risk(board: Board, reading: Reading, scene: Scene, glyphs: Glyphs, width: int) -> RenderableType:
    word = words.risk_word(reading.risk)
    score = "–" if reading.risk is None else f"{reading.risk:.0f}"
    head = Text.assemble(
        (f"{score:>3} {word}", _SEVERITY[word]),
        f" by {reading.winner}" if reading.winner else "",
        f" on {reading.worst}" if reading.worst and scene.replicas > 1 else "",
        f"   peak {board.peak:.0f}" if board.peak is not None else "",
        f"   {words.exhaustion(reading.exhaustion_s)}",
    )
    head.no_wrap, head.overflow = True, "ellipsis"
    line = sparkline(board.risks, reading.at, glyphs, min(HISTORY_S, width - 14))
    terms = "   ".join(f"{name} {value:.0f}" for name, value in sorted(reading.terms.items()))
    rows: list[RenderableType] = [head, Text.assemble(("last minute   ", "dim"), line)]
    rows.append(Text.assemble(("terms         ", "dim"), terms or "–"))
    if reading.errors:
        rows[-1] = Text(f"! {reading.errors[0]}", style=_SEVERITY["critical"], no_wrap=True, overflow="ellipsis")
    return Group(*rows)


def sparkline(risks: Sequence[tuple[float, float | None]], now: float, glyphs: Glyphs, width: int) -> Text:
    """Greatest risk of each second of the last minute, oldest first; a blank where nothing was known."""
    seconds: list[float | None] = [None] * HISTORY_S
    for at, risk in risks:
        if risk is None:
            continue
        last = HISTORY_S - 1 - int(now - at)
        # A reading stands for the seconds after it too, until the next one should have come.
        for second in range(max(0, last), min(HISTORY_S, last + _READING_HOLDS_S)):
            seconds[second] = risk if second > last else max(risk, seconds[second] or 0.0)
    text = Text(no_wrap=True)
    for risk in seconds[-width:]:
        if risk is None:
            text.append(" ")
        else:
            step = min(len(glyphs.spark) - 1, int(risk / 100 * len(glyphs.spark)))
            text.append(glyphs.spark[step], style=_SEVERITY[words.risk_word(risk)])
    return text


def _requests(board: Board, reading: Reading, scene: Scene) -> Text:
    failed = scene.counts.failed
    return Text.assemble(
        f"running {words.number(reading.running)}   waiting {words.number(reading.waiting)}   ",
        f"ok {words.number(scene.counts.ok)}   ",
        (f"failed {words.number(failed)}", _SEVERITY["critical"] if failed else ""),
        f"   {board.tokens_per_s():.1f} tokens/s",
    )


def _remedy_count(board: Board) -> str:
    if not board.remediations:
        return "none yet"
    return f"{len(board.remediations)} decided, {board.settled} ended"


def _remediations(happenings: Sequence[Happening], now: float) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True, style="dim", min_width=9)
    table.add_column(no_wrap=True, min_width=13)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for happening in happenings[-_REMEDIATION_ROWS:]:
        table.add_row(
            f"{words.duration(now - happening.at)} ago",
            Text(happening.stage, style=_STAGE_STYLE.get(happening.stage, "")),
            words.describe(happening),
        )
    for _ in range(_REMEDIATION_ROWS - len(happenings)):
        table.add_row("", "", "")
    return table


def plain_line(board: Board, scene: Scene) -> str:
    """The frame's essence in one line, for logs and pipes."""
    reading = board.reading or Reading(at=0.0, terms={})
    kinds = (reading.external, reading.internal, reading.allocator)
    score = "–" if reading.risk is None else f"{reading.risk:.0f}"
    by = f" ({reading.winner})" if reading.winner else ""
    return (
        f"{words.duration(scene.elapsed_s):>6}  {scene.phase}: risk {score}{by}"
        f"  kv hot {words.number(reading.hot)} reclaimable {words.number(reading.reclaimable)}"
        f" free {words.number(reading.free)} of {words.number(reading.total)}"
        f"  frag {'/'.join(words.ratio(kind) for kind in kinds)}"
        f"  run {words.number(reading.running)} wait {words.number(reading.waiting)}"
        f" ok {words.number(scene.counts.ok)} failed {words.number(scene.counts.failed)}"
        f"  {board.tokens_per_s():.1f} tok/s"
    )
