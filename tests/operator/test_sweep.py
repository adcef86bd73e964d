"""The whole loop against the real agent over TLS: a simulated engine fills up, is relieved, and the record says so."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.wire import Action, ActionRequest, ActionResult
from ullage_operator.certificates import client_context
from ullage_operator.errors import AgentRefused, AgentUnreachable, ClusterError
from ullage_operator.gather import AgentClient
from ullage_operator.observation import AgentTarget
from ullage_operator.policy import Reason
from ullage_operator.sweep import Sweeper, SweepResult

FULL = PoolSpec(total=100, hot=100, peak=0)
STUBBORN = PoolSpec(total=100, hot=100, peak=0, protected=100)
HEALTHY = PoolSpec(total=100, hot=20, peak=0)


def sweeper(build: Any, running: Any, session: aiohttp.ClientSession, records: Any, **policy: Any) -> Sweeper:
    settings = {"settleSeconds": 0, "evict": {"cooldownSeconds": 0}, **policy}
    return Sweeper(
        service=build.service(**settings),
        agents=policy_client(running, session),
        records=records,
        clock=time.time,
    )


def policy_client(running: Any, session: aiohttp.ClientSession) -> AgentClient:
    return AgentClient(session, running.credentials.token, client_context(running.credentials))


async def tick(sweeper_: Sweeper, running: Any) -> SweepResult:
    await running.polled()
    return await sweeper_.tick([running.target])


async def test_a_healthy_engine_is_left_alone(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(HEALTHY)
    result = await tick(sweeper(build, running, session, records), running)
    assert result.decision.reason == Reason.HEALTHY
    assert result.changed_records == ()
    assert records.stored == {}
    assert running.engine.acts == []


async def test_risk_is_seen_relieved_and_judged(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(FULL)
    loop = sweeper(build, running, session, records)
    acted = await tick(loop, running)
    assert acted.decision.reason == Reason.EVICT
    assert acted.changed_records[-1].status.bytes_freed == 20 * FULL.block_bytes
    judged = await tick(loop, running)
    assert judged.decision.reason == Reason.EFFECTIVE
    record = await records.only()
    assert record.status.phase == "Succeeded"
    assert record.status.before.score >= 85 > record.status.after.score
    assert record.status.blocks_freed == 20
    assert record.status.attempts == 1
    assert running.engine.acts == ["evict"]
    assert (await tick(loop, running)).decision.reason == Reason.HEALTHY


async def test_the_ladder_is_climbed_and_descended(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(STUBBORN)
    loop = sweeper(build, running, session, records, throttle={"maxPromptTokens": 64, "ttlSeconds": 60})
    reasons = [(await tick(loop, running)).decision.reason for _ in range(3)]
    assert reasons == [Reason.EVICT, Reason.THROTTLE, Reason.EFFECTIVE]
    running.engine.pool._hot = 10.0
    reasons = [(await tick(loop, running)).decision.reason for _ in range(3)]
    assert reasons == [Reason.RELEASE, Reason.EFFECTIVE, Reason.HEALTHY]
    assert running.engine.acts == ["evict", "throttle", "release"]
    phases = {r.spec.action: r.status.phase for r in await records.load()}
    assert phases == {"evict": "Ineffective", "throttle": "Succeeded", "release": "Succeeded"}


@pytest.mark.parametrize("mode", ["Observe", "Propose"])
async def test_without_leave_nothing_is_done(
    build: Any, start_agent: Any, session: Any, records: Any, mode: str
) -> None:
    running = await start_agent(FULL)
    loop = sweeper(build, running, session, records, mode=mode, evict={"cooldownSeconds": 1000})
    for _ in range(3):
        await tick(loop, running)
    assert running.engine.acts == []
    assert (await records.only()).status.phase == {"Observe": "Expired", "Propose": "Proposed"}[mode]


async def test_a_proposal_is_carried_out_once_approved(
    build: Any, start_agent: Any, session: Any, records: Any
) -> None:
    running = await start_agent(FULL)
    loop = sweeper(build, running, session, records, mode="Propose")
    proposed = (await tick(loop, running)).changed_records[0]
    records.stored[proposed.metadata.name]["spec"] |= {"approved": True, "approvedBy": "mara"}
    assert (await tick(loop, running)).decision.reason == Reason.APPROVED
    assert (await tick(loop, running)).decision.reason == Reason.EFFECTIVE
    assert running.engine.acts == ["evict"]


@dataclass(frozen=True, slots=True)
class LossyClient(AgentClient):
    """Carries calls out and then loses the first answers."""

    lost: list[str] = field(default_factory=list)
    losses: int = 1

    async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
        result = await AgentClient.act(self, target, action, request, key=key)
        if len(self.lost) < self.losses:
            self.lost.append(key)
            raise AgentUnreachable("connection reset")
        return result


async def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(
    build: Any, start_agent: Any, session: Any, records: Any
) -> None:
    running = await start_agent(FULL)
    client = LossyClient(session, running.credentials.token, client_context(running.credentials), losses=2)
    service = build.service(settleSeconds=0)
    loop = Sweeper(service=service, agents=client, records=records, clock=time.time)
    reasons = [(await tick(loop, running)).decision.reason for _ in range(4)]
    assert reasons == [Reason.EVICT, Reason.UNANSWERED, Reason.UNANSWERED, Reason.EFFECTIVE]
    record = await records.only()
    assert (record.status.attempts, record.status.phase) == (3, "Succeeded")
    assert running.engine.acts == ["evict"]
    assert set(client.lost) == {record.metadata.name}


@pytest.mark.parametrize("fail_at", [1, 2, 3])
async def test_a_crash_at_any_write_loses_nothing_and_repeats_nothing(
    build: Any, start_agent: Any, session: Any, records: Any, fail_at: int
) -> None:
    running = await start_agent(FULL)
    records.fail_at = fail_at
    crashes = 0
    for _ in range(6):  # a new sweeper each time: nothing may live in memory
        try:
            await tick(sweeper(build, running, session, records), running)
        except ClusterError:
            crashes += 1
    assert crashes == 1
    assert running.engine.acts == ["evict"]
    record = await records.only()
    assert record.status.phase == "Succeeded"


async def test_nothing_is_sent_before_it_is_written(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(FULL)
    records.fail_at = 1
    with pytest.raises(ClusterError):
        await tick(sweeper(build, running, session, records), running)
    assert running.engine.acts == []


async def test_an_agent_that_refuses_ends_the_record(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(FULL)

    class Refusing(AgentClient):
        async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
            raise AgentRefused("HTTP 429: too many", status=429)

    client = Refusing(session, running.credentials.token, client_context(running.credentials))
    loop = Sweeper(service=build.service(), agents=client, records=records, clock=time.time)
    await tick(loop, running)
    record = await records.only()
    assert record.status.phase == "Failed"
    assert "HTTP 429" in record.status.message


async def test_old_records_are_removed(build: Any, start_agent: Any, session: Any, records: Any) -> None:
    running = await start_agent(HEALTHY)
    now = time.time()
    for n in range(5):
        old = build.record(phase="Succeeded", age=build.now - now + 7200 + n)
        await records.save(old)
    result = await tick(sweeper(build, running, session, records, historyLimit=2), running)
    assert len(records.stored) == 2
    assert {r.metadata.name for r in result.records} == set(records.stored)
