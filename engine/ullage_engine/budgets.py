"""Sequences with a budget: when each is cut, and the passes over it that its policy wants first.

A cut is due once a sequence is computed, and then whenever it has outgrown its budget by `interval` tokens. Policies
that rank by queries get a reader (`observation`): an ordinary running sequence to the scheduler, whose chunks share
steps with everybody's, one at a time in the whole engine; the sequence that is read waits for it and no other does.
Where values are fitted, that is spread over steps as well, some layers after each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ullage_engine.evictor import (
    NOTHING_EVICTED,
    Amend,
    Begun,
    CellStore,
    Evicted,
    Evictor,
    Keep,
    Plan,
    RowsLost,
)
from ullage_engine.layout import CacheLayout
from ullage_engine.observation import CacheView, KeyStore, QueryWatch, RereadWatch, amended
from ullage_engine.policies import Needs, Policy, mass, select
from ullage_engine.policies.recency import Recency
from ullage_engine.policies.refit import VECTORS, Sample
from ullage_engine.policies.reread import Rereading, readings
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams, TokenOutput
from ullage_engine.retention import Rows
from ullage_engine.scheduler import Scheduler
from ullage_engine.sequence import Sequence

log = logging.getLogger(__name__)

OBSERVED = 32
"""Last queries of a sequence that policies get to see, at least."""
REREAD_CHUNK = 512
"""Tokens of a context that one pass of a re-reading repeats."""
FITTED_ROWS = 4096
"""Rows of heads that are fitted after one step, at least those of one layer: everybody waits for them."""
PER_ENTRY = 48
"""Bytes: position and flags, scores of a re-reading and of a policy, and what sorting these takes."""
FLOOR = 4
"""Candidates that every head keeps, as far as the budget allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What sequences keep where their request does not say otherwise."""

    budget: KvBudget | None = None
    """None: everything."""
    policy: str = "recency"
    interval: int = 256
    """Tokens by which a decoding sequence may outgrow its budget before it is cut again."""
    policies: Mapping[str, Policy] = field(default_factory=lambda: {"recency": Recency()})
    instruction: tuple[int, ...] = (0,)
    """Tokens that ask the model to repeat the context."""
    inverse_frequencies: torch.Tensor | None = None
    """[D / 2] or fewer: of the model's rotary embedding; None: unknown."""


def workspace_bytes(layout: CacheLayout, context: int) -> int:
    """Bytes that cutting a sequence of `context` tokens takes: `PER_ENTRY` of each (layer, head, token), and logits.

    Besides them a sample of queries in all layers, and what fitting one head's values to it takes: its logits and
    probabilities, and products of queries. Keys and values of one layer are in `CacheLayout.workspace_bytes`.
    """
    rows = layout.blocks_for(context) * layout.block_tokens
    scoring = rows * layout.cells_per_block * PER_ENTRY + 12 * mass.TILE
    sampled = VECTORS * layout.cells_per_block * layout.head_size * 4
    return scoring + sampled + 4 * VECTORS * (3 * rows + 2 * VECTORS) + 4 * rows * layout.kv_heads * layout.head_size


class Store(CellStore, KeyStore, Protocol):
    """The bytes of cells, and the numbers they stand for."""


@dataclass(eq=False, slots=True)
class _Pass:
    """Tokens that a reader computes: those of `tokens` that its shared rows do not cover."""

    tokens: list[int]
    blocks: int
    """Of the parent's table that it shares."""
    rows: int
    """Rows of those blocks that count."""
    start: int
    """Position of the first token it computes."""
    observed: int
    """Position of the first query that counts."""


@dataclass(eq=False, slots=True)
class _Cutting:
    """A cut that has begun. Its fresh cells are those of a reader that computes nothing, only holds blocks in place."""

    plan: Plan
    taken: int
    """Blocks that were split for the fresh cells."""
    layers: int = 0
    """Layers that are filled."""


@dataclass(eq=False, slots=True)
class _Reading:
    """A sequence that is being read."""

    sequence: Sequence
    policy: Policy
    passes: list[_Pass]
    """Still to be begun."""
    table_rows: torch.Tensor | None
    """Of its cell table at the beginning: another eviction meanwhile would make the scores another sequence's."""
    queries: QueryWatch
    scores: Rereading | None
    sample: Sample
    reader: Sequence | None = None
    cutting: _Cutting | None = None

    @property
    def found(self) -> torch.Tensor | None:
        return None if self.scores is None else self.scores.scores

    def amend(self, store: KeyStore) -> Amend | None:
        """Fits values where the context was read again."""
        return None if self.scores is None else partial(amended, store, self.sample)


@dataclass(slots=True)
class BudgetTally:
    """Totals since the start."""

    blocks: int = 0
    entries: dict[str, int] = field(default_factory=dict)
    """Rows of single heads that were dropped, by policy."""


class BudgetKeeper:
    """Not thread-safe: the step loop alone touches it."""

    def __init__(self, scheduler: Scheduler, evictor: Evictor, store: Store, retention: Retention) -> None:
        self._scheduler = scheduler
        self._evictor = evictor
        self._store = store
        self._retention = retention
        self._reading: _Reading | None = None
        self.tally = BudgetTally()

    @property
    def cutting(self) -> bool:
        """Whether the next `keep` goes on with a cut."""
        return self._reading is not None and self._reading.cutting is not None

    def keep(self) -> list[Sequence]:
        """Do what is due between two steps; returns sequences whose content was lost in it.

        A policy that fails costs nothing but the cut: its sequence goes on with all that it has.
        """
        lost = []
        for sequence in tuple(self._scheduler.running):
            try:
                self._tend(sequence)
            except Exception as error:
                log.exception("request %s could not be cut to its budget", sequence.request_id)
                sequence.settled_at = sequence.kept_tokens
                if self._reading is not None and self._reading.sequence is sequence:
                    self._stop(self._reading)
                if isinstance(error, RowsLost):
                    lost.append(sequence)
        if self._reading is not None and self._reading.sequence not in self._scheduler.running:
            self._stop(self._reading)
        return lost

    def ceiling(self, sequence: Sequence) -> float | None:
        """Tokens that a sequence keeps at most once it is computed, as far as cuts are made in time; None: all."""
        budget = self._budget(sequence)
        if budget is None or sequence.reads is not None:
            return None
        limit = budget.limit(len(sequence.tokens) + sequence.remaining)
        return max(limit, sequence.settled_at or 0.0) + self._retention.interval

    def _tend(self, sequence: Sequence) -> None:
        if self._reading is not None and self._reading.sequence is sequence:
            self._go_on(self._reading)
        elif sequence.reads is None:
            self._settle(sequence)

    # -- cuts ----------------------------------------------------------------------------------------------------

    def _settle(self, sequence: Sequence) -> None:
        limit, kept, before = self._limit(sequence), sequence.kept_tokens, sequence.settled_at
        if limit is None or not sequence.decoding or sequence.loading:
            return
        if before is not None and kept < max(limit, before) + self._retention.interval:
            return
        policy = self._retention.policies[sequence.request.kv_policy or self._retention.policy]
        if kept > limit and self._evictor.may_cut(sequence, limit):
            if policy.needs != Needs.NOTHING:
                if self._reading is None:
                    self._begin(sequence, policy)
                return
            self._book(policy, self._evictor.cut(sequence, limit, self._keeping(sequence, policy, QueryWatch(), None)))
        sequence.settled_at = sequence.kept_tokens

    def _limit(self, sequence: Sequence) -> float | None:
        budget = self._budget(sequence)
        return None if budget is None else budget.limit(sequence.computed)

    def _budget(self, sequence: Sequence) -> KvBudget | None:
        return sequence.request.kv_budget or self._retention.budget

    def _keeping(self, sequence: Sequence, policy: Policy, observed: QueryWatch, scores: torch.Tensor | None) -> Keep:
        """Chooses what a policy wants to keep within the budget."""
        limit = self._limit(sequence) or 0.0

        def keep(rows: Rows) -> torch.Tensor:
            view = CacheView(
                rows, sequence.computed, self._store, observed, scores, self._retention.inverse_frequencies
            )
            entries = int(limit * rows.exists[..., 0].numel()) - rows.protected
            return select(policy.score(view).cpu(), rows.candidates, entries, FLOOR)

        return keep

    def _keeping_of(self, reading: _Reading) -> Keep:
        return self._keeping(reading.sequence, reading.policy, reading.queries, reading.found)

    def _book(self, policy: Policy, evicted: Evicted) -> None:
        self.tally.blocks += evicted.blocks
        self.tally.entries[policy.name] = self.tally.entries.get(policy.name, 0) + evicted.entries

    # -- readings ------------------------------------------------------------------------------------------------

    def _begin(self, sequence: Sequence, policy: Policy) -> None:
        scores = None
        if policy.needs == Needs.REREADING:
            scores = Rereading(*Rows.of(sequence, [], *self._store.cell_grid).exists.shape)
        self._reading = _Reading(
            sequence=sequence,
            policy=policy,
            passes=self._rereading(sequence) if scores is not None else [_last_tokens(sequence)],
            table_rows=None if sequence.cells is None else sequence.cells.rows,
            queries=QueryWatch(),
            scores=scores,
            sample=Sample(sequence.computed, self._store.cell_grid[1]),
        )
        sequence.held = True
        self._next_pass(self._reading)

    def _rereading(self, sequence: Sequence) -> list[_Pass]:
        """The context again, after itself."""
        context, used = sequence.tokens[: sequence.computed], -(-sequence.kept // sequence.block_tokens)
        return [
            _Pass([*context, *reading.tokens], used, sequence.kept, len(context), len(context) + reading.observed)
            for reading in readings(context, self._retention.instruction, chunk=REREAD_CHUNK)
        ]

    def _next_pass(self, reading: _Reading) -> None:
        part = reading.passes.pop(0)
        watch: QueryWatch | RereadWatch = reading.queries
        if reading.scores is not None:
            watch = RereadWatch(self._store, reading.scores, part.observed, reading.sample)
        reader = _reader(reading.sequence, part, watch)
        if isinstance(watch, RereadWatch):
            watch.reader = _Grid(reader, self._store.cell_grid)
        self._scheduler.read(reader)
        reading.reader = reader

    def _go_on(self, reading: _Reading) -> None:
        """Wait for the reader, begin the next pass, or go on cutting."""
        reader, sequence = reading.reader, reading.sequence
        rows = None if sequence.cells is None else sequence.cells.rows
        there = reader in self._scheduler.running
        if not sequence.held or rows is not reading.table_rows or not (there or reading.cutting):
            self._stop(reading)
            sequence.settled_at = sequence.kept_tokens
        elif reading.cutting is not None:
            self._fill(reading, reading.cutting) if there else self._cut(reading)
        elif reader is not None and reader.computed == len(reader.tokens):
            self._scheduler.finish(reader)
            if reading.passes:
                self._next_pass(reading)
            else:
                self._begin_cut(reading)

    def _begin_cut(self, reading: _Reading) -> None:
        """Take cells for the survivors; what holds them meanwhile keeps the sequence's blocks where they are, too."""
        if reading.scores is None:  # nothing is fitted, and copying is quick
            self._cut(reading)
            return
        sequence = reading.sequence
        plan = self._evictor.plan(sequence, self._limit(sequence) or 0.0, self._keeping_of(reading))
        if plan is None:
            self._end(reading, NOTHING_EVICTED)
        elif (begun := self._evictor.begin(plan)) is None:
            self._end(reading, self._evictor.carry_out(sequence, plan, reading.amend(self._store)))
        else:
            reading.cutting = _Cutting(plan, begun.taken)
            reading.reader = _reader(sequence, _whole_blocks(sequence), QueryWatch())
            reading.reader.coming = begun.fresh
            self._scheduler.read(reading.reader)

    def _fill(self, reading: _Reading, cutting: _Cutting) -> None:
        """Some layers more; after the last one the sequence gets its cells."""
        sequence, plan, reader = reading.sequence, cutting.plan, reading.reader
        if reader is None or reader.coming is None:
            raise RuntimeError(f"{sequence.request_id}: a cut that has begun lost its cells")
        first, layers = cutting.layers, self._store.cell_grid[0]
        cutting.layers = min(layers, first + max(1, FITTED_ROWS // plan.rows.exists.shape[-1]))
        amend = reading.amend(self._store)
        self._evictor.fill(sequence, plan, range(first, cutting.layers), reader.coming, amend)
        if cutting.layers == layers:
            fresh, reader.coming = reader.coming, None
            self._scheduler.finish(reader)
            if self._evictor.worth(sequence, plan, fresh):
                self._end(reading, self._evictor.switch(sequence, plan, Begun(fresh, cutting.taken)))
            else:
                self._scheduler.cells.release(fresh.held)
                self._end(reading, NOTHING_EVICTED)

    def _cut(self, reading: _Reading) -> None:
        """All at once."""
        sequence = reading.sequence
        limit, keep = self._limit(sequence) or 0.0, self._keeping_of(reading)
        self._end(reading, self._evictor.cut(sequence, limit, keep, reading.amend(self._store)))

    def _end(self, reading: _Reading, evicted: Evicted) -> None:
        self._stop(reading)
        self._book(reading.policy, evicted)
        reading.sequence.settled_at = reading.sequence.kept_tokens

    def _stop(self, reading: _Reading) -> None:
        if reading.reader in self._scheduler.running:
            self._scheduler.finish(reading.reader)
        reading.sequence.held = False
        self._reading = None


@dataclass(frozen=True, eq=False, slots=True)
class _Grid:
    """A reader's rows; implements `observation.Reader`."""

    sequence: Sequence
    cell_grid: tuple[int, int]

    def rows(self, coming: int) -> Rows:
        return Rows.of(self.sequence, [], *self.cell_grid, coming=coming)


def _last_tokens(sequence: Sequence) -> _Pass:
    """The last `OBSERVED` tokens and what comes before them in their block, in blocks without gaps between."""
    size, starts = sequence.block_tokens, sequence.starts
    used = -(-sequence.kept // size)
    first = used - 1
    while first > 0 and sequence.kept - first * size < OBSERVED and starts[first - 1] + size == starts[first]:
        first -= 1
    return _Pass(sequence.tokens[: sequence.computed], first, first * size, starts[first], 0)


def _whole_blocks(sequence: Sequence) -> _Pass:
    """Nothing to compute, over all blocks that are full."""
    full = sequence.kept // sequence.block_tokens
    rows = full * sequence.block_tokens
    end = rows + sequence.dropped
    return _Pass(sequence.tokens[:end], full, rows, end, end)


def _reader(parent: Sequence, part: _Pass, watch: QueryWatch | RereadWatch) -> Sequence:
    """A sequence that computes the tokens of a pass; its blocks and cells are its parent's."""
    request = GenerationRequest(
        request_id=f"{parent.request_id} (read)", prompt=tuple(part.tokens), sampling=SamplingParams(max_tokens=1)
    )
    reader = Sequence(request, _unheard, parent.arrival, part.tokens, parent.block_tokens, reads=watch)
    reader.table, reader.starts = parent.table[: part.blocks], parent.starts[: part.blocks]
    reader.computed, reader.dropped = part.start, part.start - part.rows
    reader.cells, reader.publishing = parent.cells, False
    return reader


def _unheard(_: TokenOutput) -> None:
    """Nobody waits for a reader's tokens, and it has none."""
