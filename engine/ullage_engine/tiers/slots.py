"""Books of one lower tier: which slot holds which content, and what leaves when it is full.

Two-phase: `reserve` takes slots for copies that are about to begin, `commit` makes one findable, `drop` takes content
out at any time; a slot that a copy still writes or reads is free only once the copy has ended. `reserve` gives
all slots asked for or none.

Least recently used first, with a guard by frequency: content that was used since it was stored gets another round for
each halving of its uses, so that a stream of prompts that never return can't flush out those that do. What chains from
a victim leaves before it, since without its prefix it could never be found.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ullage_engine.integrity import require
from ullage_engine.prefix import PrefixEntry
from ullage_engine.tiers.base import Content, OwnBlock

NO_SLOT = -1
MAX_USES = 7
MAX_SECOND_CHANCES = 16
"""Rounds given in one search for a victim, so that the search is short."""


@dataclass(eq=False, slots=True)
class Record:
    """One slot in use."""

    content: Content
    slot: int
    ready: bool = False
    """Whether it holds the whole content; before, a copy writes it."""
    readers: int = 0
    """Copies that read it."""
    dropped: bool = False
    """Taken out of the books; the slot waits for its copies to end."""
    uses: int = 0
    passed_on: bool = False
    """Whether a copy to the tier below was begun: once, or two small tiers would push each other's content around."""
    checksum: int | None = None


class SlotTable:
    """Books of `total` slots.

    Args:
        evicted: told of each content that was pushed out, after it is gone.
    """

    def __init__(self, total: int, evicted: Callable[[Content], None]) -> None:
        self.total = total
        self._evicted = evicted
        self._free: deque[int] = deque(range(total))
        self._records: dict[Content, Record] = {}
        self._idle: OrderedDict[Content, Record] = OrderedDict()
        """Ready, read by nobody and not a sequence's own: what may leave, the least recently used first."""
        self._leaving = 0
        """Slots of dropped records whose copies have not ended."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def available(self) -> int:
        """Slots that `reserve` can have."""
        return self.free + len(self._idle)

    def find(self, content: Content) -> Record | None:
        """The record of content, ready or being written."""
        return self._records.get(content)

    def holds(self, content: Content) -> bool:
        """Whether the whole content is here."""
        record = self._records.get(content)
        return record is not None and record.ready

    def reserve(self, contents: list[Content]) -> list[Record] | None:
        """A slot to write for each content, none of which may be here.

        None: not so many are available, or one of `contents` chains from what would have had to leave for it.
        """
        if len(contents) > self.available:
            return None
        records = [Record(content, NO_SLOT) for content in contents]
        self._records.update((record.content, record) for record in records)
        while len(self._free) < len(contents):
            self._evict()
        if any(record.dropped for record in records):
            for record in records:
                self._records.pop(record.content, None)
                self._leaving -= record.dropped
            return None
        for record in records:
            record.slot = self._free.popleft()
        return records

    def adopt(self, slot: int, content: Content) -> None:
        """Book a free slot that holds content already."""
        self._free.remove(slot)
        record = Record(content, slot, ready=True)
        self._records[content] = record
        self._rest(record)

    def commit(self, record: Record, checksum: int | None) -> bool:
        """The copy into a record has ended well; False: it was dropped meanwhile, and its slot is free now."""
        if record.dropped:
            self._free_slot(record)
            return False
        record.ready, record.checksum = True, checksum
        self._rest(record)
        return True

    def roll_back(self, record: Record) -> None:
        """The copy into a record has ended and left nothing of use."""
        if not record.dropped:
            del self._records[record.content]
            self._leaving += 1
        self._free_slot(record)

    def drop(self, content: Content) -> None:
        """Take content out of the books, whatever its state; unknown content is ignored."""
        record = self._records.pop(content, None)
        if record is None:
            return
        record.dropped = True
        self._leaving += 1
        self._idle.pop(content, None)
        if record.ready and not record.readers:
            self._free_slot(record)

    def pin(self, record: Record) -> None:
        """A copy begins to read a ready record."""
        record.readers += 1
        self._idle.pop(record.content, None)

    def unpin(self, record: Record) -> None:
        """The copy has ended."""
        record.readers -= 1
        if record.readers:
            return
        if record.dropped:
            self._free_slot(record)
        else:
            self._rest(record)

    def touch(self, content: Content) -> None:
        """Content was asked for, here or in the pool."""
        record = self._idle.get(content)
        if record is not None:
            record.uses = min(MAX_USES, record.uses + 1)
            self._idle.move_to_end(content)

    def next_out(self, count: int) -> list[Record]:
        """Who would leave next, about in this order; at most `count`."""
        found: dict[Content, Record] = {}
        for record in self._idle.values():
            for content in _tail_first(record.content, self._idle):
                found.setdefault(content, self._idle[content])
                if len(found) >= count:
                    return [*found.values()]
        return [*found.values()]

    # -- parts ---------------------------------------------------------------------------------------------------

    def _rest(self, record: Record) -> None:
        if not isinstance(record.content, OwnBlock):
            self._idle[record.content] = record

    def _free_slot(self, record: Record) -> None:
        self._leaving -= 1
        self._free.append(record.slot)

    def _evict(self) -> None:
        for _ in range(MAX_SECOND_CHANCES):
            oldest = next(iter(self._idle.values()))
            if not oldest.uses:
                break
            oldest.uses //= 2
            self._idle.move_to_end(oldest.content)
        victim = _last_of_chain(next(iter(self._idle)), self._idle)
        self.drop(victim)
        self._evicted(victim)

    def check_integrity(self) -> None:
        """Hold the books against each other.

        Raises:
            IntegrityError: the books contradict themselves.
        """
        slots = [record.slot for record in self] + [*self._free]
        require(len(slots) == len(set(slots)), "a slot is used twice")
        require(len(slots) + self._leaving == self.total, f"{self.total - len(slots)} slots are in no book")
        for content, record in self._records.items():
            require(record.content is content and not record.dropped, "a slot is booked for other content")
            free = record.ready and not record.readers and not isinstance(content, OwnBlock)
            require((content in self._idle) == free, "what may leave and what may not are mixed up")


def _last_of_chain(content: Content, among: OrderedDict[Content, Record]) -> Content:
    """Follow what chains from `content` as far as it is `among` these."""
    while isinstance(content, PrefixEntry):
        child = next((child for child in content.children if child in among), None)
        if child is None:
            break
        content = child
    return content


def _tail_first(content: Content, among: OrderedDict[Content, Record]) -> Iterator[Content]:
    """All that chains from `content` and is `among` these, each after what chains from it; then itself."""
    order, stack = [], [content]
    while stack:
        one = stack.pop()
        order.append(one)
        if isinstance(one, PrefixEntry):
            stack.extend(child for child in one.children if child in among)
    return reversed(order)
