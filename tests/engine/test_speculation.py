"""Speculation leaves answers and books as they would be without it, on an engine without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch

from ullage_engine.fake_runner import EMPTY, expected_tokens
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft

VOCABULARY = 5


class Oracle:
    """Drafts the answer itself, each token wrong with a given chance, and holds the books against it at each call."""

    def __init__(self, wrong: float = 0.0, seed: int = 0) -> None:
        self._wrong = wrong
        self._random = Random(seed)
        self.asked: list[int] = []
        self.live: set[str] = set()

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        self.asked.extend(wanted.values())
        self.live |= {sequence.request_id for sequence in wanted}
        return {sequence: Draft(tuple(map(self._spoilt, self._next(sequence, k)))) for sequence, k in wanted.items()}

    def _next(self, sequence: Sequence, count: int) -> list[int]:
        assert sequence.decoding
        return expected_tokens(sequence.tokens, count, VOCABULARY)

    def _spoilt(self, token: int) -> int:
        return (token + 1) % VOCABULARY if self._random.random() < self._wrong else token

    def forget(self, sequence: Sequence) -> None:
        self.live.discard(sequence.request_id)

    def check_integrity(self) -> None:
        pass


def submit(
    engine: Any,
    name: str,
    prompt: list[int],
    count: int,
    sink: Callable[[TokenOutput], None] | None = None,
    **options: Any,
) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    sampling = SamplingParams(max_tokens=count, temperature=0, stop_token_ids=options.pop("stop", frozenset()))
    request = GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, **options)
    engine.add(request, sink or outputs.append)
    return outputs


def finish(engine: Any, limit: int = 3000) -> int:
    """Steps until idle; between two of them nothing uncommitted is anywhere."""
    for steps in range(limit):
        if engine.idle:
            assert engine.pool.active == 0, "blocks leak"
            return steps
        engine.step()
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            if sequence.decoding:
                assert len(sequence.table) == -(-sequence.kept // sequence.block_tokens), "draft blocks are kept"
        filled = engine.snapshot(None, draining=False).slots_filled
        assert filled <= sum(sequence.kept for sequence in engine.scheduler.running)
    pytest.fail(f"not idle after {limit} steps")


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [12, 13, 14, 15, 28, 31, 32])
def test_drafts_past_the_end_of_a_block(fake_engine: Any, length: int, wrong: float) -> None:
    engine, _ = fake_engine(blocks=6, block_tokens=16, budget=32, proposer=Oracle(wrong))
    prompt = [i % VOCABULARY for i in range(length)]
    outputs = submit(engine, "r", prompt, 40)
    finish(engine)
    assert tokens(outputs) == expected_tokens(prompt, 40, VOCABULARY)


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_requests_finish_at_every_offset_of_a_block(fake_engine: Any, wrong: float) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=8, proposer=Oracle(wrong))
    for count in range(1, 26):
        outputs = submit(engine, f"r{count}", [1] * 5, count)
        finish(engine)
        assert tokens(outputs) == expected_tokens([1] * 5, count, VOCABULARY)
        assert [output.finish_reason for output in outputs] == [None] * (count - 1) + ["length"]
    assert not engine._speculator._paces


def test_right_drafts_save_steps_and_wrong_ones_none(fake_engine: Any) -> None:
    def steps(proposer: Any) -> int:
        engine, _ = fake_engine(blocks=16, block_tokens=8, proposer=proposer)
        submit(engine, "r", [1, 2, 3], 60)
        return finish(engine)

    assert steps(None) == 60
    assert steps(Oracle(wrong=1.0)) == 60
    assert steps(Oracle()) == 1 + math.ceil(59 / 5)


def test_a_stop_token_within_an_accepted_run_ends_the_answer(fake_engine: Any) -> None:
    prompt = [2, 0, 1]
    whole = expected_tokens(prompt, 60, VOCABULARY)
    for stop in range(VOCABULARY):
        end = whole.index(stop)
        engine, _ = fake_engine(blocks=16, block_tokens=8, proposer=Oracle())
        outputs = submit(engine, "r", prompt, 60, stop=frozenset({stop}))
        finish(engine)
        assert tokens(outputs) == whole[: end + 1]
        assert outputs[-1].finish_reason == "stop"
        assert sum(output.finish_reason is not None for output in outputs) == 1


def test_published_blocks_hold_committed_tokens_only(fake_engine: Any) -> None:
    """What a speculating request leaves in the prefix cache is what a plain one leaves."""

    def left_behind(proposer: Any) -> set[tuple[int, ...]]:
        engine, _ = fake_engine(blocks=32, block_tokens=4, proposer=proposer)
        for count in (7, 21, 40):
            submit(engine, f"r{count}", [count % VOCABULARY] * 6, count)
            finish(engine)
        return {entry.tokens for entry in engine.pool.index}

    assert left_behind(Oracle(0.5)) == left_behind(None)
    assert left_behind(Oracle()) == left_behind(None)


def test_drafts_take_nothing_from_others(fake_engine: Any) -> None:
    """A full pool, cached blocks and a full budget: the same preemptions, admissions and hits as without drafts."""

    def play(proposer: Any) -> tuple[list[list[int]], int, list[list[str]]]:
        engine, _ = fake_engine(blocks=10, block_tokens=4, budget=4, sequences=4, proposer=proposer)
        outputs = [submit(engine, f"r{i}", [i % VOCABULARY] * 6, 14) for i in range(8)]
        running = []
        while not engine.idle:
            engine.step()
            running.append([sequence.request_id for sequence in engine.scheduler.running])
        return [tokens(output) for output in outputs], engine.scheduler.tally.preemptions, running

    plain = play(None)
    assert plain[1] > 0
    assert play(Oracle(wrong=1.0)) == plain


def test_drafts_take_free_blocks_only_and_fit_the_budget(fake_engine: Any) -> None:
    engine, runner = fake_engine(blocks=4, block_tokens=4, budget=6, proposer=Oracle())
    submit(engine, "old", [0] * 8, 1)
    finish(engine)
    assert engine.pool.cached == 2
    outputs = submit(engine, "r", [1] * 6, 10)
    computed, drafted = runner.forward, engine.scheduler.with_drafts

    def watched(chunks: Any) -> Any:
        assert sum(chunk.width for chunk in chunks) <= 6
        assert all(chunk.width <= chunk.sequence.capacity - chunk.sequence.kept for chunk in chunks)
        return computed(chunks)

    def keeping(chunks: Any, drafts: Any) -> Any:
        before = engine.pool.cached
        planned = drafted(chunks, drafts)
        assert engine.pool.cached == before, "a cached block was given up for a draft"
        return planned

    runner.forward, engine.scheduler.with_drafts = watched, keeping
    finish(engine)
    assert tokens(outputs) == expected_tokens([1] * 6, 10, VOCABULARY)


def test_a_request_can_switch_drafting_off(fake_engine: Any) -> None:
    oracle = Oracle()
    engine, _ = fake_engine(blocks=16, block_tokens=8, proposer=oracle)
    outputs = submit(engine, "r", [1, 2, 3], 20, speculation=False)
    assert finish(engine) == 20
    assert tokens(outputs) == expected_tokens([1, 2, 3], 20, VOCABULARY)
    assert not oracle.asked


def test_forks_speculate_each_on_its_own(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=24, block_tokens=4, budget=24, proposer=Oracle(0.2))
    outputs = [submit(engine, f"r{i}", [3] * 7, 20, fork_of="r0" if i else None) for i in range(4)]
    finish(engine)
    assert [tokens(output) for output in outputs] == [expected_tokens([3] * 7, 20, VOCABULARY)] * 4


def test_drafts_that_the_model_cannot_compute_cost_the_draft_alone(fake_engine: Any) -> None:
    def fail(chunk: Any) -> None:
        if chunk.draft.tokens:
            raise RuntimeError("no memory for so many rows")

    engine, _ = fake_engine(blocks=16, block_tokens=4, proposer=Oracle(), fail=fail)
    outputs = submit(engine, "r", [1, 2, 3], 20)
    finish(engine)
    assert tokens(outputs) == expected_tokens([1, 2, 3], 20, VOCABULARY)


def test_drafts_without_finite_logits_are_dropped_and_leave_nothing_in_the_cache(fake_engine: Any) -> None:
    engine, runner = fake_engine(blocks=16, block_tokens=4, proposer=Oracle())
    outputs = submit(engine, "r", [1, 2, 3], 20)
    computed = runner.forward
    drafted: list[list[int]] = []

    def poisoned(chunks: Any) -> torch.Tensor:
        logits: torch.Tensor = computed(chunks)
        [chunk] = chunks
        logits[2:] = float("nan")
        drafted.append(chunk.sequence.slots(chunk.width)[chunk.count :])
        return logits

    runner.forward = poisoned
    while not engine.idle:
        engine.step()
        if len(drafted[-1]) > 1:
            assert [runner.slots[slot] for slot in drafted[-1]] == [EMPTY] * len(drafted[-1])
    assert any(len(slots) > 1 for slots in drafted)
    assert tokens(outputs) == expected_tokens([1, 2, 3], 20, VOCABULARY)
    assert engine.pool.active == 0


def test_a_failing_proposer_is_left_alone_from_then_on(fake_engine: Any) -> None:
    class Failing(Oracle):
        def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
            super().propose(wanted)
            raise MemoryError

    failing = Failing()
    engine, _ = fake_engine(blocks=16, block_tokens=4, proposer=failing)
    outputs = submit(engine, "r", [1, 2, 3], 20)
    finish(engine)
    assert tokens(outputs) == expected_tokens([1, 2, 3], 20, VOCABULARY)
    assert len(failing.asked) == 1


def test_a_receiver_that_fails_within_an_accepted_run_ends_its_request(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4, proposer=Oracle())
    received: list[TokenOutput] = []

    def sink(output: TokenOutput) -> None:
        received.append(output)
        if len(received) == 8:
            raise RuntimeError("gone")

    submit(engine, "r", [1, 2, 3], 40, sink)
    other = submit(engine, "s", [4, 2], 30)
    finish(engine)
    assert len(received) == 8
    assert tokens(other) == expected_tokens([4, 2], 30, VOCABULARY)
    assert engine.tally.aborted == 1


def test_abort_and_preemption_between_two_steps(fake_engine: Any) -> None:
    oracle = Oracle(0.3)
    engine, _ = fake_engine(blocks=24, block_tokens=4, budget=24, proposer=oracle)
    random = Random(1)
    outputs = [submit(engine, f"r{i}", [i] * 5, 30) for i in range(5)]
    for _ in range(12):
        engine.step()
        if engine.scheduler.running and random.random() < 0.5:
            engine.scheduler.preempt(random.choice(engine.scheduler.running))
    engine.abort("r3")
    finish(engine)
    for i in (0, 1, 2, 4):
        assert tokens(outputs[i]) == expected_tokens([i] * 5, 30, VOCABULARY)
    assert not oracle.live


def test_figures_of_what_was_drafted_and_what_stood(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=8, proposer=Oracle())
    submit(engine, "r", [1, 2, 3], 1 + 5 + 5)
    lengths = []
    while not engine.idle:
        engine.step()
        lengths.extend(engine.accepted)
    counters = engine.snapshot(None, draining=False).counters
    assert lengths == [4, 4]
    assert (counters.drafted_tokens, counters.accepted_tokens) == (8, 8)
    assert counters.generated_tokens == 11
