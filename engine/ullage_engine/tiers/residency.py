"""Where the content of blocks and sequences lies, and how it moves between the pool and the tiers below.

Published blocks are copied to the host tier as soon as they are full, while they are in use, so that the pool can give
them up at once later: that is what demotion costs nobody anything. A prompt whose prefix lies below is admitted at
once, with blocks that are LOADING; the step loop computes for others until they are there, and whoever asks for the
same prefix meanwhile waits for the same copies. What fails or is late is forgotten, and its waiters are queued again to
be computed.

Not thread-safe: the step loop alone touches it. It never waits, except `demote` and `close`, which say for how long.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_engine.integrity import require
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence
from ullage_engine.snapshot import TierState
from ullage_engine.tiers import images
from ullage_engine.tiers.base import Content, Image, OwnBlock, missing
from ullage_engine.tiers.manager import Job, Result, Tier, TierManager
from ullage_engine.tiers.packing import CellPacking
from ullage_engine.tiers.transfer import TransferEngine

log = logging.getLogger(__name__)

DEMOTE_S = 0.5
"""How long the step loop may wait for an operator's demotion."""
CLOSE_S = 5.0
"""How long the end of the process may wait for copies to disk."""


@dataclass(eq=False, slots=True)
class Loading:
    """A block on its way up, and who waits for it."""

    content: Content
    tier: Tier
    waiters: list[Sequence] = field(default_factory=list)
    job: Job | None = None
    """None while the content comes from the disk to the host tier first."""


class TieredResidency:
    """Implements `base.LowerTier` and `base.Residency` over lower tiers."""

    def __init__(
        self,
        pool: BlockPool,
        manager: TierManager,
        transfers: TransferEngine,
        clock: Callable[[], float],
        packing: CellPacking | None = None,
    ) -> None:
        self.manager = manager
        self._pool = pool
        self._transfers = transfers
        self._clock = clock
        self._packing = packing
        self._wanted: OrderedDict[PrefixEntry, None] = OrderedDict()
        """Published blocks to store, in order."""
        self._loading: dict[int, Loading] = {}
        """By block."""
        self._hopeless: list[int] = []
        """Blocks for whose content there was no room on its way; they fail in the next step."""
        self.failed: list[Sequence] = []
        """Running sequences whose loads failed: what they hold is of no use, and `advance` hands them over."""
        pool.lower = self

    # -- the pool's side -----------------------------------------------------------------------------------------

    def holds(self, entry: PrefixEntry) -> bool:
        return self.manager.holds(entry)

    def wanted(self, entry: PrefixEntry) -> None:
        if not self.manager.known(entry):
            self._wanted[entry] = None

    def discard(self, entry: PrefixEntry) -> None:
        self._wanted.pop(entry, None)
        self.manager.discard(entry)

    # -- the scheduler's side: prefixes --------------------------------------------------------------------------

    def usable(self, entries: list[PrefixEntry]) -> list[PrefixEntry]:
        now = self._clock()
        below = [entry for entry in missing(entries) if self.manager.host.holds(entry)]
        room = self.manager.host.available - len(below)  # what is loaded can't make room for what is fetched
        for count, entry in enumerate(entries):
            tier = self.manager.where(entry, now)
            if entry.block is not None or tier == "host" or self.manager.coming(entry):
                continue
            room -= 1
            if tier is None or room < 0:
                return entries[:count]
        return entries

    def load(self, sequence: Sequence, entries: list[PrefixEntry]) -> None:
        for entry in reversed(entries):
            self.manager.touch(entry)
        self._receive(sequence, [*missing(entries)])
        for entry in entries:
            if entry.block is not None:
                self._wait_for(sequence, entry.block)

    def _receive(self, sequence: Sequence, contents: list[Content]) -> list[int]:
        """Blocks for content below, with one reference, and the copies that fill them."""
        if not contents:
            return []
        now = self._clock()
        tiers = {content: self.manager.where(content, now) or "disk" for content in contents}
        blocks = dict(zip(contents, self._pool.receive([_entry(content) for content in contents]), strict=True))
        for content, block in blocks.items():
            self._loading[block] = Loading(content, tiers[content])
        # first all that lie in host memory, which pins them there, then those that need room in it
        jobs = [job for content in contents if (job := self._begin_load(blocks[content])) is not None]
        jobs += [
            job
            for content in contents
            if isinstance(content, PrefixEntry)
            and not self.manager.known(content)
            and (job := self.manager.fetch(content, now)) is not None
        ]
        for content, block in blocks.items():
            self._wait_for(sequence, block)
            if not self.manager.known(content):
                self._hopeless.append(block)
        self._submit(jobs)
        return [*blocks.values()]

    def _begin_load(self, block: int) -> Job | None:
        loading = self._loading[block]
        loading.job = self.manager.load(loading.content, block, self._clock())
        return loading.job

    def _wait_for(self, sequence: Sequence, block: int) -> None:
        loading = self._loading.get(block)
        if loading is not None and sequence not in loading.waiters:
            loading.waiters.append(sequence)
            sequence.loading += 1

    def prefetch(self, entries: list[PrefixEntry]) -> None:
        now = self._clock()
        room = self.manager.bounds.fetches - self.manager.under_way("fetch")
        away = [entry for entry in missing(entries) if not self.manager.known(entry)]
        self._submit([job for entry in away[: max(0, room)] if (job := self.manager.fetch(entry, now)) is not None])

    def left(self, sequence: Sequence) -> None:
        for loading in self._loading.values() if sequence.loading else ():
            if sequence in loading.waiters:
                loading.waiters.remove(sequence)
        sequence.loading = 0
        if sequence in self.failed:  # whoever it goes to now, `advance` has nothing to hand over
            self.failed.remove(sequence)

    def coming(self) -> int:
        now = self._clock()
        jobs = [job for job in self.manager.jobs() if not job.abandoned and job.deadline >= now]
        return sum(job.copy.block >= 0 and self._pool.references(job.copy.block) == 0 for job in jobs)

    # -- the scheduler's side: preempted sequences ---------------------------------------------------------------

    def preempted(self, sequence: Sequence) -> Image | None:
        if sequence in self.failed:
            return None  # its blocks never got what they were to hold
        if sequence.loading:
            return sequence.image  # nothing was computed since it came back: what lies below is still all
        image, fresh = images.of(sequence, self._pool, self.manager.known)
        if sequence.cells is None:
            return image if self._store_all(fresh) else None
        packed = None if self._packing is None else self._packing.pack(sequence.cells)
        if packed is None:
            return None
        blocks, image.cells = packed
        image.packed = [OwnBlock(0) for _ in blocks]
        image.own += image.packed
        stored = self._store_all(fresh | dict(zip(image.packed, blocks, strict=True)))
        self._pool.release(blocks)
        return image if stored else None

    def _store_all(self, blocks: dict[Content, int]) -> bool:
        """Begin to store all of these; False: there is no room, and none is."""
        jobs = self.manager.store(blocks, self._clock())
        for job in jobs or ():
            self._pool.pin(job.copy.block)
        self._submit(jobs or [])
        return jobs is not None

    def resume(self, sequence: Sequence, reserve: int) -> bool:
        image = sequence.image
        if image is None:
            return False
        if not self._complete(image):
            self.ended(sequence)
            return False
        if any(not self.manager.holds(own) for own in image.own):
            return False  # still being stored
        contents = [content for content in image.pieces if images.block_of(content) is None] + [*image.packed]
        resident = [piece for piece in image.pieces if isinstance(piece, PrefixEntry) and piece.block is not None]
        rows = len(sequence.tokens) - image.dropped
        growth = max(0, -(-rows // sequence.block_tokens) - len(image.pieces))
        if len(contents) + growth > self._pool.available - self._pool.idle(resident) - reserve:
            return False
        self._pool.share(resident)
        own = dict(zip(contents, self._receive(sequence, contents), strict=True))
        table = [own.get(content, images.block_of(content)) for content in image.pieces]
        incoming = [own[packed] for packed in image.packed]
        sequence.restore(image, [block for block in table if block is not None], incoming)
        for block in sequence.table:
            self._wait_for(sequence, block)
        if not sequence.loading:
            self.ended(sequence)
        return True

    def _complete(self, image: Image) -> bool:
        """Whether all of an image is there, in the pool or below."""
        entries = [content for content in image.pieces if isinstance(content, PrefixEntry)]
        return (
            all(self.manager.known(own) for own in image.own)
            and all(self._pool.index.offers(entry) for entry in entries)
            and len(self.usable(entries)) == len(entries)
        )

    def ended(self, sequence: Sequence) -> None:
        image, sequence.image = sequence.image, None
        for own in image.own if image is not None else ():
            self.manager.discard(own)

    # -- the engine's side ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is under way that will end within its bound."""
        return self.manager.expected

    def advance(self) -> list[Sequence]:
        """Take in what copies have ended, begin others; sequences whose loads failed, which must be queued again."""
        self._take_in()
        self._store_wanted()
        self._submit(self.manager.spill(self._clock()))
        failed, self.failed = self.failed, []
        return failed

    def demote(self, count: int) -> list[PrefixEntry]:
        """Of the `count` coldest cached blocks, those that lie below too, after waiting for at most `DEMOTE_S`."""
        end = self._clock() + DEMOTE_S
        self._wait_for_stores(end)
        entries = self._pool.coldest(count)
        for entry in entries:
            if not self.holds(entry):
                self._store(entry)
        self._wait_for_stores(end)
        return [entry for entry in entries if self.holds(entry)]

    def held(self, count: int) -> list[PrefixEntry]:
        """Of the `count` coldest cached blocks, those that lie below too already."""
        return [entry for entry in self._pool.coldest(count) if self.holds(entry)]

    def state(self, tier: Tier, block_bytes: int) -> TierState | None:
        """Size, fill and totals of a tier; None where there is none."""
        table, tally = self.manager.host if tier == "host" else self.manager.disk, self.manager.tally[tier]
        if table is None:
            return None
        return TierState(
            total_bytes=table.total * block_bytes,
            used_bytes=table.used * block_bytes,
            stored_blocks=tally.stored,
            loaded_blocks=tally.loaded,
            evicted_blocks=tally.evicted,
            failed_copies=tally.failed,
            hit_tokens=tally.hit_tokens,
        )

    def close(self, *, keep: bool) -> None:
        """End the copies; before, if `keep`, copy to disk what there is room and `CLOSE_S` for."""
        end = self._clock() + CLOSE_S
        while keep and (left := end - self._clock()) > 0:
            self._submit(self.manager.spill_all(self._clock()))
            if not self.manager.under_way("spill"):
                break
            self._transfers.wait(left)
            self._take_in()
        self._transfers.close()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in any thread, whenever `advance` has something to take in."""
        self._transfers.listen(listener)

    # -- results -------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        # first, while certainly no copy was begun for them
        for block in self._hopeless:
            self._failed(block, at_once=True)
        self._hopeless.clear()
        now = self._clock()
        results = [self.manager.settle(done, now) for done in self._transfers.finished()]
        results += self.manager.expire(now)
        _warn([result for result in results if result.fault is not None])
        for result in results:
            kind, block = result.job.copy.kind, result.job.copy.block
            if kind == "store" and (result.fault == "late") == result.job.abandoned:
                self._pool.unpin(block)
            elif kind == "load":
                self._load_ended(result)
            elif kind == "fetch":
                self._fetch_ended(result)

    def _load_ended(self, result: Result) -> None:
        block = result.job.copy.block
        if result.fault == "late":
            self._failed(block, at_once=False)
        elif result.job.abandoned:
            self._pool.received(block, 0)
        elif result.fault is not None:
            self._failed(block, at_once=True)
        else:
            self._arrived(block)

    def _fetch_ended(self, result: Result) -> None:
        """What came from the disk goes on to whoever waits for it; what an abandoned fetch brought is gone already."""
        content = result.job.content
        if result.job.abandoned and result.fault != "late":
            return
        for block in [b for b, loading in self._loading.items() if loading.content is content and loading.job is None]:
            job = self._begin_load(block)
            if job is None:
                self._failed(block, at_once=True)
            else:
                self._submit([job])

    def _arrived(self, block: int) -> None:
        loading = self._loading.pop(block)
        content = loading.content
        filled = content.filled if isinstance(content, OwnBlock) else self._pool.block_tokens
        self._pool.received(block, filled)
        self.manager.tally[loading.tier].hit_tokens += filled * len(loading.waiters)
        for sequence in loading.waiters:
            sequence.loading -= 1
            if not sequence.loading:
                self._complete_again(sequence)

    def _complete_again(self, sequence: Sequence) -> None:
        """All that a sequence waited for is there."""
        image = sequence.image
        if image is not None and image.cells is not None and self._packing is not None:
            sequence.cells = self._packing.unpack(image.cells, sequence.incoming)
            sequence.incoming = []
        self.ended(sequence)

    def _failed(self, block: int, *, at_once: bool) -> None:
        """What a block waits for will not come; without `at_once` a late copy may still write to it."""
        loading = self._loading.pop(block)
        self._pool.withdraw(block)
        for sequence in [*loading.waiters]:
            self.left(sequence)
            self.ended(sequence)
            self.failed.append(sequence)
        if at_once:
            self._pool.received(block, 0)

    # -- stores --------------------------------------------------------------------------------------------------

    def _store_wanted(self) -> None:
        # a block that only its store still uses is not available meanwhile: these must be few
        room = min(self.manager.bounds.stores, max(1, self._pool.total // 4)) - self.manager.under_way("store")
        while self._wanted and room > 0:
            entry, _ = self._wanted.popitem(last=False)
            room -= self._store(entry)

    def _store(self, entry: PrefixEntry) -> bool:
        """Begin to store a published block; False: it needs no copy, or can't have one."""
        if entry.block is None or self.manager.known(entry) or entry.block in self._loading:
            return False
        jobs = self.manager.store({entry: entry.block}, self._clock())
        if jobs is None:
            return False
        self._pool.pin(entry.block)
        self._submit(jobs)
        return True

    def _wait_for_stores(self, end: float) -> None:
        """Until nothing but its store uses a block any more, or the time is up."""
        while self.coming() and (left := end - self._clock()) > 0:
            self._transfers.wait(left)
            self._take_in()

    def _submit(self, jobs: list[Job]) -> None:
        if jobs:
            self._transfers.submit([job.copy for job in jobs])

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Hold what moves, who waits and what is kept against each other.

        Raises:
            IntegrityError: they contradict each other.
        """
        self.manager.check_integrity()
        for sequence in sequences:
            waits = sum(sequence in loading.waiters for loading in self._loading.values())
            require(waits == sequence.loading, f"{sequence.request_id} waits for {waits}, counts {sequence.loading}")
        own = {own for sequence in sequences if sequence.image is not None for own in sequence.image.own}
        kept = {record.content for record in self.manager.host if isinstance(record.content, OwnBlock)}
        require(kept <= own, "a slot keeps a block of a sequence that is gone")
        for block, loading in self._loading.items():
            require(self._pool.states()[block] == "L", f"block {block} is not loading")
            require(
                all(block in waiter.table + waiter.incoming for waiter in loading.waiters),
                f"block {block} has idle waiters",
            )


def _warn(failures: list[Result]) -> None:
    """One line for each kind of failure, however many blocks it took."""
    kinds = {(result.job.copy.kind, result.fault): result.message for result in reversed(failures)}
    for (kind, fault), message in kinds.items():
        count = sum((result.job.copy.kind, result.fault) == (kind, fault) for result in failures)
        log.warning("%s of %d KV blocks failed (%s): %s", kind, count, fault, message)


def _entry(content: Content) -> PrefixEntry | None:
    return content if isinstance(content, PrefixEntry) else None
