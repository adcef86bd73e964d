from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec, SimulatedPool
from ullage_agent.clock import ManualClock
from ullage_agent.errors import ConfigError, EngineUnreachable
from ullage_agent.wire import Action, ActionRequest, Snapshot

Write = Callable[[dict[str, Any]], str]


async def test_a_script_plays_in_order_and_its_last_step_repeats(scenario_file: Write, clock: ManualClock) -> None:
    steps = [{"snapshot": {"hot_blocks": 1}}, {"error": "down"}, {"snapshot": {"hot_blocks": 3}}]
    url = scenario_file({"steps": steps, "instance": "i-1"})
    adapter = BUILTIN_ADAPTERS["fake"](AdapterConfig(url=url, clock=clock))
    reading = await adapter.read()
    assert (reading.snapshot.hot_blocks, reading.snapshot.sampled_at) == (1, clock.wall())
    assert reading.identity.instance == "i-1"
    with pytest.raises(EngineUnreachable, match="down"):
        await adapter.read()
    assert [(await adapter.read()).snapshot.hot_blocks for _ in range(2)] == [3, 3]
    assert adapter.capabilities() == ()
    assert (await adapter.act("evict", ActionRequest(ratio=0.5), "k")).outcome == "Unsupported"


async def test_a_script_from_python_is_judged_like_any_engine(clock: ManualClock) -> None:
    torn = Snapshot(sampled_at=0, total_blocks=10, hot_blocks=5, reclaimable_blocks=5, free_blocks=5)
    adapter = FakeAdapter.scripted([torn, RuntimeError("gone")], clock)
    reading = await adapter.read()
    assert reading.snapshot.hot_blocks is None
    assert [violation.metric for violation in reading.violations] == ["blocks"]
    with pytest.raises(EngineUnreachable, match="gone"):
        await adapter.read()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({}, "exactly one of"),
        ({"steps": [{"error": "x"}], "pool": {}}, "exactly one of"),
        ({"steps": [{"snapshot": {"hot_bloks": 1}}]}, "hot_bloks"),
        ({"steps": [{"snapshot": {"hot_blocks": "1"}}]}, "hot_blocks"),
        ({"pool": {"total": 5, "hot": 6}}, "hot + cached"),
        ({"pool": {"total": "5"}}, "pool.total"),
        ({"pool": {"size": 5}}, "size"),
    ],
)
def test_bad_scenarios_name_file_and_field(
    scenario_file: Write, clock: ManualClock, content: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        BUILTIN_ADAPTERS["fake"](AdapterConfig(url=scenario_file(content), clock=clock))
    assert named in str(caught.value)
    assert "scenario.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_scenario(clock: ManualClock) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file"):
        BUILTIN_ADAPTERS["fake"](AdapterConfig(url="nowhere.json", clock=clock))


async def test_evict_lowers_the_pools_counts(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, hot=60, cached=10, protected=50), clock)
    result = await adapter.act("evict", ActionRequest(ratio=0.2), "key-1")
    assert (result.outcome, result.blocks_freed) == ("Succeeded", 14)
    state = (await adapter.read()).snapshot
    assert (state.hot_blocks, state.reclaimable_blocks, state.free_blocks) == (56, 0, 44)
    assert result.after is not None
    assert result.after.free_blocks == 44


async def test_a_repeated_key_does_not_evict_again(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, hot=60), clock)
    first = await adapter.act("evict", ActionRequest(ratio=0.2), "key-1")
    assert await adapter.act("evict", ActionRequest(ratio=0.2), "key-1") == first
    assert adapter.acts == ["evict"]


async def test_throttling_stops_growth_until_it_ends(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, growth_per_s=1.0), clock)
    clock.advance(10)
    await adapter.act("throttle", ActionRequest(max_prompt_tokens=5, ttl_s=20.0), "key-1")
    clock.advance(15)
    state = (await adapter.read()).snapshot
    assert (state.hot_blocks, state.admission_max_prompt_tokens) == (10, 5)
    assert state.admission_expires_in_s == 5.0
    await adapter.act("release", ActionRequest(), "key-2")
    clock.advance(15)
    state = (await adapter.read()).snapshot
    assert (state.hot_blocks, state.admission_max_prompt_tokens) == (25, None)


async def test_a_drained_pool_runs_nothing_until_it_is_released(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, hot=10, growth_per_s=1.0), clock)
    await adapter.act("drain", ActionRequest(), "key-1")
    clock.advance(10)
    state = (await adapter.read()).snapshot
    assert (state.draining, state.running, state.hot_blocks, state.reclaimable_blocks) == (True, 0, 0, 10)
    await adapter.act("release", ActionRequest(), "key-2")
    clock.advance(10)
    state = (await adapter.read()).snapshot
    assert (state.draining, state.running, state.hot_blocks) == (False, 1, 10)


async def test_a_pool_without_work_runs_nothing(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, cached=10, peak=0), clock)
    state = (await adapter.read()).snapshot
    assert (state.running, state.outstanding_blocks) == (0, 0)


actions = st.sampled_from(["evict", "compact", "throttle", "release", "drain"])
moves = st.lists(st.tuples(actions, st.floats(0.01, 1.0), st.booleans(), st.floats(0, 30)), max_size=25)


@given(moves, st.integers(1, 300), st.floats(0, 50), st.integers(1, 9))
def test_the_simulated_pool_keeps_the_laws_of_a_pool(
    script: list[tuple[Action, float, bool, float]], total: int, growth: float, runs: int
) -> None:
    pool = SimulatedPool(
        PoolSpec(total=total, hot=total // 2, cached=total // 3, growth_per_s=growth, free_runs=runs), 0.0
    )
    now = 0.0
    for action, ratio, dry_run, pause in script:
        now += pause
        before = pool.snapshot(now, 0.0, 1)
        request = ActionRequest(ratio=ratio, max_prompt_tokens=9, ttl_s=10.0, dry_run=dry_run)
        result = pool.act(action, request, now)
        after = pool.snapshot(now, 0.0, 2)
        hot, cached, free = after.hot_blocks, after.reclaimable_blocks, after.free_blocks
        assert hot is not None and cached is not None and free is not None
        assert hot + cached + free == total
        assert min(hot, cached, free) >= 0
        assert after.largest_free_run_blocks is not None
        assert after.largest_free_run_blocks <= free
        freed = 0 if dry_run else result.blocks_freed
        assert before.free_blocks is not None
        if action == "evict":
            assert free - before.free_blocks == freed
            assert (result.outcome == "Succeeded") == (result.blocks_freed > 0)
