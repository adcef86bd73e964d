"""The demo load: real chats that fill the KV cache until the risk is high, then ease off until it is low.

A closed loop: each reading of the engines decides whether one more long answer is asked for, so the load is
as heavy as this machine can take and no heavier. It refuses, cancels or shortens nothing to look good;
requests that fail are counted and named. Not a benchmark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .chat import Answer, Question
from .pace import LoadPlan, Pressure, fitting_answer_tokens, how_many_more, long_answer_tokens, projected_blocks
from .prompts import SYSTEM, long_prompt, short_prompt

Phase = Literal["not started", "warm-up", "ramp", "hold", "easing off", "idle", "done"]


class Feedback(Protocol):
    """Where readings come from."""

    async def next_pressure(self) -> Pressure:
        """Wait for the next reading (about one a second) and return it."""


class Asks(Protocol):
    """Whoever can be asked a question."""

    async def ask(self, question: Question) -> Answer:
        """Answer a question, or say why not; never raises for what a server can do."""


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    ok: int = 0
    failed: int = 0
    abandoned: int = 0
    """Requests that were cut off because the whole run ended."""
    refusals: int = 0
    """Times a request was told to come back later, and did."""
    failures: list[str] = field(default_factory=list)
    """Reasons of the failed ones."""

    def count(self, answer: Answer) -> None:
        """Add one ended request."""
        self.refusals += answer.refusals
        if answer.failure is None:
            self.ok += 1
        else:
            self.fail(answer.failure)

    def fail(self, reason: str) -> None:
        """Add one failed request."""
        self.failed += 1
        self.failures.append(reason)

    def fail_abandoned(self, reason: str) -> None:
        """The run ended because something broke: what it cut off has failed."""
        for _ in range(self.abandoned):
            self.fail(reason)
        self.abandoned = 0


class _Hopeless(Exception):
    pass


class DemoLoad:
    """Runs the phases once. `phase` and `tally` may be read at any time."""

    def __init__(self, client: Asks, feedback: Feedback, plan: LoadPlan, clock: Callable[[], float]) -> None:
        self.phase: Phase = "not started"
        self.tally = Tally()
        self.gave_up: str | None = None
        """Why the load ended before the risk was high and then low again."""
        self._client = client
        self._feedback = feedback
        self._plan = plan
        self._clock = clock
        self._in_flight: set[asyncio.Task[Answer]] = set()
        self._asked = 0
        self._speed = 0.0

    async def run(self) -> None:
        """Warm up, ramp, hold, ease off, idle. Returns when done or given up; leaves no request behind."""
        try:
            async with asyncio.timeout(self._plan.total_s):
                await self._warm_up()
                before = await self._ramp()
                await self._hold(before)
                await self._ease_off()
                await self._idle()
        except _Hopeless:
            self._give_up(f"{self.tally.failed} requests failed, the first because of: {self.tally.failures[0]}")
        except TimeoutError:
            self._give_up(f"not done after {self._plan.total_s:g} s, in phase {self.phase!r}")
            await self._drop_unfinished()
            self.tally.fail_abandoned(f"unfinished after {self._plan.total_s:g} s")
        finally:
            await self._drop_unfinished()
        self.phase = "done"

    async def _warm_up(self) -> None:
        self.phase = "warm-up"
        for index in range(self._plan.warm_up_chats):
            while len(self._in_flight) >= 2:
                await self._some_answer()
            self._start(self._short(index))
        await self._all_answers()

    async def _ramp(self) -> int:
        """Raise the load until the risk is high; returns how many remediations had ended before."""
        self.phase = "ramp"
        deadline = self._clock() + self._plan.ramp_s
        settled: int | None = None
        while self._clock() < deadline:
            now = await self._feedback.next_pressure()
            settled = now.settled if settled is None else settled
            if now.risk is not None and now.risk >= self._plan.target_risk:
                return settled
            self._add_long(now)
        self._give_up(f"risk stayed below {self._plan.target_risk:g} for {self._plan.ramp_s:g} s")
        return settled or 0

    async def _hold(self, settled_before: int) -> None:
        """Keep the load as it is until a remediation has ended, so that its effect is seen under load."""
        self.phase = "hold"
        self._collect()
        most = len(self._in_flight)
        deadline = self._clock() + self._plan.hold_s
        while self._clock() < deadline and self.gave_up is None:
            now = await self._feedback.next_pressure()
            if now.settled > settled_before:
                return
            self._collect()
            if len(self._in_flight) < most:
                self._add_long(now)

    async def _ease_off(self) -> None:
        """Short chats, one at a time, while the long answers come to their end."""
        self.phase = "easing off"
        long_ones = set(self._in_flight)
        index = self._plan.warm_up_chats
        while long_ones & self._in_flight:
            if not self._in_flight - long_ones:
                self._start(self._short(index))
                index += 1
            await self._some_answer()
        await self._all_answers()

    async def _idle(self) -> None:
        self.phase = "idle"
        while True:
            now = await self._feedback.next_pressure()
            if now.risk is not None and now.risk <= self._plan.calm_risk:
                return

    def _add_long(self, now: Pressure) -> None:
        self._collect()
        self._speed = max(self._speed, now.tokens_per_s)
        tokens = long_answer_tokens(self._plan, self._speed)
        tokens = fitting_answer_tokens(self._plan, now, self._long(tokens))
        blocks = projected_blocks(self._plan, self._long(tokens), now.block_tokens or 16)
        for _ in range(how_many_more(self._plan, now, len(self._in_flight), blocks)):
            self._start(self._long(tokens))

    def _short(self, index: int) -> Question:
        return Question(system=SYSTEM, user=short_prompt(index), max_tokens=self._plan.short_tokens, seed=self._asked)

    def _long(self, max_tokens: int) -> Question:
        return Question(system=SYSTEM, user=long_prompt(self._asked), max_tokens=max_tokens, seed=self._asked)

    def _start(self, question: Question) -> None:
        self._in_flight.add(asyncio.create_task(self._client.ask(question), name=f"chat {self._asked}"))
        self._asked += 1

    async def _some_answer(self) -> None:
        await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        self._collect()

    async def _all_answers(self) -> None:
        while self._in_flight:
            await self._some_answer()

    def _collect(self) -> None:
        for task in [task for task in self._in_flight if task.done()]:
            self._in_flight.remove(task)
            self.tally.count(task.result())
        if self.tally.failed >= self._plan.max_failed:
            raise _Hopeless

    async def _drop_unfinished(self) -> None:
        with suppress(_Hopeless):
            self._collect()
        for task in self._in_flight:
            task.cancel()
            self.tally.abandoned += 1
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight.clear()

    def _give_up(self, reason: str) -> None:
        self.gave_up = self.gave_up or reason
