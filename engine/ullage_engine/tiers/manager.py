"""Jobs between the tiers, in two phases: preparing one pins both its ends, and its end commits it or rolls it back.

Every job has a deadline. One that is late counts as failed at once, and whoever waits for it goes on without; what its
copy may still read or write stays out of use until the copy reports. Pure books: `now` comes from outside, copies are
made by a `TransferEngine`, and what a result means for blocks and sequences is `residency`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ullage_engine.integrity import require
from ullage_engine.prefix import PrefixEntry
from ullage_engine.tiers.base import Content
from ullage_engine.tiers.slots import Record, SlotTable
from ullage_engine.tiers.transfer import Copy, Done, Fault, Kind

Tier = Literal["host", "disk"]
LEAST_AHEAD = 8
"""Host slots, at least, whose content is copied to disk before they are needed; else an eighth of them all."""
MOST_AHEAD = 512
"""At most: they are gone through in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long copies may take, in seconds, and how many may be under way."""

    store_s: float = 10.0
    load_s: float = 2.0
    """Recomputing a block takes less than this on anything that serves."""
    spill_s: float = 30.0
    fetch_s: float = 2.0
    pause_s: float = 30.0
    """How long a tier that failed or was late is left alone."""
    stores: int = 64
    """Stores of prefixes under way at once; a preempted sequence is always stored whole."""
    spills: int = 8
    fetches: int = 64
    """Fetches ahead of need; what a sequence waits for is always fetched."""

    def of(self, kind: Kind) -> float:
        """Seconds that a copy may take."""
        return {"store": self.store_s, "load": self.load_s, "spill": self.spill_s, "fetch": self.fetch_s}[kind]


@dataclass(slots=True)
class TierTally:
    """Blocks, totals since the start; of a tier as the target of stores and the source of loads."""

    stored: int = 0
    loaded: int = 0
    hit_tokens: int = 0
    """Tokens that needn't be computed because this tier had them; once for each sequence that waited for them."""
    evicted: int = 0
    """Pushed out to make room."""
    failed: int = 0
    """Copies that failed or were late."""


@dataclass(eq=False, slots=True)
class Job:
    """One copy under way."""

    copy: Copy
    content: Content
    host: Record
    file: Record | None
    deadline: float
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended for those who wait for it."""

    job: Job
    fault: Fault | Literal["late"] | None = None
    message: str = ""


@dataclass(slots=True)
class TierManager:
    """Books of all lower tiers.

    Args:
        host_slots, disk_slots: sizes in blocks; no disk tier with 0.
        lost: told of each entry that no tier holds any more.
    """

    host_slots: int
    disk_slots: int
    lost: Callable[[PrefixEntry], None]
    bounds: Bounds = field(default_factory=Bounds)
    host: SlotTable = field(init=False)
    disk: SlotTable | None = field(init=False)
    tally: dict[Tier, TierTally] = field(default_factory=lambda: {"host": TierTally(), "disk": TierTally()})
    _jobs: dict[int, Job] = field(default_factory=dict)
    _tickets: int = 0
    _paused_until: dict[Tier, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host = SlotTable(self.host_slots, self._evicted("host"))
        self.disk = SlotTable(self.disk_slots, self._evicted("disk")) if self.disk_slots else None

    # -- reading -------------------------------------------------------------------------------------------------

    def where(self, content: Content, now: float) -> Tier | None:
        """The nearest tier that has the whole content and can be asked for it."""
        if self.host.holds(content) and not self._paused("host", now):
            return "host"
        on_disk = self.disk is not None and self.disk.holds(content) and not self._paused("disk", now)
        return "disk" if on_disk and not self.known(content) else None

    def holds(self, content: Content) -> bool:
        """Whether any tier has the whole content."""
        return self.host.holds(content) or (self.disk is not None and self.disk.holds(content))

    def known(self, content: Content) -> bool:
        """Whether the host tier has the content, or a copy of it is on its way there."""
        return self.host.find(content) is not None

    def coming(self, content: Content) -> bool:
        """Whether a copy of the content is on its way into the host tier."""
        record = self.host.find(content)
        return record is not None and not record.ready

    def under_way(self, kind: Kind) -> int:
        """Copies of a kind that have not been reported, late ones included."""
        return sum(job.copy.kind == kind for job in self._jobs.values())

    @property
    def expected(self) -> bool:
        """Whether any copy is under way and not late."""
        return any(not job.abandoned for job in self._jobs.values())

    def jobs(self) -> list[Job]:
        """All under way, late ones included."""
        return [*self._jobs.values()]

    def _paused(self, tier: Tier, now: float) -> bool:
        return now < self._paused_until.get(tier, now)

    # -- first phase ---------------------------------------------------------------------------------------------

    def store(self, blocks: dict[Content, int], now: float) -> list[Job] | None:
        """Copy blocks of the pool to the host tier; all or, where there is no room, none.

        The caller pins the blocks until each job's result.
        """
        records = None if self._paused("host", now) else self.host.reserve([*blocks])
        if records is None:
            return None
        return [self._begin("store", record, None, now, block=blocks[record.content]) for record in records]

    def load(self, content: Content, block: int, now: float) -> Job | None:
        """Copy content from the host tier into a block that nothing else uses; None where it is not there."""
        record = self.host.find(content)
        if record is None or not record.ready:
            return None
        self.host.pin(record)
        return self._begin("load", record, None, now, block=block, checksum=record.checksum)

    def fetch(self, entry: PrefixEntry, now: float) -> Job | None:
        """Copy an entry from disk to the host tier; None where it is not there, or there is no room."""
        file = self.disk.find(entry) if self.disk is not None else None
        if self.disk is None or file is None or not file.ready or self.known(entry) or self._paused("disk", now):
            return None
        self.disk.pin(file)  # before room is made, which might push it out
        records = self.host.reserve([entry])
        if records is None:
            self.disk.unpin(file)
            return None
        return self._begin("fetch", records[0], file, now)

    def spill(self, now: float) -> list[Job]:
        """Begin to copy to disk what would leave a nearly full host tier next."""
        ahead = min(max(LEAST_AHEAD, self.host.total // 8), MOST_AHEAD)
        room = self.bounds.spills - self.under_way("spill")
        if self.disk is None or self._paused("disk", now) or self.host.free >= ahead or room <= 0:
            return []
        return self._spill([record for record in self.host.next_out(ahead) if not record.passed_on], room, now)

    def spill_all(self, now: float) -> list[Job]:
        """Begin to copy to disk whatever is not there, as much as may be under way at once: the process will end."""
        room = self.bounds.spills - self.under_way("spill")
        if self.disk is None or self._paused("disk", now) or room <= 0:
            return []
        heads_first = self.host.next_out(self.host.total)[::-1]
        return self._spill(heads_first, min(room, self.disk.free), now)

    def _spill(self, candidates: list[Record], room: int, now: float) -> list[Job]:
        jobs: list[Job] = []
        disk = self.disk
        for record in candidates if disk is not None else ():
            entry = record.content
            if len(jobs) >= room:
                break
            if disk is None or not isinstance(entry, PrefixEntry) or disk.find(entry) is not None or record.dropped:
                continue
            record.passed_on = True
            self.host.pin(record)
            files = disk.reserve([entry])
            if files is None:
                self.host.unpin(record)
                break
            jobs.append(self._begin("spill", record, files[0], now, checksum=record.checksum))
        return jobs

    def _begin(
        self, kind: Kind, host: Record, file: Record | None, now: float, *, block: int = -1, checksum: int | None = None
    ) -> Job:
        self._tickets += 1
        entry = host.content if isinstance(host.content, PrefixEntry) else None
        copy = Copy(
            ticket=self._tickets,
            kind=kind,
            slot=host.slot,
            block=block,
            file=-1 if file is None else file.slot,
            entry=entry,
            checksum=checksum,
        )
        job = Job(copy, host.content, host, file, now + self.bounds.of(kind))
        self._jobs[copy.ticket] = job
        return job

    # -- second phase --------------------------------------------------------------------------------------------

    def settle(self, done: Done, now: float) -> Result:
        """A copy has ended: commit or roll back. The result of an abandoned job was told before."""
        job = self._jobs.pop(done.ticket)
        fault = done.fault
        if job.copy.kind in ("store", "fetch"):
            if fault is None and not job.abandoned:
                self.host.commit(job.host, done.checksum)
            else:
                self.host.roll_back(job.host)
        elif not (job.abandoned and job.copy.kind == "load"):
            self.host.unpin(job.host)
        self._settle_file(job, done)
        if not job.abandoned:
            self._count(job, fault, now)
            if fault == "corrupt":
                self._discard_source(job)
        if fault is not None:
            self._tell_if_lost(job.content)
        return Result(job, fault, done.message)

    def expire(self, now: float) -> list[Result]:
        """Abandon jobs past their deadline: they count as failed from now on."""
        late = [job for job in self._jobs.values() if now > job.deadline and not job.abandoned]
        return [self._abandon(job, now) for job in late]

    def _abandon(self, job: Job, now: float) -> Result:
        job.abandoned = True
        self._count(job, "unavailable", now)
        if job.copy.kind in ("store", "fetch"):
            self._drop_record(self.host, job.host)
        elif job.copy.kind == "load":
            self.host.unpin(job.host)  # it is only read: nothing wrong can come of its slot's next use
        elif self.disk is not None and job.file is not None:
            self._drop_record(self.disk, job.file)
        return Result(job, "late", f"not done in {self.bounds.of(job.copy.kind):g} s")

    def _settle_file(self, job: Job, done: Done) -> None:
        if self.disk is None or job.file is None:
            return
        if job.copy.kind == "fetch":
            self.disk.unpin(job.file)
        elif done.fault is None and not job.abandoned:
            self.disk.commit(job.file, done.checksum)
        else:
            self.disk.roll_back(job.file)

    def _count(self, job: Job, fault: Fault | None, now: float) -> None:
        kind = job.copy.kind
        tier: Tier = "host" if kind in ("store", "load") else "disk"
        tally = self.tally[tier]
        if fault is not None:
            tally.failed += 1
            if fault == "unavailable":
                self._paused_until[tier] = now + self.bounds.pause_s
        elif kind in ("store", "spill"):
            tally.stored += 1
        else:
            tally.loaded += 1

    def _discard_source(self, job: Job) -> None:
        """What was read is not what was written: never read it again."""
        if job.copy.kind in ("load", "spill"):
            self._drop_record(self.host, job.host)
        elif self.disk is not None and job.file is not None:
            self._drop_record(self.disk, job.file)

    def _drop_record(self, table: SlotTable, record: Record) -> None:
        if record.dropped:
            return
        table.drop(record.content)
        self._tell_if_lost(record.content)

    # -- content that comes and goes -----------------------------------------------------------------------------

    def restore(self, found: list[tuple[int, PrefixEntry]]) -> None:
        """Take up what a disk tier held before the process started: slots and their entries."""
        if self.disk is not None:
            for slot, entry in found:
                self.disk.adopt(slot, entry)

    def discard(self, content: Content) -> None:
        """Content that nobody will ask for again; copies under way end as they may."""
        self.host.drop(content)
        if self.disk is not None:
            self.disk.drop(content)

    def touch(self, content: Content) -> None:
        """Content was asked for."""
        self.host.touch(content)
        if self.disk is not None:
            self.disk.touch(content)

    def _evicted(self, tier: Tier) -> Callable[[Content], None]:
        def evicted(content: Content) -> None:
            self.tally[tier].evicted += 1
            self._tell_if_lost(content)

        return evicted

    def _tell_if_lost(self, content: Content) -> None:
        elsewhere = self.known(content) or (self.disk is not None and self.disk.find(content) is not None)
        if isinstance(content, PrefixEntry) and not elsewhere:
            self.lost(content)

    def check_integrity(self) -> None:
        """Hold books and jobs against each other.

        Raises:
            IntegrityError: books and jobs contradict each other.
        """
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()
        jobs = self._jobs.values()
        for record in self.host:
            writers = [job for job in jobs if job.host is record and job.copy.kind in ("store", "fetch")]
            readers = [j for j in jobs if j.host is record and j not in writers and not _let_go(j)]
            require(record.ready or len(writers) == 1, "a slot is being written by no copy")
            require(record.readers == len(readers), f"{record.readers} readers on the books, {len(readers)} copies")


def _let_go(job: Job) -> bool:
    """An abandoned load no longer keeps the slot that it reads."""
    return job.abandoned and job.copy.kind == "load"
