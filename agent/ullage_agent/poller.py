"""Reads the engine at a steady pace and publishes what follows. A slow or dead engine delays nothing else.

`assess_reading` decides, `Poller` does the waiting. The forecast's window lives here because it spans polls.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from ullage_agent.adapters.base import EngineAdapter, Reading
from ullage_agent.board import Assessment, Board
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineError
from ullage_agent.forecast import ForecastConfig, Sample, Window, forecast, observe
from ullage_agent.fragmentation import fragmentation
from ullage_agent.risk import RiskInputs, assess
from ullage_agent.wire import Action

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollConfig:
    """Pace and bounds of polling."""

    period_s: float = 1.0
    """Seconds from the start of one poll to the start of the next."""
    read_timeout_s: float = 3.0
    """Bound on one reading, whatever the adapter does; a slower engine counts as unread."""
    forecast: ForecastConfig = field(default_factory=ForecastConfig)


class Poller:
    """Polls one adapter into one board."""

    def __init__(self, adapter: EngineAdapter, board: Board, clock: Clock, config: PollConfig) -> None:
        self._adapter = adapter
        self._board = board
        self._clock = clock
        self._config = config
        self._window: Window = ()
        self._was_failing = False

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. A poll that overruns its period delays the next; none are made up for."""
        while not stop.is_set():
            began = self._clock.monotonic()
            await self.poll_once()
            pause = max(0.0, self._config.period_s - (self._clock.monotonic() - began))
            try:
                await asyncio.wait_for(stop.wait(), pause)
            except TimeoutError:
                continue

    async def poll_once(self) -> None:
        """One reading: published when good, otherwise noted as a failure. Raises nothing."""
        began = self._clock.monotonic()
        reading = await self._read(began)
        if reading is None:
            return
        self._window = widen(self._window, reading, began, self._config.forecast)
        assessment = assess_reading(reading, self._window, self._adapter.capabilities(), began)
        self._board.publish(assessment, self._clock.monotonic() - began)
        self._recovered()

    async def _read(self, began: float) -> Reading | None:
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                return await self._adapter.read()
        except TimeoutError:
            self._fail(f"no answer within {self._config.read_timeout_s:g} s", began)
        except EngineError as error:
            self._fail(str(error), began)
        except Exception:
            log.exception("the adapter failed in an unforeseen way")
            self._fail("the adapter failed in an unforeseen way; see the agent's log", began)
        return None

    def _fail(self, why: str, began: float) -> None:
        self._board.fail(why, self._clock.monotonic() - began)
        if not self._was_failing:
            log.warning("cannot read the engine: %s", why)
        self._was_failing = True

    def _recovered(self) -> None:
        if self._was_failing:
            log.info("the engine can be read again")
        self._was_failing = False


def widen(window: Window, reading: Reading, began: float, config: ForecastConfig) -> Window:
    """The forecast's window after a reading; unchanged where hot blocks are unknown."""
    hot = reading.snapshot.hot_blocks
    if hot is None:
        return window
    sample = Sample(
        at=began,
        instance=reading.identity.instance,
        sequence=reading.snapshot.sequence,
        hot_blocks=hot,
    )
    return observe(window, sample, config)


def assess_reading(reading: Reading, window: Window, capabilities: tuple[Action, ...], began: float) -> Assessment:
    """Everything that follows from a reading and its window. Pure."""
    figures = fragmentation(reading.snapshot)
    outlook = forecast(window, reading.snapshot)
    risk = assess(RiskInputs(snapshot=reading.snapshot, fragmentation=figures, forecast=outlook))
    return Assessment(
        reading=reading,
        fragmentation=figures,
        forecast=outlook,
        risk=risk,
        capabilities=capabilities,
        began_at=began,
    )
