"""Blocks and who holds them: allocation, sharing, reuse, eviction of what nobody holds.

The pool owns reference counts and states; sequences own block tables; policies only choose. Every operation is
atomic: it does what it promises or raises and changes nothing. Allocate, share and release are O(1) a block.

Conservation (see `check_integrity`): free + active + cached = total; a block is free exactly when nothing refers
to it; only published blocks are cached; index entries point at the block's current generation.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ullage_engine.errors import PoolExhausted
from ullage_engine.prefix import PrefixEntry, PrefixIndex

FREE, ACTIVE, CACHED = ord("F"), ord("A"), ord("C")
_FREE_RUN = re.compile(b"F+")


class IntegrityError(AssertionError):
    """The pool's books contradict themselves: a bug, never a user's fault."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by state and token slots of the active ones."""

    total: int
    free: int
    active: int
    cached: int
    slots_filled: int


class BlockPool:
    """Books of `total` blocks. Not thread-safe: the step loop alone touches it."""

    def __init__(self, total: int, block_tokens: int, index: PrefixIndex) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.index = index
        self._state = bytearray([FREE] * total)
        self._refs = [0] * total
        self._filled = [0] * total
        self._generation = [0] * total
        self._entry: list[PrefixEntry | None] = [None] * total
        self._free: deque[int] = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self._active_filled = 0

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def active(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that an allocation can have: free and reclaimable."""
        return self.free + self.cached

    def usage(self) -> Usage:
        return Usage(self.total, self.free, self.active, self.cached, self._active_filled)

    def references(self, block: int) -> int:
        return self._refs[block]

    def generation(self, block: int) -> int:
        """Raised each time the block is given to a new owner for new content."""
        return self._generation[block]

    def largest_free_run(self) -> int:
        """Length in blocks of the longest run of neighbouring free blocks; O(total)."""
        return max((len(run) for run in _FREE_RUN.findall(self._state)), default=0)

    def states(self) -> str:
        """One letter a block: F, A or C."""
        return self._state.decode("ascii")

    def fills(self) -> list[int]:
        return list(self._filled)

    def counts(self) -> list[int]:
        return list(self._refs)

    # -- changing ------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for new content, each with one reference; reclaims the oldest cached ones if need be.

        Raises:
            PoolExhausted: fewer than `count` are available.
        """
        if count > self.available:
            raise PoolExhausted(f"{count} blocks wanted, {self.available} available of {self.total}")
        if count > self.free:
            self.reclaim(count - self.free)
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._state[block] = ACTIVE
            self._refs[block] = 1
            self._generation[block] += 1
        return blocks

    def match(self, tokens: Sequence[int], tenant: str = "") -> list[PrefixEntry]:
        """A tenant's published blocks that `tokens` starts with; nothing is held yet."""
        return self.index.match(tokens, tenant)

    def idle(self, entries: Iterable[PrefixEntry]) -> int:
        """How many of the entries' blocks are cached, so that sharing them takes them from what is available."""
        return sum(self._state[entry.block] == CACHED for entry in entries)

    def share(self, entries: Iterable[PrefixEntry]) -> list[int]:
        """Hold published blocks once more; cached ones become active."""
        blocks = [entry.block for entry in entries]
        for block in blocks:
            if self._state[block] == CACHED:
                del self._cached[block]
                self._state[block] = ACTIVE
                self._active_filled += self._filled[block]
            self._refs[block] += 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that are active."""
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Give up one reference of each, the last first, so that a chain's tail is reclaimed before its head.

        Returns how many blocks became free (rather than cached or still shared).
        """
        freed = 0
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._active_filled -= self._filled[block]
            if self._entry[block] is None:
                self._free_block(block)
                freed += 1
            else:
                self._state[block] = CACHED
                self._cached[block] = None
        return freed

    def set_filled(self, block: int, tokens: int) -> None:
        """Record how many token slots of an active block hold a token."""
        self._active_filled += tokens - self._filled[block]
        self._filled[block] = tokens

    def publish(
        self, parent: PrefixEntry | None, tokens: tuple[int, ...], block: int, tenant: str = ""
    ) -> PrefixEntry | None:
        """Offer a full, verified block for reuse; see `PrefixIndex.publish`."""
        entry = self.index.publish(parent, tokens, block, self._generation[block], tenant)
        if entry is not None and entry.block == block:
            self._entry[block] = entry
        return entry

    def withdraw(self, block: int) -> int:
        """Stop offering a block and all that chains from it; cached descendants become free.

        Returns how many cached blocks became free. The block itself keeps its references.
        """
        entry = self._entry[block]
        return 0 if entry is None else self._forget(entry)

    def reclaim(self, count: int) -> int:
        """Free at least `count` cached blocks, oldest first, or as many as there are; returns how many."""
        freed = 0
        while freed < count and self._cached:
            entry = self._entry[next(iter(self._cached))]
            if entry is None:
                raise IntegrityError("a cached block is not published")
            freed += self._forget(entry)
        return freed

    def _forget(self, entry: PrefixEntry) -> int:
        freed = 0
        for removed in self.index.forget(entry):
            block = removed.block
            self._entry[block] = None
            if self._state[block] == CACHED:
                del self._cached[block]
                self._free_block(block)
                freed += 1
        return freed

    def _free_block(self, block: int) -> None:
        self._state[block] = FREE
        self._filled[block] = 0
        self._free.append(block)

    # -- checking ------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with each other and with the block tables of all live sequences.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        held = Counter(block for table in tables for block in table)
        filled = 0
        for block in range(self.total):
            state, refs = self._state[block], self._refs[block]
            _require(refs == held[block], f"block {block} counts {refs} references, tables hold {held[block]}")
            _require((state == ACTIVE) == (refs > 0), f"block {block} is {chr(state)} with {refs} references")
            _require((state == CACHED) == (block in self._cached), f"block {block} is {chr(state)}, LRU disagrees")
            _require(state == FREE or self._filled[block] >= 0, f"block {block} has {self._filled[block]} slots filled")
            _require(0 <= self._filled[block] <= self.block_tokens, f"block {block} overfilled")
            filled += self._filled[block] if state == ACTIVE else 0
            self._check_entry(block, state)
        _require(filled == self._active_filled, f"{filled} active slots filled, {self._active_filled} on the books")
        _require(len(set(self._free)) == len(self._free), "a block is free twice")
        _require(all(self._state[block] == FREE for block in self._free), "the free list holds a block in use")
        _require(self._state.count(FREE) == len(self._free), "a free block is missing from the free list")
        for entry in self.index:
            _require(self._entry[entry.block] is entry, f"the index offers block {entry.block}, which is not published")

    def _check_entry(self, block: int, state: int) -> None:
        entry = self._entry[block]
        _require(state != CACHED or entry is not None, f"block {block} is cached but not published")
        if entry is not None:
            _require(state != FREE, f"block {block} is free but published")
            _require(entry.block == block, f"block {block} is published as {entry.block}")
            _require(entry.generation == self._generation[block], f"block {block} is published with stale content")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
