"""Blocks and who holds them: allocation, sharing, reuse, eviction of what nobody holds, and what moves.

The pool owns reference counts and states; sequences own block tables; policies only choose. Every operation is
atomic: it does what it promises or raises and changes nothing. Allocate, share and release are O(1) a block.

A block that a copy to a lower tier still reads is pinned: once nobody refers to it, it is STORING rather than free or
cached. A block that a copy from a lower tier writes is LOADING, whoever refers to it.

Conservation (see `check_integrity`): free + active + cached + in flight = total; a block is free exactly when nothing
refers to it and nothing moves it; only published blocks are cached; index entries point at the block's current
generation.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ullage_engine.errors import PoolExhausted
from ullage_engine.integrity import IntegrityError, require
from ullage_engine.prefix import PrefixEntry, PrefixIndex
from ullage_engine.tiers.base import LowerTier, NothingBelow

FREE, ACTIVE, CACHED, STORING, LOADING = b"FACSL"
_FREE_RUN = re.compile(b"F+")


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by state and token slots of the active ones."""

    total: int
    free: int
    active: int
    cached: int
    in_flight: int
    """Storing or loading."""
    pinned: int
    """Of the active ones, those that a store reads."""
    slots_filled: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Cached blocks that became free."""

    demoted: int = 0
    """A lower tier holds their content."""
    dropped: int = 0

    @property
    def freed(self) -> int:
        return self.demoted + self.dropped


class BlockPool:
    """Books of `total` blocks. Not thread-safe: the step loop alone touches it."""

    def __init__(self, total: int, block_tokens: int, index: PrefixIndex) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.index = index
        self.lower: LowerTier = NothingBelow()
        """Keeps the content of blocks that are given up."""
        self._state = bytearray([FREE] * total)
        self._refs = [0] * total
        self._pins: Counter[int] = Counter()
        """Stores that read a block; only blocks that one reads."""
        self._filled = [0] * total
        self._generation = [0] * total
        self._entry: list[PrefixEntry | None] = [None] * total
        self._free: deque[int] = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self._in_flight = 0
        self._active_filled = 0

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def in_flight(self) -> int:
        """Blocks that are storing or loading."""
        return self._in_flight

    @property
    def active(self) -> int:
        return self.total - self.free - self.cached - self.in_flight

    @property
    def available(self) -> int:
        """Blocks that an allocation can have: free and reclaimable."""
        return self.free + self.cached

    def usage(self) -> Usage:
        pinned = sum(self._refs[block] > 0 for block in self._pins)
        return Usage(
            self.total, self.free, self.active, self.cached, self.in_flight, pinned, slots_filled=self._active_filled
        )

    def references(self, block: int) -> int:
        return self._refs[block]

    def private(self, block: int) -> bool:
        """Whether exactly one table holds the block and no copy writes to it: whoever holds it may give it up."""
        return self._refs[block] == 1 and self._state[block] == ACTIVE

    def pinned(self, block: int) -> bool:
        """Whether a store reads the block."""
        return block in self._pins

    def entry(self, block: int) -> PrefixEntry | None:
        """What the block is published as."""
        return self._entry[block]

    def coldest(self, count: int) -> list[PrefixEntry]:
        """What the `count` oldest cached blocks hold, oldest first; fewer where there are fewer."""
        return [entry for block in islice(self._cached, count) if (entry := self._entry[block]) is not None]

    def generation(self, block: int) -> int:
        """Raised each time the block is given to a new owner for new content."""
        return self._generation[block]

    def largest_free_run(self) -> int:
        """Length in blocks of the longest run of neighbouring free blocks; O(total)."""
        return max((len(run) for run in _FREE_RUN.findall(self._state)), default=0)

    def states(self) -> str:
        """One letter a block: F, A, C, S or L."""
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
        return sum(entry.block is not None and self._state[entry.block] == CACHED for entry in entries)

    def share(self, entries: Iterable[PrefixEntry]) -> list[int]:
        """Hold published blocks once more; cached ones become active. Each entry must have a block."""
        blocks = [entry.block for entry in entries if entry.block is not None]
        for block in blocks:
            if self._state[block] in (CACHED, STORING):
                self._leave_rest(block)
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

        Returns how many blocks became free (rather than cached, in flight or still shared).
        """
        freed = 0
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0 and self._state[block] == ACTIVE:
                self._active_filled -= self._filled[block]
                freed += self._rest(block)
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
        if entry is None:
            return None
        if entry.block is None:
            entry.block, entry.generation = block, self._generation[block]
        if entry.block == block:
            self._entry[block] = entry
            self.lower.wanted(entry)
        return entry

    def withdraw(self, block: int) -> int:
        """Stop offering a block and all that chains from it; cached descendants become free.

        Returns how many cached blocks became free. The block itself keeps its references.
        """
        entry = self._entry[block]
        return 0 if entry is None else self._forget(entry)

    def reclaim(self, count: int, *, demote: bool = True) -> Reclaimed:
        """Free at least `count` cached blocks, oldest first, or as many as there are.

        With `demote`, blocks that a lower tier holds stay findable there; the others are dropped, and with them all
        that chains from them.
        """
        demoted = dropped = 0
        while demoted + dropped < count and self._cached:
            entry = self._entry[next(iter(self._cached))]
            if entry is None:
                raise IntegrityError("a cached block is not published")
            if demote and self.demote(entry):
                demoted += 1
            else:
                dropped += self._forget(entry)
        return Reclaimed(demoted, dropped)

    def demote(self, entry: PrefixEntry) -> bool:
        """Free a cached block whose content a lower tier holds; False, and nothing changed, where it is not so."""
        block = entry.block
        if block is None or self._state[block] != CACHED or not self.lower.holds(entry):
            return False
        entry.block = self._entry[block] = None
        self._leave_rest(block)
        self._free_block(block)
        return True

    def lost(self, entry: PrefixEntry) -> None:
        """No lower tier holds the entry any more: without a block it can't be offered, nor what chains from it."""
        if entry.block is None and self.index.offers(entry):
            self._forget(entry)

    # -- moving --------------------------------------------------------------------------------------------------

    def pin(self, block: int) -> None:
        """A store begins to read an active, cached or storing block."""
        if self._state[block] == CACHED:
            del self._cached[block]
            self._state[block] = STORING
            self._in_flight += 1
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """The store has ended, or no longer counts."""
        self._pins[block] -= 1
        if self._pins[block] == 0:
            del self._pins[block]
            if self._state[block] == STORING:
                self._in_flight -= 1
                self._rest(block)

    def receive(self, contents: Sequence[PrefixEntry | None]) -> list[int]:
        """Blocks that copies from a lower tier will fill, each with one reference; None: content of a sequence's own.

        Entries are given their block at once, so that others who look for them wait for the same copy.

        Raises:
            PoolExhausted: not so many are available.
        """
        blocks = self.allocate(len(contents))
        for block, entry in zip(blocks, contents, strict=True):
            self._state[block] = LOADING
            self._in_flight += 1
            if entry is not None:
                entry.block, entry.generation = block, self._generation[block]
                self._entry[block] = entry
        return blocks

    def received(self, block: int, filled: int) -> None:
        """The copy into a loading block has ended and left `filled` tokens; after a failure 0, and it is withdrawn."""
        self._in_flight -= 1
        self._filled[block] = filled
        if self._refs[block]:
            self._state[block] = ACTIVE
            self._active_filled += filled
        else:
            self._rest(block)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _rest(self, block: int) -> int:
        """Nobody refers to the block any more. Returns 1 if that frees it, else 0."""
        entry = self._entry[block]
        if block in self._pins:
            self._state[block] = STORING
            self._in_flight += 1
        elif entry is None:
            self._free_block(block)
            return 1
        else:
            self._state[block] = CACHED
            self._cached[block] = None
            self.lower.wanted(entry)
        return 0

    def _leave_rest(self, block: int) -> None:
        """A cached or storing block is about to get another state."""
        if self._state[block] == CACHED:
            del self._cached[block]
        else:
            self._in_flight -= 1

    def _forget(self, entry: PrefixEntry) -> int:
        freed = 0
        for removed in self.index.forget(entry):
            self.lower.discard(removed)
            block, removed.block = removed.block, None
            if block is None:
                continue
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
            require(refs == held[block], f"block {block} counts {refs} references, tables hold {held[block]}")
            require((state == ACTIVE) == (refs > 0 and state != LOADING), f"block {block} is {chr(state)}, {refs} refs")
            require((state == CACHED) == (block in self._cached), f"block {block} is {chr(state)}, LRU disagrees")
            require(0 <= self._filled[block] <= self.block_tokens, f"block {block} overfilled")
            filled += self._filled[block] if state == ACTIVE else 0
            require(state != STORING or block in self._pins, f"block {block} is storing, but no store reads it")
            self._check_entry(block, state)
        require(filled == self._active_filled, f"{filled} active slots filled, {self._active_filled} on the books")
        require(len(set(self._free)) == len(self._free), "a block is free twice")
        require(all(self._state[block] == FREE for block in self._free), "the free list holds a block in use")
        require(self._state.count(FREE) == len(self._free), "a free block is missing from the free list")
        moving = self._state.count(STORING) + self._state.count(LOADING)
        require(moving == self._in_flight, f"{moving} blocks move, {self._in_flight} on the books")
        for block, pins in self._pins.items():
            state = self._state[block]
            require(
                pins > 0 and state in (STORING, ACTIVE), f"block {block} is {chr(state)} while {pins} stores read it"
            )
        for entry in self.index:
            if entry.block is not None:
                require(self._entry[entry.block] is entry, f"the index offers block {entry.block}, not published")

    def _check_entry(self, block: int, state: int) -> None:
        entry = self._entry[block]
        require(state != CACHED or entry is not None, f"block {block} is cached but not published")
        if entry is not None:
            require(state != FREE, f"block {block} is free but published")
            require(entry.block == block, f"block {block} is published as {entry.block}")
            require(entry.generation == self._generation[block], f"block {block} is published with stale content")
