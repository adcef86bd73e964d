"""Remembers what was answered under an idempotency key, so that a repeat does not act again.

Failures are forgotten at once: nobody got an answer, so the same key may try again. Bounded by age and number.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from ullage_agent.clock import Clock
from ullage_agent.errors import KeyReused
from ullage_agent.wire import Action, ActionRequest, ActionResult

TTL_S = 600.0
CAPACITY = 4096
"""More than the rate limit lets in within `TTL_S`, so only age ever forgets."""

Fingerprint = tuple[Action, ActionRequest]


@dataclass(frozen=True, slots=True)
class _Entry:
    fingerprint: Fingerprint
    task: asyncio.Task[ActionResult]
    since: float
    """Monotonic seconds when the answer was given, or when the action began until then."""


class IdempotencyStore:
    """Entries in order of age, oldest first."""

    def __init__(self, clock: Clock, *, ttl_s: float = TTL_S, capacity: int = CAPACITY) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str, fingerprint: Fingerprint) -> asyncio.Task[ActionResult] | None:
        """The answer under `key`, perhaps still being made; None if there is none.

        Raises:
            KeyReused: the key belongs to another request.
        """
        self._expire()
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.fingerprint != fingerprint:
            raise KeyReused(f"Idempotency-Key {key} was used for another request; use a new key for this one")
        return entry.task

    def remember(self, key: str, fingerprint: Fingerprint, task: asyncio.Task[ActionResult]) -> None:
        """Keep the answer of `task`; the key must be free."""
        while len(self._entries) >= self._capacity:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = _Entry(fingerprint, task, self._clock.monotonic())
        task.add_done_callback(lambda done: self._settle(key, done))

    def _settle(self, key: str, task: asyncio.Task[ActionResult]) -> None:
        """The task ended: an answer is kept from now on, a failure is forgotten."""
        failed = task.cancelled() or task.exception() is not None
        entry = self._entries.get(key)
        if entry is None or entry.task is not task:
            return
        del self._entries[key]
        if not failed:
            self._entries[key] = replace(entry, since=self._clock.monotonic())

    def _expire(self) -> None:
        deadline = self._clock.monotonic() - self._ttl_s
        while self._entries:
            oldest = next(iter(self._entries))
            entry = self._entries[oldest]
            if entry.since > deadline or not entry.task.done():
                return
            del self._entries[oldest]
