"""The same key gets the first answer again, without acting again.

Purpose: a bounded memory of finished acts, in which calls with the key of an act under way wait for it. An act
that ends in an exception is forgotten: the core promises that it did not happen, so it may be tried again.
Non-goals: HTTP, and surviving a restart (a new process has a new cache: nothing to repeat).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KEEP_SECONDS = 600.0
MAX_KEYS = 1024


class KeyReused(Exception):
    """The key came before with another call."""


class TooManyKeys(Exception):
    """So many acts are under way that none of them can be forgotten."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    fingerprint: str
    task: asyncio.Task[T]
    begun_at: float


class AnswerStore(Generic[T]):
    """Answers by key. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float], *, keep_s: float = KEEP_SECONDS, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_keys = max_keys
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self, key: str, fingerprint: str, act: Callable[[], Awaitable[T]]) -> T:
        """The answer of `act`, or of the earlier one with this key. The act goes on when the caller is
        cancelled, as its answer may be asked for again.

        Raises:
            KeyReused: the key belongs to a call with another fingerprint.
            TooManyKeys: the store is full of acts under way.
            Exception: whatever `act` raises, to all that wait for it.
        """
        self._forget_old()
        entry = self._entries.get(key)
        if entry is None:
            self._make_room()
            task = asyncio.ensure_future(_run(act))
            entry = self._entries[key] = _Entry(fingerprint, task, self._clock())
            task.add_done_callback(lambda done: self._forget_failed(key, done))
        if entry.fingerprint != fingerprint:
            raise KeyReused(key)
        return await asyncio.shield(entry.task)

    def _forget_old(self) -> None:
        oldest_kept = self._clock() - self._keep_s
        for key, entry in list(self._entries.items()):
            if entry.begun_at > oldest_kept:
                break
            if entry.task.done():
                del self._entries[key]

    def _make_room(self) -> None:
        if len(self._entries) < self._max_keys:
            return
        done = next((key for key, entry in self._entries.items() if entry.task.done()), None)
        if done is None:
            raise TooManyKeys
        del self._entries[done]

    def _forget_failed(self, key: str, task: asyncio.Task[T]) -> None:
        failed = task.cancelled() or task.exception() is not None
        entry = self._entries.get(key)
        if failed and entry is not None and entry.task is task:
            del self._entries[key]


async def _run(act: Callable[[], Awaitable[T]]) -> T:
    return await act()
