"""A transfer engine that does everything a real one may do, as its script says: late, out of order, in part, wrongly.

For tests of whatever uses one. It has no thread: copies move when `advance` is called, half of a block's bytes at a
time, so that whoever changes a source or reads a target before a copy has ended is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from ullage_engine.tiers.movers import Bytes, checked, checksum
from ullage_engine.tiers.transfer import Copy, Done, Fault, Kind, Mover, TierFault

MOST_TURNS = 20
"""After which `wait` takes it that nothing will end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Chances of each thing that may happen to a copy."""

    progress: float = 0.5
    """That a call of `advance` moves it on by one of its two halves, or reports it."""
    failure: float = 0.0
    """That it fails: `unavailable`, after having written anything."""
    corruption: float = 0.0
    """That bytes of the host tier change after a store or fetch."""
    stuck: float = 0.0
    """That it is not reported before `release`."""


@dataclass(eq=False, slots=True)
class _Running:
    copy: Copy
    stuck: bool
    fault: Fault | None
    checksum: int | None = None
    halves: int = 0


class ScriptedTransfers:
    """A `TransferEngine` between a pool and a host tier in this process; other kinds of copies go to `movers`.

    Args:
        pool, host: [slots, block_bytes] uint8.
        sleep: called with the seconds that `wait` would take, where nothing ends.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        host: Bytes,
        script: Script,
        seed: int,
        movers: Mapping[Kind, Mover] | None = None,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.script = script
        self._pool: Bytes = pool.numpy()
        self._host = host
        self._movers = dict(movers or {})
        self._sleep = sleep
        self._random = Random(seed)  # noqa: S311 - repeatable, not secret
        self._running: list[_Running] = []
        self._done: list[Done] = []
        self._listener: Callable[[], None] = lambda: None

    @property
    def running(self) -> list[Copy]:
        """Copies that have not ended."""
        return [one.copy for one in self._running]

    def submit(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            fault: Fault | None = "unavailable" if self._random.random() < self.script.failure else None
            self._running.append(_Running(copy, self._random.random() < self.script.stuck, fault))

    def finished(self) -> list[Done]:
        self.advance()
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        for _ in range(MOST_TURNS):
            if self._done:
                return
            self.advance()
        self._sleep(timeout_s)

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def close(self) -> None:
        self._running.clear()

    def release(self) -> None:
        """Let stuck copies go on."""
        for one in self._running:
            one.stuck = False

    def advance(self) -> None:
        """Move copies on, in any order."""
        self._random.shuffle(self._running)
        for one in [*self._running]:
            if not one.stuck and self._random.random() < self.script.progress:
                self._move(one)

    def _move(self, one: _Running) -> None:
        copy = one.copy
        if copy.kind in self._movers:
            self._end(one, self._movers[copy.kind]([copy])[0] if one.fault is None else None)
            return
        source, target = self._pool[copy.block], self._host[copy.slot]
        if copy.kind == "load":
            source, target = target, source
        if one.halves == 0 and copy.kind == "store":
            one.checksum = checksum(source)
        if one.halves < 2:
            half = slice(None, None) if one.halves == 1 else slice(None, len(source) // 2)
            target[half] = source[half]
            one.halves += 1
        else:
            self._end(one, one.checksum if copy.kind == "store" else checked(checksum(target), copy))

    def _end(self, one: _Running, result: int | TierFault | None) -> None:
        self._running.remove(one)
        ticket = one.copy.ticket
        if one.fault is not None:
            self._done.append(Done(ticket=ticket, fault=one.fault, message="as the script says"))
        elif isinstance(result, TierFault):
            self._done.append(Done(ticket=ticket, fault=result.fault, message=str(result)))
        else:
            if one.copy.kind in ("store", "fetch") and self._random.random() < self.script.corruption:
                byte = self._random.randrange(self._host.shape[1])
                self._host[one.copy.slot, byte] ^= np.uint8(1 << self._random.randrange(8))
            self._done.append(Done(ticket=ticket, checksum=result))
        self._listener()
