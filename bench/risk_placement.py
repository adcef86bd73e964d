"""Where the blocks of a simulated pool lie, so that its longest runs can be told.

Blocks are handed out as our engine's pool does: free ones first, in the order in which they became free, then the
oldest of the prefix cache; a request gives its blocks back the last first.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

SHARED = -1
"""Owner of the prefix that all requests share."""
_FREE = re.compile(rb"F+")
_AVAILABLE = re.compile(rb"[FC]+")


class Placement:
    """Follows how many blocks each owner has, step by step."""

    def __init__(self, total: int, cached: int, *, caching: bool) -> None:
        self._states = bytearray(b"C" * cached + b"F" * (total - cached))
        self._free: deque[int] = deque(range(cached, total))
        self._cached: deque[int] = deque(range(cached))
        self._owned: dict[int, list[int]] = {}
        self._caching = caching

    def follow(self, owners: Iterable[tuple[int, int]], hot: int) -> None:
        """Give and take blocks until each owner has as many as it says; the rest of `hot` is the shared prefix."""
        wanted = dict(owners)
        wanted[SHARED] = hot - sum(wanted.values())
        for owner in [owner for owner in self._owned if owner not in wanted]:
            self._give_back(self._owned.pop(owner))
        for owner, count in wanted.items():
            blocks = self._owned.setdefault(owner, [])
            if count < len(blocks):
                self._give_back(blocks[count:])
                del blocks[count:]
        for owner, count in wanted.items():
            blocks = self._owned[owner]
            blocks.extend(self._take() for _ in range(count - len(blocks)))

    def longest_free_run(self) -> int:
        """Of neighbouring free blocks."""
        return _longest(_FREE, self._states)

    def longest_available_run(self) -> int:
        """Of neighbouring blocks that are free or cached."""
        return _longest(_AVAILABLE, self._states)

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._cached.popleft()
        self._states[block] = ord("A")
        return block

    def _give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._states[block] = ord("C") if self._caching else ord("F")
            (self._cached if self._caching else self._free).append(block)


def _longest(pattern: re.Pattern[bytes], states: bytearray) -> int:
    return max((len(run) for run in pattern.findall(states)), default=0)
