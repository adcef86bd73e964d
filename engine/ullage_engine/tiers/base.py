"""What the engine's books ask of the memory below the pool, and the answer of an engine that has none.

Non-goals: moving bytes (`transfer`) and choosing what stays in a tier (`slots`).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ullage_engine.prefix import PrefixEntry

if TYPE_CHECKING:
    from ullage_engine.cell_table import CellTable
    from ullage_engine.sequence import Sequence


@dataclass(eq=False, slots=True)
class OwnBlock:
    """Content of one sequence's own block, which no other can use: an identity, without bytes."""

    filled: int
    """Tokens it holds; 0 for packed cells, whose rows are counted by cell."""


Content = PrefixEntry | OwnBlock
"""What a tier keeps in a slot. Compared by identity: an entry that was forgotten and published anew is another one."""


@dataclass(slots=True)
class Image:
    """A preempted sequence's cache as it was, kept below so that it comes back instead of being computed anew."""

    pieces: list[Content]
    """One for each block of the table that held tokens."""
    starts: list[int]
    computed: int
    dropped: int
    chain: PrefixEntry | None
    published: int
    publishing: bool
    settled_at: float | None
    packed: list[OwnBlock] = field(default_factory=list)
    """Whole blocks into which its cells were packed."""
    cells: CellTable | None = None
    """Which of their cells hold what; a block's number here is its place in `packed`."""
    own: list[OwnBlock] = field(default_factory=list)
    """Those of `pieces`, and all of `packed`: only this image refers to them."""


class LowerTier(Protocol):
    """The pool's side. None of these moves a byte or waits."""

    def holds(self, entry: PrefixEntry) -> bool:
        """Whether a tier has a whole copy, so that the block can be given up without losing its content."""
        ...

    def wanted(self, entry: PrefixEntry) -> None:
        """A block's content is worth a copy: it was published just now, or nobody refers to it any more."""
        ...

    def discard(self, entry: PrefixEntry) -> None:
        """The content is offered no more: copies of it are worthless."""
        ...


class Residency(Protocol):
    """The scheduler's side: where the content of sequences lies. None of these waits for a copy."""

    def usable(self, entries: list[PrefixEntry]) -> list[PrefixEntry]:
        """The first of a chain's entries that are in the pool, on their way, or can be loaded now."""
        ...

    def load(self, sequence: Sequence, entries: list[PrefixEntry]) -> None:
        """Give a block, and a reference to it, to entries without one (`usable`, with room for them in the pool);
        start the copies. `sequence.loading` counts the blocks on their way, those that others asked for included.
        """
        ...

    def prefetch(self, entries: list[PrefixEntry]) -> None:
        """These are about to be asked for: bring them nearer, without taking blocks of the pool."""
        ...

    def preempted(self, sequence: Sequence) -> Image | None:
        """Store what a sequence holds, before its blocks are released; None: it must be computed anew."""
        ...

    def resume(self, sequence: Sequence, reserve: int) -> bool:
        """Give a sequence its blocks back by its image, if blocks for all its tokens and `reserve` more are available.

        False: not now, and nothing changed; or never, and `sequence.image` is None.
        """
        ...

    def left(self, sequence: Sequence) -> None:
        """A sequence gives its blocks up (they are released next): it waits for no copy any more."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """A sequence will never come back: its image is worthless."""
        ...

    def overwritten(self, blocks: list[int]) -> None:
        """The bytes of these blocks change now: what stores under way read of them is worthless."""
        ...

    def coming(self) -> int:
        """Blocks that will be available once copies under way have ended; their end is bounded."""
        ...


class NothingBelow:
    """No lower tier: what leaves the pool is gone. Implements both sides."""

    def holds(self, entry: PrefixEntry) -> bool:
        return False

    def wanted(self, entry: PrefixEntry) -> None:
        return None

    def discard(self, entry: PrefixEntry) -> None:
        return None

    def usable(self, entries: list[PrefixEntry]) -> list[PrefixEntry]:
        return entries

    def load(self, sequence: Sequence, entries: list[PrefixEntry]) -> None:
        return None

    def prefetch(self, entries: list[PrefixEntry]) -> None:
        return None

    def preempted(self, sequence: Sequence) -> Image | None:
        return None

    def resume(self, sequence: Sequence, reserve: int) -> bool:
        return False

    def left(self, sequence: Sequence) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        return None

    def overwritten(self, blocks: list[int]) -> None:
        return None

    def coming(self) -> int:
        return 0


def missing(entries: Several[PrefixEntry]) -> list[PrefixEntry]:
    """Those without a block in the pool."""
    return [entry for entry in entries if entry.block is None]
