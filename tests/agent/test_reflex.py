import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ullage_agent.actions import ActionRunner
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.app import Agent
from ullage_agent.clock import ManualClock
from ullage_agent.config import AgentConfig
from ullage_agent.reflex import COOLDOWN_S, Reflex, Situation, decide
from ullage_agent.wire import ActionRequest, EngineIdentity, RiskReport

CRITICAL = Situation(
    critical_for_s=30.0,
    since_action_s=None,
    sample_age_s=0.5,
    capabilities=("evict", "throttle"),
    deadline_s=20.0,
    fresh_s=5.0,
)


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, "evict"),
        ({"capabilities": ("throttle", "release")}, "throttle"),
        ({"capabilities": ("drain",)}, None),
        ({"critical_for_s": 19.0}, None),  # the operator still has time
        ({"since_action_s": 10.0}, None),  # someone acted
        ({"since_action_s": COOLDOWN_S + 1}, "evict"),
        ({"sample_age_s": 6.0}, None),  # never on old data
    ],
)
def test_when_the_agent_acts_alone(changes: dict[str, Any], action: str | None) -> None:
    step = decide(replace(CRITICAL, **changes))
    assert (None if step is None else step.action) == action
    if step is not None:
        assert "local reflex" in step.request.reason


def report(score: float | None) -> RiskReport:
    return RiskReport(
        engine=EngineIdentity(type="fake", instance="i"),
        generated_at=0.0,
        sample_age_s=0.0,
        score=score,
        winner=None,
        capabilities=("evict",),
    )


async def test_the_score_must_stay_critical(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, hot=50, cached=50), clock)
    runner = ActionRunner(adapter, clock)
    reflex = Reflex(runner, clock, deadline_s=10.0, fresh_s=5.0)
    for score in (90.0, 90.0, 80.0, 90.0, 90.0):
        await reflex.look(report(score))
        clock.advance(6.0)
    assert adapter.acts == []
    await reflex.look(report(90.0))
    assert adapter.acts == ["evict"]
    clock.advance(6.0)
    await reflex.look(report(90.0))
    assert adapter.acts == ["evict"]


async def test_an_operator_that_acts_holds_the_reflex_back(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=100, hot=50, cached=50), clock)
    runner = ActionRunner(adapter, clock)
    reflex = Reflex(runner, clock, deadline_s=10.0, fresh_s=5.0)
    await reflex.look(report(90.0))
    clock.advance(9.0)
    await runner.run("evict", ActionRequest(ratio=0.1), "operator")
    clock.advance(9.0)
    await reflex.look(report(90.0))
    assert adapter.acts == ["evict"]


async def test_the_whole_agent_acts_and_says_so(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=200, hot=200, peak=0), clock)
    config = AgentConfig(
        engine="fake", engine_url="-", metrics_host="127.0.0.1", metrics_port=0, watch_devices=False,
        reflex_seconds=10.0, poll_seconds=60.0,
    )  # fmt: skip
    async with Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent:
        for _ in range(16):
            await agent.poller.poll_once()
            for _ in range(10):
                await asyncio.sleep(0)
            clock.advance(1.0)
        assert adapter.acts == ["evict"]
        (note,) = agent.history.actions
        assert (note.origin, note.outcome) == ("reflex", "Succeeded")
        assert agent.actions.outcomes["evict", "Succeeded"] == 1


async def test_off_by_default(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=200, hot=200, peak=0), clock)
    config = AgentConfig(
        engine="fake", engine_url="-", metrics_host="127.0.0.1", metrics_port=0, watch_devices=False, poll_seconds=60.0
    )
    async with Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent:
        for _ in range(200):
            await agent.poller.poll_once()
            clock.advance(1.0)
        assert adapter.acts == []
