import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.actions import ActionLimits, ActionRunner, RateLimiter
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.clock import ManualClock
from ullage_agent.errors import BadAction, Busy, EngineTimeout, EngineUnreachable, KeyReused
from ullage_agent.idempotency import TTL_S, IdempotencyStore
from ullage_agent.wire import Action, ActionRequest, ActionResult

EVICT = ActionRequest(ratio=0.1)


class Gated(FakeAdapter):
    """Acts only once the gate is open; fails as often as told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.failures = 0
        self.keys: list[str] = []

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        self.keys.append(idempotency_key)
        self.entered.set()
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise EngineUnreachable("gone")
        return await super().act(action, request, idempotency_key)


@pytest.fixture
def adapter(clock: ManualClock) -> FakeAdapter:
    return Gated.simulated(PoolSpec(total=1000, hot=500, cached=500), clock)


@pytest.fixture
def gated(adapter: Gated) -> Gated:
    return adapter


@pytest.fixture
def opened(adapter: Gated) -> Gated:
    adapter.gate.set()
    return adapter


async def test_a_repeat_gets_the_first_answer_without_acting(opened: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(opened, clock)
    first = await runner.run("evict", EVICT, "key-1")
    assert await runner.run("evict", EVICT, "key-1") is first
    assert opened.acts == ["evict"]
    assert runner.outcomes == {("evict", "Succeeded"): 1}


async def test_without_a_key_each_call_acts(opened: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(opened, clock)
    for _ in range(2):
        await runner.run("evict", EVICT, None)
    assert opened.acts == ["evict", "evict"]
    assert len(set(opened.keys)) == 2  # the engine still gets a key each


async def test_a_concurrent_repeat_waits_for_the_first(gated: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(gated, clock)
    calls = [asyncio.create_task(runner.run("evict", EVICT, "key-1")) for _ in range(5)]
    await gated.entered.wait()
    gated.gate.set()
    results = await asyncio.gather(*calls)
    assert all(result is results[0] for result in results)
    assert gated.acts == ["evict"]


@pytest.mark.parametrize(("action", "request_"), [("evict", ActionRequest(ratio=0.2)), ("drain", ActionRequest())])
async def test_a_key_of_another_request_is_refused(
    opened: Gated, clock: ManualClock, action: Action, request_: ActionRequest
) -> None:
    runner = ActionRunner(opened, clock)
    await runner.run("evict", EVICT, "key-1")
    with pytest.raises(KeyReused, match="key-1"):
        await runner.run(action, request_, "key-1")


async def test_keys_are_remembered_ten_minutes(opened: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(opened, clock)
    await runner.run("evict", EVICT, "key-1")
    await asyncio.sleep(0)
    clock.advance(TTL_S - 1)
    await runner.run("evict", EVICT, "key-1")
    assert runner.outcomes["evict", "Succeeded"] == 1
    clock.advance(2)
    await runner.run("evict", EVICT, "key-1")
    assert runner.outcomes["evict", "Succeeded"] == 2


async def test_one_action_at_a_time(gated: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(gated, clock)
    first = asyncio.create_task(runner.run("drain", ActionRequest(), "key-1"))
    await gated.entered.wait()
    with pytest.raises(Busy, match="drain is still running"):
        await runner.run("evict", EVICT, "key-2")
    gated.gate.set()
    await first
    assert (await runner.run("evict", EVICT, "key-2")).outcome == "Succeeded"


async def test_a_failure_may_be_tried_again_under_its_key(opened: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(opened, clock)
    opened.failures = 1
    with pytest.raises(EngineUnreachable):
        await runner.run("evict", EVICT, "key-1")
    assert (await runner.run("evict", EVICT, "key-1")).outcome == "Succeeded"
    assert opened.keys == ["key-1", "key-1"]
    assert runner.outcomes == {("evict", "Error"): 1, ("evict", "Succeeded"): 1}


async def test_an_action_is_bounded_in_time(gated: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(gated, clock)
    with pytest.raises(EngineTimeout, match=r"0\.05 s"):
        await runner.run("evict", ActionRequest(ratio=0.1, timeout_s=0.05), "key-1")
    assert gated.acts == []
    gated.gate.set()
    await runner.run("evict", EVICT, "key-2")  # the slot is free again


async def test_a_caller_that_leaves_does_not_stop_the_action(gated: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(gated, clock)
    caller = asyncio.create_task(runner.run("evict", EVICT, "key-1"))
    await gated.entered.wait()
    caller.cancel()
    await asyncio.wait({caller})
    gated.gate.set()
    assert (await runner.run("evict", EVICT, "key-1")).outcome == "Succeeded"
    assert gated.acts == ["evict"]


async def test_closing_cancels_what_does_not_end(gated: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(gated, clock)
    caller = asyncio.create_task(runner.run("evict", EVICT, "key-1"))
    await gated.entered.wait()
    await runner.close(0.01)
    await runner.close(0.01)
    await asyncio.wait({caller})
    assert caller.cancelled()
    assert gated.acts == []


async def test_rate_is_limited_and_repeats_are_free(opened: Gated, clock: ManualClock) -> None:
    runner = ActionRunner(opened, clock, ActionLimits(per_minute=6.0, burst=2))
    await runner.run("evict", EVICT, "key-1")
    await runner.run("evict", EVICT, "key-2")
    with pytest.raises(Busy) as caught:
        await runner.run("evict", EVICT, "key-3")
    assert caught.value.retry_after_s == pytest.approx(10.0)
    await runner.run("evict", EVICT, "key-1")
    clock.advance(10.0)
    await runner.run("evict", EVICT, "key-3")
    assert opened.acts == ["evict"] * 3


@given(st.lists(st.floats(-10, 100), max_size=60))
def test_the_limiter_never_lets_in_more_than_burst_and_rate(pauses: list[float]) -> None:
    clock = ManualClock()
    limits = ActionLimits(per_minute=30.0, burst=5)
    limiter = RateLimiter(limits, clock)
    admitted, forward = 0, 0.0
    for pause in pauses:
        clock.advance(pause)
        forward += max(0.0, pause)
        wait = limiter.wait_s()
        assert wait >= 0
        admitted += wait == 0
        assert admitted <= limits.burst + forward * limits.per_minute / 60 + 1e-6


@pytest.mark.parametrize(
    ("action", "request_", "named"),
    [
        ("evict", ActionRequest(), "exactly one of ratio and bytes"),
        ("evict", ActionRequest(ratio=0.5, bytes=5), "exactly one of ratio and bytes"),
        ("throttle", ActionRequest(ttl_s=5.0), "max_prompt_tokens"),
        ("throttle", ActionRequest(max_prompt_tokens=5), "ttl_s"),
        ("compact", ActionRequest(), "budget_ms"),
        ("drain", ActionRequest(timeout_s=601.0), "at most 600"),
        ("drain", ActionRequest(dry_run=True), "dry_run"),
    ],
)
async def test_parameters_are_checked_first(
    opened: Gated, clock: ManualClock, action: Action, request_: ActionRequest, named: str
) -> None:
    runner = ActionRunner(opened, clock)
    with pytest.raises(BadAction, match=named):
        await runner.run(action, request_, "key-1")
    assert opened.keys == []


@pytest.mark.parametrize("key", ["", "x" * 129, "with space", "tab\t", "ä"])
async def test_bad_keys(opened: Gated, clock: ManualClock, key: str) -> None:
    with pytest.raises(BadAction, match="Idempotency-Key"):
        await ActionRunner(opened, clock).run("evict", EVICT, key)


async def test_the_store_is_bounded(clock: ManualClock) -> None:
    async def answer() -> ActionResult:
        return ActionResult(action="evict", outcome="Succeeded", message="")

    store = IdempotencyStore(clock, capacity=10)
    for number in range(50):
        task = asyncio.create_task(answer())
        store.remember(f"key-{number}", ("evict", EVICT), task)
        await task
        clock.advance(1.0)
        assert len(store) <= 10
    assert store.find("key-49", ("evict", EVICT)) is not None
    assert store.find("key-0", ("evict", EVICT)) is None
    clock.advance(TTL_S)
    store.find("other", ("evict", EVICT))
    assert len(store) == 0
