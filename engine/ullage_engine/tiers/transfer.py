"""Copies between the pool, host slots and disk slots, each in a thread of its own kind.

A copy is asked for with `submit` and reported by `finished`, both in the step loop's thread; neither waits. Bytes
move meanwhile in one thread for each kind of copy, so that a slow disk holds up nobody who loads from host memory.
What happens to a copy's two ends while it runs is `manager`'s business.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ullage_engine.prefix import PrefixEntry

log = logging.getLogger(__name__)

Kind = Literal["store", "load", "spill", "fetch"]
"""store: pool to host; load: host to pool; spill: host to disk; fetch: disk to host."""
Fault = Literal["unavailable", "corrupt"]
"""unavailable: the tier could not be read or written; corrupt: what was read is not what was written."""
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One block's bytes to move."""

    ticket: int
    """Names the copy in its report."""
    kind: Kind
    slot: int
    """Of the host tier."""
    block: int = -1
    """Of the pool, for `store` and `load`."""
    file: int = -1
    """Slot of the disk tier, for `spill` and `fetch`."""
    entry: PrefixEntry | None = None
    """What the content is, for `spill` and `fetch`: it names the bytes on the disk."""
    checksum: int | None = None
    """What the source must have, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A copy has ended, and no longer reads its source nor writes its target."""

    ticket: int
    fault: Fault | None = None
    message: str = ""
    checksum: int | None = None
    """Of the bytes moved, where it is known."""


class TierFault(Exception):
    """A copy could not be made."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


Mover = Callable[[Sequence[Copy]], Sequence["int | TierFault | None"]]
"""Makes copies of one kind and returns when they have ended: of each, its checksum if known, or what failed."""


class TransferEngine(Protocol):
    """Makes copies while the step loop goes on."""

    def submit(self, copies: Sequence[Copy]) -> None:
        """Begin copies, in order for each kind. Sources must not change, nor targets be read, until they are done."""
        ...

    def finished(self) -> list[Done]:
        """Copies that ended since the last call; never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once `finished` has something to tell, or after the timeout."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in any thread, whenever `finished` has something to tell."""
        ...

    def close(self) -> None:
        """Begin no more copies, and wait for those under way for at most `CLOSE_S`."""
        ...


class ThreadTransfers:
    """A `TransferEngine` with a thread for each kind of copy.

    Args:
        movers: what makes each kind of copy.
        ready: called in the step loop's thread for each submission, before the copies are handed over: on an
            accelerator it marks the point in the stream of computation that they must wait for.
        closed: called once no copy can run any more.
    """

    BATCH = 16
    """Most copies that are reported together."""

    def __init__(
        self,
        movers: Mapping[Kind, Mover],
        ready: Callable[[], None] = lambda: None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._movers = movers
        self._ready = ready
        self._closed = closed
        self._queues: dict[Kind, queue.SimpleQueue[Copy | None]] = {kind: queue.SimpleQueue() for kind in movers}
        self._done: deque[Done] = deque()
        self._told = threading.Event()
        self._closing = False
        self._listener: Callable[[], None] = lambda: None
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=f"tier-{kind}", daemon=True) for kind in movers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, copies: Sequence[Copy]) -> None:
        self._ready()
        for copy in copies:
            self._queues[copy.kind].put(copy)

    def finished(self) -> list[Done]:
        self._told.clear()
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def wait(self, timeout_s: float) -> None:
        self._told.wait(timeout_s)

    def listen(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def close(self) -> None:
        self._closing = True
        for waiting in self._queues.values():
            waiting.put(None)
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._closed()

    def _run(self, kind: Kind) -> None:
        while batch := self._next(kind):
            self._done.extend(self._move(kind, batch))
            self._told.set()
            self._listener()

    def _next(self, kind: Kind) -> list[Copy]:
        """Copies that are waiting, at least one; none: the end."""
        batch: list[Copy] = []
        while len(batch) < self.BATCH:
            try:
                copy = self._queues[kind].get(block=not batch)
            except queue.Empty:
                break
            if copy is None or self._closing:
                return []
            batch.append(copy)
        return batch

    def _move(self, kind: Kind, batch: list[Copy]) -> list[Done]:
        try:
            results = self._movers[kind](batch)
        except Exception as error:
            log.exception("%d copies (%s) failed", len(batch), kind)
            results = [TierFault("unavailable", f"{type(error).__name__}: {error}")] * len(batch)
        return [
            Done(ticket=copy.ticket, fault=result.fault, message=str(result))
            if isinstance(result, TierFault)
            else Done(ticket=copy.ticket, checksum=result)
            for copy, result in zip(batch, results, strict=True)
        ]
