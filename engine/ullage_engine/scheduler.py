"""Who computes what in the next step: decode first, then prefill in chunks, then admission.

Pure bookkeeping on sequences and the pool: no tensors, no clock, no model. One pass:

1. every running sequence gets the tokens it awaits, as far as the token budget goes, decoding ones first; where
   blocks run out, the running sequence that costs least is preempted (see `preemption_cost`), never the oldest, which
   therefore always makes progress; a block that others share is copied before it is appended to;
   A sequence whose blocks are still being loaded from a lower tier holds them and computes nothing;
2. waiting requests are admitted when the blocks for *all* their tokens are available, reclaimable ones counted and
   one block left for each running sequence. A blocked request is passed over by smaller later ones, but only
   `MAX_PASSED_OVER` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ullage_engine.cells import CellPool
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft
from ullage_engine.tiers.base import NothingBelow, Residency, missing

MAX_PASSED_OVER = 64
"""Admissions of others that a blocked request tolerates before nobody may pass it."""
READER_TOKENS = 128
"""Tokens of a reader in one step: scoring costs several times what computing does, and all wait for the step."""
MAX_SCANNED = 32
"""Waiting requests looked at in one pass."""
PREFETCHED = 4
"""Waiting requests whose prompts are brought nearer from the slowest tier."""
NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in this step, and perhaps drafts of those that may follow."""

    sequence: Sequence
    count: int
    """Of the sequence's own tokens."""
    draft: Draft = NO_DRAFT
    """Proposed tokens after its newest one, computed along with it to be verified."""

    @property
    def width(self) -> int:
        """Tokens to compute, drafts included."""
        return self.count + len(self.draft.tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        start = self.sequence.computed
        return [*self.sequence.tokens[start : start + self.count], *self.draft.tokens]

    @property
    def completes(self) -> bool:
        """Whether the chunk reaches the newest token, so that its logits choose the next one."""
        return self.sequence.reads is None and self.sequence.computed + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class SchedulerTally:
    """Totals since the start."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Queue, running set and their claim on the pool. Not thread-safe.

    Args:
        cells: the pool's cells, for evicted sequences; None: a block is a single cell.
        residency: what lies below the pool; None: nothing.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        prefix_reuse: bool,
        cells: CellPool | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.cells = cells or CellPool(pool, [(0,)])
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._prefix_reuse = prefix_reuse
        self._residency = residency or NothingBelow()
        self.waiting: list[Sequence] = []
        """In order of arrival."""
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.tally = SchedulerTally()
        self.hopeless: list[Sequence] = []
        """Waiting sequences that were found to need more blocks than there are."""
        self._copies: dict[int, int] = {}
        """Blocks to copy before the planned step, source by target."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def live(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        _insert(self.waiting, sequence)

    def plan(self) -> list[Chunk]:
        """The next step's work; allocates the blocks it needs."""
        chunks: list[Chunk] = []
        budget = self._max_batch_tokens
        computing = [sequence for sequence in self.running if not sequence.loading]
        for sequence in sorted(computing, key=lambda s: (not s.decoding, s.arrival)):
            count = min(budget, _wanted(sequence))
            if count and sequence in self.running and self._make_room(sequence, count):
                chunks.append(Chunk(sequence, count))
                budget -= count
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        budget = self._max_batch_tokens - sum(chunk.count for chunk in chunks)
        for sequence in self._admit(budget):
            count = min(budget, len(sequence.tokens) - sequence.computed)
            chunks.append(Chunk(sequence, count))
            budget -= count
        self._prefetch()
        return chunks

    def with_drafts(self, chunks: list[Chunk], drafts: Mapping[Sequence, Draft]) -> list[Chunk]:
        """A plan with as much of the drafts as its token budget and blocks that are free anyway allow.

        Nobody is preempted or kept waiting for a draft, nor is a cached block given up: what a draft takes, `trim`
        gives back in the same step.
        """
        left = self._max_batch_tokens - sum(chunk.count for chunk in chunks)
        planned = []
        for chunk in chunks:
            draft = drafts.get(chunk.sequence, NO_DRAFT).first(left)
            draft = draft.first(self._spare_room(chunk, len(draft.tokens)))
            left -= len(draft.tokens)
            planned.append(Chunk(chunk.sequence, chunk.count, draft))
        return planned

    def trim(self, sequence: Sequence, coming: int = 0) -> None:
        """Give back blocks beyond those for the computed tokens and `coming` more."""
        self._pool.release(sequence.drop_tail(coming))

    def plan_ahead(self, chunks: list[Chunk]) -> list[Chunk]:
        """The step after one that decodes `chunks` and is not booked yet, with blocks for it; empty where it depends on
        that step's tokens: a request waits for the place that one may leave, or blocks are too few for all.
        """
        going = [chunk.sequence for chunk in chunks if chunk.sequence.remaining > 1]
        full = len(going) == self._max_sequences
        if len(chunks) < len(self.running) or (self.waiting and not full):
            return []
        missing = [max(0, self._missing(sequence, 2)) for sequence in going]
        if sum(missing) > self._pool.available:
            return []
        for sequence, count in zip(going, missing, strict=True):
            sequence.append_blocks(self._pool.allocate(count))
        return [Chunk(sequence, 1) for sequence in going]

    def computed(self, sequence: Sequence, count: int) -> None:
        """Book `count` more tokens whose keys and values are now in the cache; publishes blocks that became full."""
        before = sequence.kept
        self._count_reuse(sequence)
        recomputed = min(sequence.recompute_until, sequence.computed + count) - sequence.computed
        self.tally.recomputed_tokens += max(0, recomputed)
        sequence.computed += count
        size = sequence.block_tokens
        for index in range(before // size, -(-sequence.kept // size)):
            self._pool.set_filled(sequence.table[index], min(size, sequence.kept - index * size))
        self._publish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, whatever its state, and give its blocks back."""
        self._residency.left(sequence)
        self._residency.ended(sequence)
        self._release_cells(sequence)
        self._pool.release(sequence.take_blocks())
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _release_cells(self, sequence: Sequence) -> None:
        cells = sequence.take_cells()
        if sequence.reads is None:  # else they are its parent's
            self.cells.release(cells)
        if sequence.coming is not None:
            self.cells.release(sequence.coming.held)
            sequence.coming = None

    # -- room for the running ones -------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, preempting others until they are there; False: not in this step."""
        while (missing := self._missing(sequence, count)) > self._pool.available:
            if missing <= self._pool.available + self._residency.coming():
                return False
            victim = self._victim()
            self.preempt(victim)
            if victim is sequence:
                return False
        if self._tail_is_shared(sequence):
            self._own_tail(sequence)
        missing = self._missing(sequence, count)
        if missing > 0:
            sequence.append_blocks(self._pool.allocate(missing))
        return True

    def _spare_room(self, chunk: Chunk, wanted: int) -> int:
        """How many of `wanted` drafted tokens have a place, in the table's blocks and in free ones."""
        sequence, end = chunk.sequence, chunk.sequence.kept + chunk.count
        blocks = min(self._blocks_for(end + wanted) - len(sequence.table), self._pool.free)
        if wanted and blocks > 0:
            sequence.append_blocks(self._pool.allocate(blocks))
        return min(wanted, sequence.capacity - end)

    def _missing(self, sequence: Sequence, count: int) -> int:
        return self._blocks_for(sequence.kept + count) - len(sequence.table) + self._tail_is_shared(sequence)

    def _tail_is_shared(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a begun block that others read too."""
        index, offset = divmod(sequence.kept, sequence.block_tokens)
        return offset > 0 and self._pool.references(sequence.table[index]) > 1

    def coming_copies(self) -> int:
        """Blocks that running sequences will take to copy a begun block that they share; the last holder keeps it."""
        tails = Counter(s.table[s.kept // s.block_tokens] for s in self.running if self._tail_is_shared(s))
        return sum(count - (self._pool.references(block) == count) for block, count in tails.items())

    def _own_tail(self, sequence: Sequence) -> None:
        """Copy on write: the begun block is replaced by a copy of the sequence's own."""
        index, offset = divmod(sequence.kept, sequence.block_tokens)
        [copy] = self._pool.allocate(1)
        self._pool.set_filled(copy, offset)
        self._copies[copy] = sequence.table[index]
        self._pool.release([sequence.table[index]])
        sequence.table[index] = copy

    def take_copies(self) -> dict[int, int]:
        """Blocks that must be copied before the planned step computes, source by target; each is handed out once."""
        copies, self._copies = self._copies, {}
        return copies

    def _victim(self) -> Sequence:
        """The cheapest running sequence but the oldest; of equals the youngest."""
        others = self.running[1:] or self.running
        return min(reversed(others), key=lambda sequence: preemption_cost(sequence, self._pool))

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Start a child on its parent's computed prompt, sharing all blocks; False: no room to run, it is queued."""
        if len(self.running) >= self._max_sequences:
            self.add(child)
            return False
        self._pool.hold(child.follow(parent))
        self._count_reuse(child)
        _insert(self.running, child)
        return True

    def spoil(self, blocks: list[int]) -> None:
        """These blocks are about to be overwritten: their content is offered no more, and kept nowhere below."""
        for block in blocks:
            self._pool.withdraw(block)
        self._residency.overwritten(blocks)

    def read(self, reader: Sequence) -> None:
        """Run a sequence that shares its table's blocks with another, and that nobody waits for (`budgets`)."""
        self._pool.hold(reader.table)
        _insert(self.running, reader)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its blocks come back from a lower tier or are computed anew. Readers simply end."""
        if sequence.reads is not None:
            self.finish(sequence)
            return
        self.tally.preemptions += 1
        sequence.image = self._residency.preempted(sequence)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Back to the queue, since what it holds or waits for is of no use."""
        self._residency.left(sequence)
        self._release_cells(sequence)
        self._pool.release(sequence.reset())
        self.running.remove(sequence)
        _insert(self.waiting, sequence)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> Iterator[Sequence]:
        """Admit what fits; stops when `budget` tokens are spoken for."""
        blocked: list[Sequence] = []
        for sequence in self.waiting[:MAX_SCANNED]:
            if budget <= 0 or len(self.running) >= self._max_sequences:
                return
            if any(other.passed_over >= MAX_PASSED_OVER for other in blocked):
                return
            if not self._start(sequence):
                blocked.append(sequence)
                continue
            for other in blocked:
                other.passed_over += 1
            if not sequence.loading:
                budget -= min(budget, len(sequence.tokens) - sequence.computed)
                yield sequence

    def _start(self, sequence: Sequence) -> bool:
        """Move one waiting sequence to the running ones if its blocks are available."""
        reserve = len(self.running)
        if sequence.image is not None:
            if self._residency.resume(sequence, reserve):
                rows = len(sequence.tokens) - sequence.dropped
                sequence.append_blocks(self._pool.allocate(self._blocks_for(rows) - len(sequence.table)))
                self._run(sequence)
                return True
            if sequence.image is not None:
                return False
        if self._blocks_for(len(sequence.tokens)) > self._pool.total:
            self.hopeless.append(sequence)
            return False
        entries = self._residency.usable(self._known(sequence))
        fresh = self._blocks_for(len(sequence.tokens)) - len(entries)
        if fresh + len(missing(entries)) > self._pool.available - self._pool.idle(entries) - reserve:
            return False
        self._hold(sequence, entries, fresh)
        sequence.computed = sequence.published = len(entries) * sequence.block_tokens
        sequence.chain = entries[-1] if entries else None
        sequence.publishing = self._prefix_reuse
        self._run(sequence)
        return True

    def _hold(self, sequence: Sequence, entries: list[PrefixEntry], fresh: int) -> None:
        """Blocks for a sequence: those of `entries`, shared or loaded from below, and `fresh` ones."""
        # what is in the pool is held first, so that making room for the rest can't take it
        self._pool.share(entry for entry in entries if entry.block is not None)
        self._residency.load(sequence, entries)
        shared = [entry.block for entry in entries if entry.block is not None]
        sequence.append_blocks(shared + self._pool.allocate(fresh))

    def _run(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        _insert(self.running, sequence)

    # -- reuse ---------------------------------------------------------------------------------------------------

    def _known(self, sequence: Sequence) -> list[PrefixEntry]:
        """Published blocks that a sequence's tokens start with; the last token is always computed."""
        return self._pool.match(sequence.tokens[:-1], sequence.request.tenant) if self._prefix_reuse else []

    def _count_reuse(self, sequence: Sequence) -> None:
        """Before its first computation; one's own blocks after a preemption, or another's read, are no reuse."""
        if sequence.reuse_counted or sequence.reads is not None:
            return
        sequence.reuse_counted = True
        sequence.cached_tokens = sequence.computed
        self.tally.prefix_query_tokens += len(sequence.request.prompt)
        self.tally.prefix_hit_tokens += sequence.computed

    def _prefetch(self) -> None:
        """Bring nearer what will be asked for next; each request is looked up once."""
        for sequence in self.waiting[:PREFETCHED]:
            if not sequence.prefetched:
                sequence.prefetched = True
                self._residency.prefetch(self._known(sequence))

    def _publish(self, sequence: Sequence) -> None:
        size = sequence.block_tokens
        while sequence.publishing and sequence.published + size <= sequence.computed:
            start = sequence.published
            part = tuple(sequence.tokens[start : start + size])
            block = sequence.table[start // size]
            entry = self._pool.publish(sequence.chain, part, block, sequence.request.tenant)
            sequence.publishing = entry is not None
            if entry is not None:
                sequence.chain, sequence.published = entry, start + size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_tokens)


def _wanted(sequence: Sequence) -> int:
    """Tokens to compute next, as far as a step allows."""
    left = 0 if sequence.held else len(sequence.tokens) - sequence.computed
    return left if sequence.reads is None else min(left, READER_TOKENS)


def preemption_cost(sequence: Sequence, pool: BlockPool) -> float:
    """Tokens to recompute for each block that preempting frees; shared blocks neither cost nor free anything.

    A reader whose cells are being filled costs nothing: its sequence is cut without it.
    """
    if sequence.coming is not None:
        return 0.0
    own = sum(pool.references(block) == 1 for block in sequence.table)
    shared = (len(sequence.table) - own) * sequence.block_tokens
    freed = own + (sequence.cells.blocks if sequence.cells is not None else 0.0)
    return max(0, sequence.computed - shared) / freed if freed else float("inf")


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Keep order of arrival; new arrivals go to the end at once."""
    index = len(sequences)
    while index and sequences[index - 1].arrival > sequence.arrival:
        index -= 1
    sequences.insert(index, sequence)
