"""Reads the engine at a steady pace and publishes what follows. A slow or dead engine delays nothing else.

`Analysis` decides, `Poller` does the waiting. Whoever wants to know of each assessment listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_agent.adapters.base import EngineAdapter, HasFeatures, Reading
from ullage_agent.analysis import Analysis, Findings, Surroundings
from ullage_agent.around import AroundReader
from ullage_agent.board import Assessment, Board
from ullage_agent.canary import CanaryKeeper
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineError
from ullage_agent.forecast import ForecastConfig
from ullage_agent.wire import Action

log = logging.getLogger(__name__)

PollListener = Callable[[Assessment, Surroundings], None]


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

    def __init__(
        self,
        adapter: EngineAdapter,
        board: Board,
        clock: Clock,
        config: PollConfig,
        *,
        around: AroundReader | None = None,
        canary: CanaryKeeper | None = None,
    ) -> None:
        self._adapter = adapter
        self._board = board
        self._clock = clock
        self._config = config
        self._analysis = Analysis(config.forecast)
        self._around = around
        self._canary = canary
        self._was_failing = False
        self.listeners: list[PollListener] = []
        """Told of every poll that went well; must not raise."""
        self.on_failure: list[Callable[[float, str], None]] = []
        """Told of every poll that failed, with its time and reason; must not raise."""

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until `stop` is set. A poll that overruns its period delays the next; none are made up for."""
        while not stop.is_set():
            began = self._clock.monotonic()
            await self.poll_once()
            pause = max(0.0, self._config.period_s - (self._clock.monotonic() - began))
            try:
                async with asyncio.timeout(pause):
                    await stop.wait()
            except TimeoutError:
                continue

    async def poll_once(self) -> None:
        """One reading: published when good, otherwise noted as a failure. Raises nothing."""
        began = self._clock.monotonic()
        reading = await self._read(began)
        if reading is None:
            return
        around = await self._look_around()
        found = self._analysis.take(reading, began, around)
        assessment = assess_reading(reading, found, self._adapter.capabilities(), self._features(), began)
        self._board.publish(assessment, self._clock.monotonic() - began)
        self._recovered()
        if self._canary is not None:
            self._canary.look(found.liveness, self._clock.monotonic())
        for listen in self.listeners:
            listen(assessment, around)

    async def _look_around(self) -> Surroundings:
        devices, host = ((), None) if self._around is None else await self._around.read()
        error = None if self._canary is None else self._canary.error
        return Surroundings(devices=devices, host=host, canary_error=error)

    def _features(self) -> tuple[str, ...]:
        return self._adapter.features() if isinstance(self._adapter, HasFeatures) else ()

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
        for listen in self.on_failure:
            listen(began, why)
        if not self._was_failing:
            log.warning("cannot read the engine: %s", why)
        self._was_failing = True

    def _recovered(self) -> None:
        if self._was_failing:
            log.info("the engine can be read again")
        self._was_failing = False


def assess_reading(
    reading: Reading, found: Findings, capabilities: tuple[Action, ...], features: tuple[str, ...], began: float
) -> Assessment:
    """What is published of a reading and its findings. Pure."""
    return Assessment(
        reading=reading,
        fragmentation=found.fragmentation,
        forecast=found.forecast,
        risk=found.risk,
        service=found.service,
        liveness=found.liveness,
        devices=found.surroundings.devices,
        host=found.surroundings.host,
        capabilities=capabilities,
        features=features,
        began_at=began,
    )
