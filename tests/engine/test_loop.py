"""The step loop's thread: handing over, limits, timeouts, and what happens when a step breaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiered import make_tiered

from ullage_engine.api.drain import Door
from ullage_engine.errors import Draining, LoopUnavailable, Overloaded, RequestTooLong
from ullage_engine.fake_runner import expected_tokens
from ullage_engine.loop import IDLE_PASS_S, EngineLoop, LoopLimits
from ullage_engine.request import AdmissionLimit, GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.tiers.movers import HostCopies
from ullage_engine.tiers.transfer import ThreadTransfers

WAIT_S = 30.0


class Gate:
    """Holds the model in a step until opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, chunk: Any) -> None:
        self.entered.set()
        assert self.open.wait(WAIT_S)


class Receiver:
    """Collects one request's outputs."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self.ended = threading.Event()

    def __call__(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self) -> list[TokenOutput]:
        assert self.ended.wait(WAIT_S), "the request did not end"
        return self.outputs


def request(name: str, prompt: list[int], count: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt=tuple(prompt), sampling=SamplingParams(max_tokens=count, temperature=0)
    )


@pytest.fixture
def start(fake_engine: Any) -> Iterator[Callable[..., EngineLoop]]:
    loops: list[EngineLoop] = []

    def make(max_model_len: int = 64, max_queue: int = 8, sequences: int = 4, **options: Any) -> EngineLoop:
        engine, _ = fake_engine(sequences=sequences, **options)
        limits = LoopLimits(max_model_len=max_model_len, max_queue=max_queue, max_sequences=sequences)
        loop = EngineLoop(engine, limits, frozenset({2}))
        loops.append(loop)
        loop.start()
        return loop

    yield make
    for loop in loops:
        loop.close()


def test_requests_from_many_threads_all_end(start: Callable[..., EngineLoop]) -> None:
    loop = start(max_queue=100)
    receivers = [Receiver() for _ in range(40)]
    threads = [
        threading.Thread(target=loop.submit, args=(request(f"r{i}", [i % 5] * 9, 6), receiver))
        for i, receiver in enumerate(receivers)
    ]
    for thread in threads:
        thread.start()
    for i, receiver in enumerate(receivers):
        assert [o.token for o in receiver.wait()] == expected_tokens([i % 5] * 9, 6, 5)


def test_too_long_for_the_context_is_refused_at_once(start: Callable[..., EngineLoop]) -> None:
    loop = start(max_model_len=20)
    with pytest.raises(
        RequestTooLong, match="15 prompt tokens \\+ max_tokens 6 = 21 is above this engine's context of 20"
    ):
        loop.submit(request("r", [1] * 15, 6), Receiver())
    assert loop.snapshot().counters.admitted == 0


def test_queue_limit_counts_what_waits(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(max_queue=2, sequences=1, fail=gate)
    receivers = [Receiver() for _ in range(3)]
    loop.submit(request("running", [1]), receivers[0])
    assert gate.entered.wait(WAIT_S)
    loop.submit(request("first", [2]), receivers[1])
    loop.submit(request("second", [3]), receivers[2])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        loop.submit(request("third", [4]), Receiver())
    gate.open.set()
    for receiver in receivers:
        receiver.wait()


def test_throttle_refuses_long_requests_until_it_expires(fake_engine: Any) -> None:
    engine, _ = fake_engine()
    now = [100.0]
    loop = EngineLoop(
        engine,
        LoopLimits(max_model_len=64, max_queue=8, max_sequences=4),
        frozenset(),
        clock=lambda: now[0],
    )
    loop.set_admission(AdmissionLimit(max_prompt_tokens=5, max_total_blocks=2, expires_at=130.0))
    with pytest.raises(Overloaded, match="limited to 5 tokens for now, this one has 6") as refused:
        loop.submit(request("long", [1] * 6), Receiver())
    assert refused.value.retry_after_s == 30.0
    with pytest.raises(Overloaded, match="limited to 2 KV blocks for now, this one projects to 3"):
        loop.submit(request("wide", [1] * 5, 12), Receiver())
    loop.submit(request("short", [1] * 5), Receiver())
    now[0] = 131.0
    loop.submit(request("long", [1] * 6), Receiver())


def test_draining_admits_nothing_and_finishes_what_runs(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(fail=gate)
    receiver = Receiver()
    loop.submit(request("r", [1, 2]), receiver)
    assert gate.entered.wait(WAIT_S)
    loop.set_draining(True)
    with pytest.raises(Draining):
        loop.submit(request("late", [1]), Receiver())
    gate.open.set()
    assert receiver.wait()[-1].finish_reason == "length"
    loop.set_draining(False)
    again = Receiver()
    loop.submit(request("again", [1]), again)
    again.wait()


def test_a_drain_that_was_ended_is_seen_to_have_ended(start: Callable[..., EngineLoop]) -> None:
    loop = start()
    door = Door(loop, lambda: 0)
    assert asyncio.run(door.drain(WAIT_S)).drained
    with pytest.raises(Draining):
        loop.submit(request("late", [1]), Receiver())
    assert asyncio.run(door.resume(WAIT_S)) is False
    assert not loop.snapshot().draining
    again = Receiver()
    loop.submit(request("again", [1]), again)
    assert again.wait()[-1].finish_reason == "length"


def test_late_eviction_is_cancelled_and_never_happens(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(blocks=20, block_tokens=4, first=0, recent=0, fail=gate)
    receiver = Receiver()
    loop.submit(request("r", [1] * 12, 3), receiver)
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(LoopUnavailable, match="cancelled"):
        loop.evict(ratio=1.0, bytes_=None, dry_run=False, timeout_s=0.01)
    gate.open.set()
    receiver.wait()
    loop.block_map()  # a full pass after the cancelled call
    assert loop.snapshot().counters.evicted_blocks == 0


def test_step_clock_stands_still_while_the_loop_is_stuck(fake_engine: Any) -> None:
    now = [10.0]
    gate = Gate()
    engine, _ = fake_engine(fail=gate, clock=lambda: now[0])
    loop = EngineLoop(
        engine, LoopLimits(max_model_len=64, max_queue=8, max_sequences=4), frozenset(), clock=lambda: now[0]
    )
    loop.start()
    receiver = Receiver()
    loop.submit(request("r", [1]), receiver)
    assert gate.entered.wait(WAIT_S)
    now[0] = 75.0
    assert loop.step_age_s() == 65.0
    gate.open.set()
    receiver.wait()
    loop.block_map()
    assert loop.step_age_s() == 0.0
    loop.close()


def test_broken_step_tells_every_request_and_stops_the_clock(
    start: Callable[..., EngineLoop], caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    loop = start(fail=gate)
    receivers = [Receiver(), Receiver()]
    for i, receiver in enumerate(receivers):
        loop.submit(request(f"r{i}", [i]), receiver)
    assert gate.entered.wait(WAIT_S)
    loop._engine.scheduler.computed = None  # what a bug in the books would do
    gate.open.set()
    for receiver in receivers:
        assert receiver.wait()[-1].error == "the engine failed; see its log"
    loop._thread.join(WAIT_S)
    assert "the step loop broke" in caplog.text
    assert loop.step_age_s() == float("inf")
    with pytest.raises(LoopUnavailable, match="has failed"):
        loop.submit(request("late", [1]), Receiver())


def test_close_tells_requests_and_is_idempotent(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(fail=gate)
    receiver = Receiver()
    loop.submit(request("r", [1], 30), receiver)
    assert gate.entered.wait(WAIT_S)
    closer = threading.Thread(target=loop.close)
    closer.start()
    gate.open.set()
    closer.join(WAIT_S)
    loop.close()
    assert receiver.wait()[-1].finish_reason == "error"
    with pytest.raises(LoopUnavailable):
        loop.block_map()
    loop.abort("r")
    loop.set_draining(True)


def test_abort_frees_blocks_within_two_steps(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(fail=gate)
    loop.submit(request("r", [1] * 9, 40), Receiver())
    assert gate.entered.wait(WAIT_S)
    loop.abort("r")
    loop.abort("r")
    loop.abort("unknown")
    gate.open.set()
    assert "A" not in loop.block_map().states
    loop.block_map()
    assert loop.snapshot().counters.aborted == 1


def test_forks_leave_nothing_behind_in_the_queue_books(start: Callable[..., EngineLoop]) -> None:
    loop = start()
    receivers = [Receiver() for _ in range(3)]
    loop.submit(request("r", [1] * 9, 1), receivers[0])
    for i in (1, 2):
        sampling = SamplingParams(max_tokens=1, temperature=0)
        fork = GenerationRequest(request_id=f"r.{i}", prompt=(1,) * 9, sampling=sampling, fork_of="r")
        loop.submit(fork, receivers[i])
    for receiver in receivers:
        assert len(receiver.wait()) == 1
    loop.block_map()
    assert loop._queued_at == {}


def test_every_request_is_told_even_when_the_books_contradict_themselves(
    start: Callable[..., EngineLoop],
) -> None:
    gate = Gate()
    loop = start(fail=gate)
    receivers = [Receiver() for _ in range(3)]
    for i, receiver in enumerate(receivers):
        loop.submit(request(f"r{i}", [i]), receiver)
    assert gate.entered.wait(WAIT_S)
    loop._engine.scheduler.computed = loop._engine.scheduler.finish = None
    gate.open.set()
    for receiver in receivers:
        assert receiver.wait()[-1].finish_reason == "error"


def test_forks_count_as_waiting(start: Callable[..., EngineLoop]) -> None:
    gate = Gate()
    loop = start(max_queue=4, sequences=2, fail=gate)
    accepted = 0
    with pytest.raises(Overloaded, match="requests are waiting"):
        for i in range(50):
            sampling = SamplingParams(max_tokens=1, temperature=0)
            fork_of = "r0" if i else None
            loop.submit(
                GenerationRequest(request_id=f"r{i}", prompt=(1,) * 9, sampling=sampling, fork_of=fork_of), Receiver()
            )
            accepted += 1
    gate.open.set()
    assert accepted <= 6


def test_the_loop_sleeps_while_a_load_is_under_way_and_wakes_when_it_ends() -> None:
    gate, begun = threading.Event(), threading.Event()

    def copies(pool: Any, memory: Any) -> ThreadTransfers:
        real = HostCopies(pool, memory, verify=True)

        def held(batch: Any) -> Any:
            begun.set()
            assert gate.wait(WAIT_S)
            return real.load(batch)

        return ThreadTransfers({"store": real.store, "load": held})

    tiered = make_tiered(blocks=20, copies=copies)
    loop = EngineLoop(tiered.engine, LoopLimits(max_model_len=64, max_queue=8, max_sequences=4), frozenset())
    loop.start()
    first = Receiver()
    loop.submit(request("first", [1, 2, 3, 4] * 4, 2), first)
    first.wait()
    report = loop.evict(ratio=1.0, bytes_=None, dry_run=False, timeout_s=WAIT_S, tiers=("host",))
    assert report.demoted == 4
    second = Receiver()
    loop.submit(request("second", [*[1, 2, 3, 4] * 4, 0], 2), second)
    assert begun.wait(WAIT_S)
    before, began = loop.snapshot().step, time.monotonic()
    other = Receiver()
    loop.submit(request("other", [2, 2], 3), other)
    assert [o.token for o in other.wait()] == expected_tokens([2, 2], 3, 5)
    assert not second.outputs
    assert loop.snapshot().blocks.in_flight >= 4, "the other request's block may be on its way down besides"
    gate.set()
    assert [o.token for o in second.wait()] == expected_tokens([*[1, 2, 3, 4] * 4, 0], 2, 5)
    passes = (time.monotonic() - began) / IDLE_PASS_S
    assert loop.snapshot().step - before < passes + 40, "the loop span while it had nothing to do"
    loop.close()
