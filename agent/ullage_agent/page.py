"""The page at `/`: block map, risk and its terms over a quarter of an hour, last actions. For a person with a phone.

One HTML file without a build step and without any request to elsewhere, and one JSON route that it polls. Shows
nothing that `/metrics` does not say in other words, except the actions' reasons.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from aiohttp import web

from ullage_agent.adapters.base import EngineAdapter, HasBlockMap
from ullage_agent.board import Board
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineError
from ullage_agent.history import History, ScorePoint
from ullage_agent.wire import RiskReport, Snapshot

log = logging.getLogger(__name__)

MAX_CELLS = 2048
"""A phone can't show more; each cell then stands for several blocks."""
MAP_AGE_S = 1.0
"""The engine is asked for its map at most this often, however many look."""
MAX_CHART_POINTS = 300
RANKING = "SLAUCF"
"""Of several blocks in one cell the first of these is shown: what is rare, then what is in use."""
STATES = {
    "A": "hot",
    "C": "cached",
    "F": "free",
    "S": "storing",
    "L": "loading",
    "U": "free or cached",
}


class Page:
    """Serves the page. Used from the event loop only."""

    def __init__(self, board: Board, history: History, adapter: EngineAdapter, clock: Clock) -> None:
        self._board = board
        self._history = history
        self._adapter = adapter
        self._clock = clock
        self._html = files("ullage_agent").joinpath("page.html").read_text(encoding="utf-8")
        self._map: str | None = None
        self._map_at: float | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the page's routes."""
        app.router.add_get("/", self._page)
        app.router.add_get("/page.json", self._data)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html", headers=_headers(self._html))

    async def _data(self, _: web.Request) -> web.Response:
        return web.json_response(await self.data(), headers={"Cache-Control": "no-store"})

    async def data(self) -> dict[str, Any]:
        """Everything that the page shows, as plain values."""
        report = self._board.report()
        now = self._clock.monotonic()
        points = thin(self._history.points(), MAX_CHART_POINTS)
        return {
            "error": self._board.error,
            "report": None if report is None else summary(report),
            "points": [[round(now - point.at, 1), point.score, point.terms] for point in points],
            "actions": [
                {
                    "age_s": max(0.0, self._clock.wall() - note.wall),
                    "action": note.action,
                    "outcome": note.outcome,
                    "message": note.message,
                    "reason": note.reason,
                    "origin": note.origin,
                }
                for note in reversed(self._history.actions)
            ],
            "blocks": await self._blocks(report),
        }

    async def _blocks(self, report: RiskReport | None) -> dict[str, Any]:
        states = await self._exact_map()
        exact = states is not None
        if states is None:
            states = "" if report is None or report.snapshot is None else counted_map(report.snapshot)
        return {"states": shrink(states, MAX_CELLS), "total": len(states), "exact": exact, "names": STATES}

    async def _exact_map(self) -> str | None:
        if not isinstance(self._adapter, HasBlockMap):
            return None
        now = self._clock.monotonic()
        if self._map_at is None or now - self._map_at >= MAP_AGE_S:
            self._map_at = now
            try:
                self._map = await self._adapter.block_map()
            except EngineError as error:
                log.debug("no block map: %s", error)
                self._map = None
        return self._map


def summary(report: RiskReport) -> dict[str, Any]:
    """The figures at the head of the page."""
    state, live, outlook = report.snapshot, report.liveness, report.forecast
    return {
        "engine": report.engine.type,
        "model": report.engine.model,
        "score": report.score,
        "winner": report.winner,
        "sample_age_s": report.sample_age_s,
        "exhaustion_s": None if outlook is None else outlook.exhaustion_p50_s,
        "liveness": None if live is None else {"state": live.state, "detail": live.detail},
        "running": None if state is None else state.running,
        "waiting": None if state is None else state.waiting,
        "throttled": None if state is None else state.admission_max_prompt_tokens,
        "draining": None if state is None else state.draining,
        "violations": [f"{item.metric}: {item.problem}, {item.detail}" for item in report.violations[:10]],
    }


def counted_map(state: Snapshot) -> str:
    """A map for engines that tell counts only: the right numbers in no particular place."""
    total = state.total_blocks or 0
    hot, cached, free = state.hot_blocks or 0, state.reclaimable_blocks, state.free_blocks
    size = max(1, -(-total // (MAX_CELLS * 4)))  # a pool counted in tokens has millions of them
    if cached is None or free is None:
        return "A" * (hot // size) + "U" * ((total - hot) // size)
    return "A" * (hot // size) + "C" * (cached // size) + "F" * (free // size)


def shrink(states: str, cells: int) -> str:
    """At most `cells` letters, each the most telling of those it stands for. Unknown letters become `U`."""
    known = re.sub(f"[^{RANKING}]", "U", states)
    size = -(-len(known) // cells) or 1
    return "".join(_most_telling(known[at : at + size]) for at in range(0, len(known), size))


def thin(points: list[ScorePoint], most: int) -> list[ScorePoint]:
    """At most about `most` points; of those between, the one with the highest score stays."""
    size = -(-len(points) // most) or 1
    return list(_highest(points, size))


def _highest(points: list[ScorePoint], size: int) -> Iterator[ScorePoint]:
    for at in range(0, len(points), size):
        yield max(points[at : at + size], key=lambda point: -1.0 if point.score is None else point.score)


def _most_telling(part: str) -> str:
    return min(part, key=RANKING.index)


def _headers(html: str) -> dict[str, str]:
    """Nothing but the page's own script may run, and it may ask nobody but the agent."""
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
