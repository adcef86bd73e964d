"""Decode steps launched before the tokens of the step before are known: answers are those of the synchronous loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from test_engine_machine import BLOCKS, BUDGETS, CLASSES, GRID, NAMES, RETENTION, SIZE, VOCABULARY, EngineMachine
from test_tier_machine import MOVES, Scene, episode

from ullage_engine.fake_device import FakeDevice
from ullage_engine.fake_runner import expected_tokens
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput


class AheadMachine(EngineMachine):
    """Everything a server does to an engine, with a device that is late; some answers end by a stop token."""

    @initialize(budget=st.integers(4, 24), sequences=st.integers(1, 4), reuse=st.booleans(), hasher=st.just("good"))
    def build(self, budget: int, sequences: int, reuse: bool, hasher: str) -> None:
        self.device = FakeDevice()
        options = {"grid": GRID, "classes": CLASSES, "retention": RETENTION, "device": self.device}
        self.engine, self.runner = type(self).make(
            BLOCKS, SIZE, VOCABULARY, budget, sequences, first=4, recent=4, reuse=reuse, **options
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.aborted: set[str] = set()

    def stops(self, prompt: list[int]) -> frozenset[int]:
        return frozenset({0}) if len(prompt) % 2 else frozenset()

    @rule(count=st.integers(1, 3))
    def device_works(self, count: int) -> None:
        self.device.run(count)

    def wanted(self, request: GenerationRequest) -> tuple[list[int], str]:
        tokens, reason = super().wanted(request)
        stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        return (tokens[: stops[0] + 1], "stop") if stops else (tokens, reason)


def test_any_order_of_operations_with_a_late_device(fake_engine: Callable[..., Any]) -> None:
    machine = type("Machine", (AheadMachine,), {"make": staticmethod(fake_engine)})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=50))


def test_long_random_scenes_with_a_late_device(fake_engine: Callable[..., Any]) -> None:
    machine = type("Machine", (AheadMachine,), {"make": staticmethod(fake_engine)})
    ahead = 0
    for seed in range(40):
        random = Random(seed)
        one = machine()
        one.build(random.randint(8, 24), random.randint(1, 4), random.random() < 0.8, "good")
        for _ in range(300):
            move = random.choices(["step", "submit", "abort", "evict", "device"], [75, 8, 3, 4, 10])[0]
            if move == "step":
                one.step()
                ahead += one.device.pending
            elif move == "submit":
                prompt = [random.randint(0, 1) for _ in range(random.randint(1, 12))]
                budget, policy = random.choice(BUDGETS), random.choice(NAMES)
                one.submit(prompt, random.randint(1, 20), 0, budget, policy)
            elif move == "abort" and one.requests:
                one.abort(random.randrange(1 << 30))
            elif move == "evict":
                one.evict(random.uniform(0.01, 1.0))
            else:
                one.device_works(random.randint(1, 3))
            one.books_agree()
            one.rows_are_the_sequences_own()
        one.teardown()
    assert ahead > 1000, "hardly any step was launched ahead"


class LateScene(Scene):
    """Memory tiers, budgets and preemptions besides, over a device that is late."""

    def device(self) -> FakeDevice:
        self.late = FakeDevice()
        self.ahead = 0
        return self.late

    def step(self) -> None:
        super().step()
        self.ahead += self.late.pending

    def device_works(self) -> None:
        self.late.run(self.random.randint(1, 3))


@pytest.mark.filterwarnings("default")
def test_steps_run_ahead_beside_copies_between_tiers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    moves = MOVES | {"device_works": 8}
    scenes = [episode(seed, 250, tmp_path / str(seed), LateScene, moves) for seed in range(30)]
    assert sum(scene.ahead for scene in scenes) > 300, "hardly any step was launched ahead"


def ask(engine: Any, name: str, prompt: list[int], count: int, **sampling: Any) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    params = SamplingParams(max_tokens=count, **{"temperature": 0.0} | sampling)
    engine.add(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=params), outputs.append)
    return outputs


def steady(fake_engine: Callable[..., Any], count: int = 2, **options: Any) -> tuple[Any, Any, FakeDevice, Any]:
    """An engine whose requests are all decoding, with a step in the air."""
    device = FakeDevice()
    engine, runner = fake_engine(**{"blocks": 32, "block_tokens": 4, "budget": 64} | options, device=device)
    outputs = [ask(engine, f"r{i}", [i, 1, 2], 12) for i in range(count)]
    while not device.pending:
        engine.step()
    return engine, runner, device, outputs


def test_the_next_step_is_launched_before_tokens_are_read(fake_engine: Callable[..., Any]) -> None:
    engine, _, device, outputs = steady(fake_engine)
    for _ in range(3):
        told = [len(output) for output in outputs]
        assert device.pending == 1, "nothing is in the air"
        engine.step()
        assert [len(output) for output in outputs] == [count + 1 for count in told], "a step gives each one token"
    while not engine.idle:
        engine.step()
    assert [[o.token for o in output] for output in outputs] == [expected_tokens([i, 1, 2], 12, 5) for i in range(2)]
    assert device.pending == 0, "a step was launched for sequences that were certain to have ended"


def test_a_stop_found_a_step_late_costs_one_row_and_no_token(fake_engine: Callable[..., Any]) -> None:
    prompt = [3, 1, 4, 1]
    wanted = expected_tokens(prompt, 12, 5)
    stop = next(token for i, token in enumerate(wanted) if i >= 2 and token not in wanted[:i])
    device = FakeDevice()
    engine, _ = fake_engine(blocks=32, block_tokens=4, budget=64, device=device)
    outputs = ask(engine, "r", prompt, 12, stop_token_ids=frozenset({stop}))
    while not engine.idle:
        engine.step()
    assert [o.token for o in outputs] == wanted[: wanted.index(stop) + 1]
    assert device.pending == 1, "the step that was one too many is still in the air"
    assert engine.pool.active == 0
    again = ask(engine, "again", prompt, 12)  # its blocks are those that the late step still writes to
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert [o.token for o in again] == wanted


def test_a_new_request_is_admitted_in_the_step_after_the_one_in_the_air(fake_engine: Callable[..., Any]) -> None:
    engine, _, _, _ = steady(fake_engine)
    late = ask(engine, "late", [4, 4], 3)
    engine.step()
    assert not late
    engine.step()
    assert len(late) == 1


@pytest.mark.parametrize("other", [{"temperature": 1.0}, {"logprobs": 2}])
def test_steps_with_a_sequence_that_needs_its_logits_are_not_run_ahead(
    fake_engine: Callable[..., Any], other: dict[str, Any]
) -> None:
    engine, _, device, _ = steady(fake_engine, sequences=8)
    drawing = ask(engine, "drawing", [4, 4], 5, **other)
    engine.step()  # the step in the air, without the one that came
    assert device.pending == 0
    while not (drawing and drawing[-1].finish_reason):
        engine.step()
        assert device.pending == 0, "a step is in the air though one of its tokens is yet to be drawn"
    engine.step()
    assert device.pending == 1


def test_too_few_blocks_for_two_steps_are_never_taken_from_a_running_sequence(fake_engine: Callable[..., Any]) -> None:
    device = FakeDevice()
    engine, _ = fake_engine(blocks=7, block_tokens=4, budget=64, device=device)
    outputs = [ask(engine, f"r{i}", [i, 1, 2], 11) for i in range(2)]  # 2 x 14 rows: 8 blocks, one more than there are
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.tally.preemptions == 1
    assert [[o.token for o in output] for output in outputs] == [expected_tokens([i, 1, 2], 11, 5) for i in range(2)]


@pytest.mark.parametrize("when", ["launch", "later"])
def test_a_step_that_fails_is_computed_again_without_the_one_at_fault(
    fake_engine: Callable[..., Any], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    fails = {"on": False}

    def fail(chunk: Any) -> None:
        if fails["on"] and chunk.sequence.request_id == "r1":
            raise RuntimeError("boom")

    engine, _, device, outputs = steady(fake_engine, count=3, fail=fail)
    fails["on"] = when == "launch"
    if when == "later":

        def broken() -> None:
            raise RuntimeError("late boom")

        device.launch(broken)
        engine._ahead._flight.mark = device.mark()
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert "decode step" in caplog.text
    for i, output in enumerate(outputs):
        if when == "launch" and i == 1:
            assert output[-1].finish_reason == "error"
        else:
            assert [o.token for o in output] == expected_tokens([i, 1, 2], 12, 5)


def test_numbers_that_no_token_can_be_chosen_from_end_their_request_alone(fake_engine: Callable[..., Any]) -> None:
    engine, runner, _, outputs = steady(fake_engine, count=3)
    launch = runner.launch

    def poisoned(chunks: Any, ahead_of: Any = None) -> Any:
        flight = launch(chunks, ahead_of)
        tokens = flight.tokens

        def spoilt() -> list[int]:
            return [-1 if chunk.sequence.request_id == "r1" else t for chunk, t in zip(chunks, tokens(), strict=True)]

        return type("Spoilt", (), {"chunks": chunks, "rows": flight.rows, "tokens": staticmethod(spoilt)})()

    runner.launch = poisoned
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert outputs[1][-1].error == "the model produced NaN or infinity for this request"
    for i in (0, 2):
        assert [o.token for o in outputs[i]] == expected_tokens([i, 1, 2], 12, 5)
