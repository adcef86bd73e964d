"""Pool, prefix reuse, sequences, scheduler and eviction together, over random sequences of operations.

The runner stores numbers that depend on all earlier ones *as read back from the cache*, so a wrong slot anywhere
changes the answer; answers are compared with a model that never shares, waits, evicts or is preempted.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

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

from ullage_engine.fake_runner import expected_tokens, mix
from ullage_engine.prefix import blake2b_128
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.speculation.ngram import NgramProposer

BLOCKS, SIZE, VOCABULARY = 12, 4, 3
HASHERS = {
    "good": blake2b_128,
    "weak": lambda data: bytes([sum(data) % 3]),
    "constant": lambda data: b"same",
}
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


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
        self.engine, self.runner = type(self).make(
            BLOCKS, SIZE, VOCABULARY, budget, sequences, first=4, recent=4, reuse=reuse, **options
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.aborted: set[str] = set()

    @rule(prompt=PROMPTS, count=st.integers(1, 20), forks=st.integers(0, 3))
    def submit(self, prompt: list[int], count: int, forks: int = 0) -> None:
        count = min(count, BLOCKS * SIZE - len(prompt))
        parent = f"r{len(self.requests)}"
        self.add(prompt, count, None)
        for fork in range(forks):
            self.add(prompt, max(1, count - fork), parent)

    def add(self, prompt: list[int], count: int, parent: str | None) -> None:
        name = f"r{len(self.requests)}"
        sampling = SamplingParams(max_tokens=count, temperature=0)
        request = GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, fork_of=parent)
        self.requests[name], self.outputs[name] = request, []
        self.engine.add(request, self.outputs[name].append)

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

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    @invariant()
    def rows_are_the_sequences_own(self) -> None:
        for sequence in self.engine.scheduler.running if hasattr(self, "engine") else ():
            values, value = [], 0
            for position, token in enumerate(sequence.tokens[: sequence.computed]):
                value = mix(value, token, position)
                values.append(value)
            for row in range(sequence.kept):
                index, offset = divmod(row, SIZE)
                stored = self.runner.slots[sequence.table[index] * SIZE + offset]
                assert stored == values[sequence.starts[index] + offset], "a row holds another token's value"

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
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None))


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
        ),
        "abort": lambda: one.requests and one.abort(random.randrange(1 << 30)),
        "evict": lambda: one.evict(random.uniform(0.01, 1.0)),
    }
    for count in range(operations):
        move = random.choices([*moves], [70, 15, 5, 10])[0]
        try:
            moves[move]()
            one.books_agree()
            one.rows_are_the_sequences_own()
        except Exception as error:
            raise AssertionError(f"seed {seed}, operation {count} ({move}): {error}") from error
    one.teardown()
    return operations
