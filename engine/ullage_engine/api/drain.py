"""Waits until nothing is in flight, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.api.core import EngineCore

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Drained:
    """The outcome of a drain."""

    drained: bool
    in_flight: int


def count_in_flight(core: EngineCore, open_sequences: Callable[[], int]) -> int:
    """Sequences under way: by the core's last snapshot, which may lag, or by the HTTP side's own count."""
    snapshot = core.snapshot()
    return max(snapshot.running + snapshot.waiting, open_sequences())


async def drain(core: EngineCore, open_sequences: Callable[[], int], timeout_s: float) -> Drained:
    """Stop admitting, for good, and wait up to `timeout_s` for what is in flight."""
    core.set_draining(True)
    try:
        async with asyncio.timeout(timeout_s):
            while count_in_flight(core, open_sequences):  # noqa: ASYNC110 - another thread's state
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return Drained(False, count_in_flight(core, open_sequences))
    return Drained(True, 0)
