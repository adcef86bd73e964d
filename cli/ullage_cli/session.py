"""A service that serves: sweep, show, and end when something says so.

The run ends when the demo load is done, the time is over, a signal comes, or a part dies; whichever is first.
A demo load that was not done by then was cut short, and the ending says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ullage_operator.model import InferenceService
from ullage_operator.observation import AgentTarget
from ullage_operator.sweep import Sweeper, SweepResult

from .board import Board, Reading, combine
from .diary import Diary
from .errors import BrokenLoop, CliError
from .load import DemoLoad
from .processes import Supervisor
from .records import RecordFolder
from .screen import Screen
from .stopping import StopSignals, end_tasks
from .summary import Outcome, outcome
from .view import Counts, Scene

TICK_S = 1.0
"""Between the beginnings of two sweeps: as often as an agent reads its engine by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    outcome: Outcome | None = None
    """None: it was stopped before it served."""
    interrupted: bool = False
    """A signal ended it, or the time was over before the demo load was done."""
    problem: str | None = None
    """What broke, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All that a serving run consists of."""

    service: InferenceService
    url: str
    targets: Sequence[AgentTarget]
    sweeper: Sweeper
    records: RecordFolder
    diary: Diary
    supervisor: Supervisor
    board: Board
    screen: Screen
    stop: StopSignals
    load: DemoLoad | None
    duration_s: float | None
    began: float
    """Monotonic seconds."""

    async def run(self) -> Ending:
        """Sweep until the end comes."""
        sweeps = asyncio.create_task(self._sweep_on(), name="sweeps")
        death = asyncio.create_task(self.supervisor.first_death(), name="deaths")
        stop = asyncio.create_task(self.stop.wait(), name="signals")
        ends: set[asyncio.Task[Any]] = {sweeps, death, stop}
        load = None
        if self.duration_s is not None:
            ends.add(asyncio.create_task(asyncio.sleep(self.duration_s), name="duration"))
        if self.load is not None:
            load = asyncio.create_task(self.load.run(), name="demo load")
            ends.add(load)
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*ends)
        problem = self._problem(done)
        if death in done:
            problem = str(death.result())
        if problem is not None and self.load is not None:
            self.load.tally.fail_abandoned(f"cut off when the run ended: {problem}")
        if problem is not None or load in done:
            return Ending(outcome=self._outcome(), problem=problem)
        cut_short = self._cut_short("a signal" if stop in done else "the end of --duration")
        return Ending(outcome=self._outcome(cut_short), interrupted=stop in done or cut_short is not None)

    async def _sweep_on(self) -> None:
        while True:
            began = time.monotonic()
            try:
                result = await self.sweeper.tick(self.targets)
            except OSError as error:
                raise BrokenLoop(f"records: cannot be read or written: {error}") from error
            reading = self._reading(result)
            fresh = self.board.take(reading, result.changed_records)
            self.screen.update(self.board, self._scene(), fresh)
            await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began)))

    def _reading(self, result: SweepResult) -> Reading:
        reports = {seen.target.pod: seen.report for seen in result.observations if seen.report is not None}
        errors = [f"{seen.target.pod}: {seen.error}" for seen in result.observations if seen.error]
        errors += [f"{name}: {problem}" for name, problem in self.records.problems.items()]
        return combine(reports, errors, time.monotonic())

    def _problem(self, done: set[asyncio.Task[Any]]) -> str | None:
        for task in done:
            error = task.exception()
            if isinstance(error, CliError):
                return str(error)
            if isinstance(error, BrokenPipeError):
                raise error  # nobody reads on: there is nobody to tell either
            if error is not None:
                return self.diary.unforeseen(task.get_name(), error)
        return self.load.gave_up if self.load is not None else None

    def _scene(self) -> Scene:
        tally = self.load.tally if self.load is not None else None
        reading = self.board.reading
        finished = reading.finished if reading is not None else None
        return Scene(
            service=self.service.metadata.name,
            model=self.service.served_name,
            url=self.url,
            replicas=len(self.targets),
            elapsed_s=time.monotonic() - self.began,
            phase=f"load: {self.load.phase}" if self.load is not None else "serving",
            counts=Counts(ok=tally.ok, failed=tally.failed) if tally else Counts(ok=finished, failed=None),
            threshold=self.service.spec.remediation.risk_threshold,
        )

    def _cut_short(self, by: str) -> str | None:
        """What ended the demo load before it was done; None without one."""
        return f"{by}, in phase {self.load.phase!r}" if self.load is not None else None

    def _outcome(self, cut_short: str | None = None) -> Outcome:
        tally = self.load.tally if self.load is not None else None
        return outcome(self.board, tally, time.monotonic() - self.began, cut_short)
