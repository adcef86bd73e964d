"""The live loop of `top`: read, draw, listen for a key, until told to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.live import Live

from ..errors import CliError
from .fleet import ORDERS, Fleet, Order, Trail
from .picture import ASCII, UNICODE, frame
from .sources import Source


@dataclass(slots=True)
class Viewer:
    """What is shown, and how; keys change it."""

    source: Source
    console: Console
    interval_s: float
    clock: Callable[[], float] = time.time
    order: Order = "risk"
    paused: bool = False
    fleet: Fleet | None = None
    trail: Trail = field(default_factory=Trail)

    async def run(self, keys: asyncio.Queue[str]) -> None:
        """Until `q`. A source that fails once is shown as such, with what was known before.

        Raises:
            CliError: the first reading failed.
        """
        self.fleet = await self.source.read()
        self.trail.enter(self.fleet)
        with Live(console=self.console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            self._draw(live)
            reading = asyncio.create_task(self._readings(live))
            try:
                while (key := await keys.get()) not in ("q", "Q", "\x03", "\x1b"):
                    self.on_key(key)
                    self._draw(live)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def on_key(self, key: str) -> None:
        """Change the order or hold the picture still."""
        if key in ("s", "S"):
            self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        elif key in (" ", "p"):
            self.paused = not self.paused

    async def _readings(self, live: Live) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            if self.paused:
                continue
            await self.take()
            self._draw(live)

    async def take(self) -> None:
        """Read once more."""
        try:
            self.fleet = await self.source.read()
        except CliError as error:
            if self.fleet is not None:
                self.fleet = replace(self.fleet, problem=str(error))
            return
        self.trail.enter(self.fleet)

    def _draw(self, live: Live) -> None:
        if self.fleet is None:
            return
        fleet = replace(self.fleet, at=self.clock())
        if self.paused:
            fleet = replace(fleet, source=f"{fleet.source} (paused)")
        size = self.console.size
        glyphs = UNICODE if self.console.encoding.lower().startswith("utf") else ASCII
        live.update(
            frame(fleet, self.trail, order=self.order, width=size.width, height=size.height, glyphs=glyphs),
            refresh=True,
        )
