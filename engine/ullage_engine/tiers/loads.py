"""Copies on their way up, and who waits for them: one for each block, however many sequences ask for it.

A sequence waits with `Sequence.loading` above zero, holding the blocks. What fails or is late is forgotten, and all its
waiters with it: they are handed back to be queued again. A late copy's block stays out of use until the copy ends.
Non-goals: what is stored (`residency`) and the tiers' books (`manager`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ullage_engine.integrity import require
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence
from ullage_engine.tiers.base import Content, OwnBlock
from ullage_engine.tiers.manager import Job, Result, Tier, TierManager


@dataclass(eq=False, slots=True)
class Loading:
    """A block on its way up, and who waits for it."""

    content: Content
    tier: Tier
    waiters: list[Sequence] = field(default_factory=list)
    job: Job | None = None
    """None while the content comes from the disk to the host tier first."""


class Loads:
    """All loads of one engine. Not thread-safe: the step loop alone touches it.

    Args:
        submit: begins copies.
        arrived: told of each sequence when the last block that it waited for is there.
        lost: told of each sequence whose load failed.
    """

    def __init__(
        self,
        pool: BlockPool,
        manager: TierManager,
        submit: Callable[[list[Job]], None],
        clock: Callable[[], float],
        *,
        arrived: Callable[[Sequence], None],
        lost: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
        self._manager = manager
        self._submit = submit
        self._clock = clock
        self._arrived_all = arrived
        self._lost = lost
        self._loading: dict[int, Loading] = {}
        """By block."""
        self._hopeless: list[int] = []
        """Blocks for whose content there was no room on its way; they fail in the next step."""
        self.failed: list[Sequence] = []
        """Running sequences whose loads failed, until `take_failed`: what they hold is of no use."""

    def loading(self, block: int) -> bool:
        """Whether content is on its way into a block."""
        return block in self._loading

    def take_failed(self) -> list[Sequence]:
        """Sequences whose loads failed, which must be queued again; each is handed out once."""
        failed, self.failed = self.failed, []
        return failed

    def give_up_hopeless(self) -> None:
        """Fail what found no room on its way; called before results are taken in, while no copy was begun for it."""
        for block in self._hopeless:
            self._failed(block, at_once=True)
        self._hopeless.clear()

    def receive(self, sequence: Sequence, contents: list[Content]) -> list[int]:
        """Blocks for content that lies below, each with one reference by a sequence, which waits for the copies."""
        if not contents:
            return []
        now = self._clock()
        tiers = {content: self._manager.where(content, now) or "disk" for content in contents}
        blocks = dict(zip(contents, self._pool.receive([_entry(content) for content in contents]), strict=True))
        for content, block in blocks.items():
            self._loading[block] = Loading(content, tiers[content])
        # first all that lie in host memory, which pins them there, then those that need room in it
        jobs = [job for content in contents if (job := self._begin_load(blocks[content])) is not None]
        jobs += [
            job
            for content in contents
            if isinstance(content, PrefixEntry)
            and not self._manager.known(content)
            and (job := self._manager.fetch(content, now)) is not None
        ]
        for content, block in blocks.items():
            self.wait_for(sequence, [block])
            if not self._manager.known(content):
                self._hopeless.append(block)
        self._submit(jobs)
        return [*blocks.values()]

    def _begin_load(self, block: int) -> Job | None:
        loading = self._loading[block]
        loading.job = self._manager.load(loading.content, block, self._clock())
        return loading.job

    def wait_for(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """Have a sequence that refers to these blocks wait for those that are on their way."""
        for block in blocks:
            loading = self._loading.get(block)
            if loading is not None and sequence not in loading.waiters:
                loading.waiters.append(sequence)
                sequence.loading += 1

    def left(self, sequence: Sequence) -> None:
        """A sequence gives its blocks up."""
        for loading in self._loading.values() if sequence.loading else ():
            if sequence in loading.waiters:
                loading.waiters.remove(sequence)
        sequence.loading = 0
        if sequence in self.failed:  # whoever it goes to now, `advance` has nothing to hand over
            self.failed.remove(sequence)

    def load_ended(self, result: Result) -> None:
        """A copy into the pool has ended, or is late."""
        block = result.job.copy.block
        if result.fault == "late":
            self._failed(block, at_once=False)
        elif result.job.abandoned:
            self._pool.received(block, 0)
        elif result.fault is not None:
            self._failed(block, at_once=True)
        else:
            self._arrived(block)

    def fetch_ended(self, result: Result) -> None:
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
        self._manager.tally[loading.tier].hit_tokens += filled * len(loading.waiters)
        for sequence in loading.waiters:
            sequence.loading -= 1
            if not sequence.loading:
                self._arrived_all(sequence)

    def _failed(self, block: int, *, at_once: bool) -> None:
        """What a block waits for will not come; without `at_once` a late copy may still write to it."""
        loading = self._loading.pop(block)
        self._pool.withdraw(block)
        for sequence in [*loading.waiters]:
            self.left(sequence)
            self._lost(sequence)
            self.failed.append(sequence)
        if at_once:
            self._pool.received(block, 0)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Hold blocks and waiters against all live sequences.

        Raises:
            IntegrityError: they contradict each other.
        """
        for sequence in sequences:
            waits = sum(sequence in loading.waiters for loading in self._loading.values())
            require(waits == sequence.loading, f"{sequence.request_id} waits for {waits}, counts {sequence.loading}")
        for block, loading in self._loading.items():
            require(self._pool.states()[block] == "L", f"block {block} is not loading")
            require(
                all(block in waiter.table + waiter.incoming for waiter in loading.waiters),
                f"block {block} has idle waiters",
            )


def _entry(content: Content) -> PrefixEntry | None:
    return content if isinstance(content, PrefixEntry) else None
