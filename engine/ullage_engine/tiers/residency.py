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

from ullage_engine.integrity import require
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence
from ullage_engine.snapshot import TierState
from ullage_engine.tiers import images
from ullage_engine.tiers.base import Content, Image, OwnBlock, missing
from ullage_engine.tiers.loads import Loads
from ullage_engine.tiers.manager import Job, Result, Tier, TierManager
from ullage_engine.tiers.packing import CellPacking
from ullage_engine.tiers.transfer import TransferEngine

log = logging.getLogger(__name__)

DEMOTE_S = 0.5
"""How long the step loop may wait for an operator's demotion."""
CLOSE_S = 5.0
"""How long the end of the process may wait for copies to disk."""


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
        self._loads = Loads(pool, manager, self._submit, clock, arrived=self._arrived, lost=self.ended)
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
        self._loads.receive(sequence, [*missing(entries)])
        self._loads.wait_for(sequence, [entry.block for entry in entries if entry.block is not None])

    def prefetch(self, entries: list[PrefixEntry]) -> None:
        now = self._clock()
        room = self.manager.bounds.fetches - self.manager.under_way("fetch")
        away = [entry for entry in missing(entries) if not self.manager.known(entry)]
        self._submit([job for entry in away[: max(0, room)] if (job := self.manager.fetch(entry, now)) is not None])

    def left(self, sequence: Sequence) -> None:
        self._loads.left(sequence)

    def overwritten(self, blocks: list[int]) -> None:
        changed = set(blocks)
        for job in self.manager.jobs():
            if job.copy.kind == "store" and job.copy.block in changed:
                self.manager.discard(job.content)

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
        own = dict(zip(contents, self._loads.receive(sequence, contents), strict=True))
        table = [own.get(content, images.block_of(content)) for content in image.pieces]
        incoming = [own[packed] for packed in image.packed]
        sequence.restore(image, [block for block in table if block is not None], incoming)
        self._loads.wait_for(sequence, sequence.table)
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
    def failed(self) -> list[Sequence]:
        """Running sequences whose loads failed: what they hold is of no use, and `advance` hands them over."""
        return self._loads.failed

    @property
    def busy(self) -> bool:
        """Whether anything is under way that will end within its bound."""
        return self.manager.expected

    def advance(self) -> list[Sequence]:
        """Take in what copies have ended, begin others; sequences whose loads failed, which must be queued again."""
        self._take_in()
        self._store_wanted()
        self._submit(self.manager.spill(self._clock()))
        return self._loads.take_failed()

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
        self._loads.give_up_hopeless()
        now = self._clock()
        results = [self.manager.settle(done, now) for done in self._transfers.finished()]
        results += self.manager.expire(now)
        _warn([result for result in results if result.fault is not None])
        for result in results:
            kind, block = result.job.copy.kind, result.job.copy.block
            if kind == "store" and (result.fault == "late") == result.job.abandoned:
                self._pool.unpin(block)
            elif kind == "load":
                self._loads.load_ended(result)
            elif kind == "fetch":
                self._loads.fetch_ended(result)

    def _arrived(self, sequence: Sequence) -> None:
        """All that a sequence waited for is there."""
        image = sequence.image
        if image is not None and image.cells is not None and self._packing is not None:
            sequence.cells = self._packing.unpack(image.cells, sequence.incoming)
            sequence.incoming = []
        self.ended(sequence)

    # -- stores --------------------------------------------------------------------------------------------------

    def _store_wanted(self) -> None:
        # a block that only its store still uses is not available meanwhile: these must be few
        room = min(self.manager.bounds.stores, max(1, self._pool.total // 4)) - self.manager.under_way("store")
        while self._wanted and room > 0:
            entry, _ = self._wanted.popitem(last=False)
            room -= self._store(entry)

    def _store(self, entry: PrefixEntry) -> bool:
        """Begin to store a published block; False: it needs no copy, or can't have one."""
        if entry.block is None or self.manager.known(entry) or self._loads.loading(entry.block):
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
        own = {own for sequence in sequences if sequence.image is not None for own in sequence.image.own}
        kept = {record.content for record in self.manager.host if isinstance(record.content, OwnBlock)}
        require(kept <= own, "a slot keeps a block of a sequence that is gone")
        self._loads.check_integrity(sequences)


def _warn(failures: list[Result]) -> None:
    """One line for each kind of failure, however many blocks it took."""
    kinds = {(result.job.copy.kind, result.fault): result.message for result in reversed(failures)}
    for (kind, fault), message in kinds.items():
        count = sum((result.job.copy.kind, result.fault) == (kind, fault) for result in failures)
        log.warning("%s of %d KV blocks failed (%s): %s", kind, count, fault, message)
