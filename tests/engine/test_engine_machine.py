"""Pool, prefix reuse, sequences, scheduler and eviction together, over random sequences of operations.

The runner stores numbers that depend on all earlier ones *as read back from the cache*, so a wrong slot anywhere
changes the answer; answers are compared with a model that never shares, waits, evicts or is preempted.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ullage_engine import budgets
from ullage_engine.budgets import Retention
from ullage_engine.fake_runner import expected_tokens, mix
from ullage_engine.policies import Needs, SequenceView
from ullage_engine.policies.recency import Recency
from ullage_engine.prefix import blake2b_128
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams, TokenOutput
from ullage_engine.speculation.ngram import NgramProposer

BLOCKS, SIZE, VOCABULARY = 12, 4, 3
GRID, CLASSES = (2, 2), ((0, 1), (2, 3))
HASHERS = {
    "good": blake2b_128,
    "weak": lambda data: bytes([sum(data) % 3]),
    "constant": lambda data: b"same",
}
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
BUDGETS = (None, None, 4, 9, 17, 0.25, 0.6, 1)


@dataclass(frozen=True)
class Uneven:
    """Scores that differ from head to head and prefer nothing sensible."""

    name: str = "uneven"
    needs: Needs = Needs.NOTHING

    def score(self, view: SequenceView) -> torch.Tensor:
        layer, head = (torch.arange(count) for count in GRID)
        odd = (layer[:, None, None] * 5 + head[None, :, None] * 3 + 1) * (view.positions.float() + 7)
        return (odd % 11) + head[None, :, None] * 2.0


POLICIES = (Recency(), Uneven(), Uneven("asking", Needs.QUERIES), Uneven("rereading", Needs.REREADING))
NAMES = [policy.name for policy in POLICIES]
RETENTION = Retention(interval=5, policies={policy.name: policy for policy in POLICIES})


@pytest.fixture(autouse=True)
def spread_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer a step, so that everything happens in the middle of cuts, too."""
    monkeypatch.setattr(budgets, "FITTED_ROWS", 1)


class EngineMachine(RuleBasedStateMachine):
    """Everything a server does to an engine, in any order."""

    make: Any

    @initialize(
        budget=st.integers(4, 24),
        sequences=st.integers(1, 4),
        reuse=st.booleans(),
        hasher=st.sampled_from([*HASHERS]),
        speculate=st.booleans(),
    )
    def build(self, budget: int, sequences: int, reuse: bool, hasher: str, speculate: bool) -> None:
        options = {"hasher": HASHERS[hasher], "proposer": NgramProposer() if speculate else None}
        options |= {"grid": GRID, "classes": CLASSES, "retention": RETENTION}
        self.engine, self.runner = type(self).make(
            BLOCKS, SIZE, VOCABULARY, budget, sequences, first=4, recent=4, reuse=reuse, **options
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=PROMPTS,
        count=st.integers(1, 20),
        forks=st.integers(0, 3),
        budget=st.sampled_from(BUDGETS),
        policy=st.sampled_from(NAMES),
    )
    def submit(self, prompt: list[int], count: int, forks: int, budget: float | None, policy: str) -> None:
        count = min(count, BLOCKS * SIZE - len(prompt))
        parent = f"r{len(self.requests)}"
        self.add(prompt, count, None, budget, policy)
        for fork in range(forks):
            self.add(prompt, max(1, count - fork), parent, budget, policy)

    def add(self, prompt: list[int], count: int, parent: str | None, budget: float | None, policy: str) -> None:
        name = f"r{len(self.requests)}"
        request = GenerationRequest(
            request_id=name,
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=count, temperature=0, stop_token_ids=self.stops(prompt)),
            fork_of=parent,
            kv_budget=None if budget is None else KvBudget.of(budget),
            kv_policy=policy,
        )
        self.requests[name], self.outputs[name] = request, []
        self.engine.add(request, self.outputs[name].append)

    def stops(self, prompt: list[int]) -> frozenset[int]:
        """Tokens that end the answer to a prompt."""
        return frozenset()

    @rule()
    def step(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 1 << 30))
    def abort(self, pick: int) -> None:
        name = sorted(self.requests)[pick % len(self.requests)]
        if not self.ended(name):
            self.aborted.add(name)
        self.engine.abort(name)

    @rule(ratio=st.floats(0.01, 1.0))
    def evict(self, ratio: float) -> None:
        plan = self.engine.evict(ratio=ratio, bytes_=None, dry_run=True)
        free = self.engine.pool.free
        report = self.engine.evict(ratio=ratio, bytes_=None, dry_run=False)
        assert self.engine.pool.free - free == report.blocks_freed, "the report and the pool disagree"
        assert report.bytes_freed == report.blocks_freed * self.runner.block_bytes
        assert plan.blocks_freed <= report.blocks_freed <= report.eligible_blocks
        assert report.blocks_freed >= min(report.requested_blocks, report.eligible_blocks)

    @rule(budget_ms=st.sampled_from([0, 1000]))
    def compact(self, budget_ms: int) -> None:
        spare, free = self.engine.scheduler.cells.spare_blocks(), self.engine.pool.free
        assert self.engine.snapshot(None, draining=False).cells.spare_blocks == spare
        report = self.engine.compact(budget_ms)
        assert report.blocks_freed == self.engine.pool.free - free == (spare if budget_ms else 0)
        assert report.remaining_blocks == spare - report.blocks_freed
        assert report.after.split_blocks == report.before.split_blocks - report.blocks_freed
        assert report.after.external <= report.before.external
        assert report.after.internal == report.before.internal

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    @invariant()
    def rows_are_the_sequences_own(self) -> None:
        running = self.engine.scheduler.running if hasattr(self, "engine") else []
        for sequence in (s for s in running if s.reads is None):
            values, value = [], 0
            for position, token in enumerate(sequence.tokens[: sequence.computed]):
                value = mix(value, token, position)
                values.append(value)
            for row in range(sequence.kept):
                index, offset = divmod(row, SIZE)
                for place in range(4):
                    stored = self.runner.slots[(sequence.table[index] * 4 + place) * SIZE + offset]
                    assert stored == values[sequence.starts[index] + offset], "a row holds another token's value"
            self.survivors_are_the_sequences_own(sequence, values)

    def survivors_are_the_sequences_own(self, sequence: Any, values: list[int]) -> None:
        """Each head's cells hold distinct tokens, in order, none of which a dense block holds too."""
        table = sequence.cells
        if table is None:
            return
        dense = {start + offset for start in sequence.starts for offset in range(SIZE)}
        for layer, head in itertools.product(range(2), range(2)):
            cells = [cell for cell in table.cells[layer, head].tolist() if cell >= 0]
            positions = table.positions[layer, head, : int(table.rows[layer, head])].tolist()
            assert len(cells) == -(-len(positions) // SIZE), "a head holds a cell too many or too few"
            assert len(set(positions) - dense) == len(positions), "a position is held twice"
            assert all(cell % 4 in CLASSES[layer] for cell in cells), "a cell of another class"
            stored = [self.runner.slots[cells[row // SIZE] * SIZE + row % SIZE] for row in range(len(positions))]
            assert stored == [values[position] for position in positions], "a survivor's value was not kept"

    def ended(self, name: str) -> bool:
        return bool(self.outputs[name]) and self.outputs[name][-1].finish_reason is not None

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if self.engine.idle:
                break
            self.engine.step()
        assert self.engine.idle, "work is stuck"
        assert self.engine.pool.active == 0, "blocks leak"
        assert self.engine.snapshot(None, draining=False).slots_filled == 0
        for name, request in self.requests.items():
            tokens = [output.token for output in self.outputs[name]]
            wanted, reason = self.wanted(request)
            assert tokens == (wanted[: len(tokens)] if name in self.aborted else wanted)
            assert name in self.aborted or self.outputs[name][-1].finish_reason == reason

    def wanted(self, request: GenerationRequest) -> tuple[list[int], str]:
        """The tokens of an answer, and why it ends."""
        return expected_tokens(request.prompt, request.sampling.max_tokens, VOCABULARY), "length"


def test_any_order_of_operations(fake_engine: Any) -> None:
    """Hypothesis: few operations, but a failure is shrunk to the shortest scene."""
    machine = type("Machine", (EngineMachine,), {"make": staticmethod(fake_engine)})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=50))


@pytest.mark.timeout(900)
def test_two_hundred_thousand_operations(fake_engine: Any) -> None:
    """Plain seeded random, far more of them (ULLAGE_TEST_OPERATIONS says how many); a failure names its seed."""
    machine = type("Machine", (EngineMachine,), {"make": staticmethod(fake_engine)})
    left, seed = int(os.environ.get("ULLAGE_TEST_OPERATIONS", "200000")), 0
    while left > 0:
        left -= _episode(machine, seed, min(left, 400))
        seed += 1


def _episode(machine: type[EngineMachine], seed: int, operations: int) -> int:
    random = Random(seed)
    one = machine()
    hasher = random.choice([*HASHERS])
    one.build(random.randint(4, 24), random.randint(1, 4), random.random() < 0.8, hasher, random.random() < 0.5)
    moves = {
        "step": lambda: one.step(),
        "submit": lambda: one.submit(
            [random.randint(0, 1) for _ in range(random.randint(1, 20))],
            random.randint(1, 20),
            random.choice([0, 0, 0, 1, 3]),
            random.choice(BUDGETS),
            random.choice(NAMES),
        ),
        "abort": lambda: one.requests and one.abort(random.randrange(1 << 30)),
        "evict": lambda: one.evict(random.uniform(0.01, 1.0)),
        "compact": lambda: one.compact(random.choice([0, 1000])),
    }
    for count in range(operations):
        move = random.choices([*moves], [70, 15, 5, 7, 3])[0]
        try:
            moves[move]()
            one.books_agree()
            one.rows_are_the_sequences_own()
        except Exception as error:
            raise AssertionError(f"seed {seed}, operation {count} ({move}): {error}") from error
    one.teardown()
    return operations
