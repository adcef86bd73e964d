"""An engine that was drained to leave, and stays: the operator opens it again through its agent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest

from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.wire import Action, ActionRequest, ActionResult
from ullage_operator.apply import apply
from ullage_operator.certificates import client_context
from ullage_operator.errors import AgentRefused, AgentUnreachable, ClusterError
from ullage_operator.fleet import Fleet, Pod
from ullage_operator.gather import AgentClient
from ullage_operator.model import Remediation
from ullage_operator.observation import AgentTarget
from ullage_operator.policy import Inputs, decide
from ullage_operator.remediation import enter, stepped
from ullage_operator.sweep import Sweeper

TAKEN_BACK = "taken back: web-a was not the one removed"


@dataclass
class Scaling:
    """A cluster of two pods that removes `removed`, whoever was chosen. Implements `Scaler`."""

    removed: str = "web-b"
    serving: dict[str, bool] = field(default_factory=lambda: {"web-a": True, "web-b": True})
    failures: list[ClusterError] = field(default_factory=list)

    async def set_replicas(self, *, expected: int, wanted: int) -> None:
        assert (expected, wanted) == (2, 1)
        self.serving.pop(self.removed, None)

    async def set_serving(self, pod: str, *, serving: bool) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.serving[pod] = serving


@dataclass
class Agents:
    """The agents' client: answers with what is scripted, then with success."""

    script: list[ActionResult | Exception] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    requests: list[ActionRequest] = field(default_factory=list)

    async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
        self.calls.append((target.pod, action, key))
        self.requests.append(request)
        answer = self.script.pop(0) if self.script else result(action, "Succeeded")
        if isinstance(answer, Exception):
            raise answer
        return answer


def result(action: Action, outcome: Any, message: str = "as asked") -> ActionResult:
    return ActionResult(action=action, outcome=outcome, message=message)


def restoring(build: Any, *, after: str) -> Remediation:
    """A step down that is taken back from the stage `after`."""
    draining = build.record("scaleDown", "Running", stage="Draining", started_at=-60, stage_at=-60, answered_at=-60)
    if after == "Removing":
        draining = stepped(enter(draining, "Removing", message="m", now=build.now - 30), "m", now=build.now - 30)
    return enter(draining, "Restoring", message=TAKEN_BACK, now=build.now)  # type: ignore[no-any-return]


async def step(build: Any, record: Remediation, agents: Agents, scaler: Scaling, *, reachable: bool = True) -> Any:
    targets = [build.target("web-a")] if reachable else []
    return await apply(record, targets, agents, scaler=scaler, clock=lambda: build.now)  # type: ignore[arg-type]


async def test_a_drained_engine_is_released(build: Any) -> None:
    agents, scaler = Agents(), Scaling(serving={"web-a": False})
    record = restoring(build, after="Removing")
    done = await step(build, record, agents, scaler)
    assert agents.calls == [("web-a", "release", f"{record.metadata.name}-release")]
    assert (done.status.phase, done.status.stage) == ("Running", "Restoring")
    assert done.status.answered_at is not None
    assert done.status.message == f"{TAKEN_BACK}, and reopened"
    assert scaler.serving == {"web-a": True}


async def test_an_engine_that_was_not_drained_is_let_alone(build: Any) -> None:
    """A limit that somebody set meanwhile stays in force, and a silent agent holds nothing up."""
    agents, scaler = Agents([AgentUnreachable("gone")]), Scaling(serving={"web-a": False})
    done = await step(build, restoring(build, after="Draining"), agents, scaler)
    assert (agents.calls, scaler.serving) == ([], {"web-a": True})
    assert done.status.answered_at is not None
    assert done.status.message == TAKEN_BACK


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (AgentUnreachable("no answer within 8 s"), "no answer within 8 s"),
        (AgentRefused("HTTP 429: drain is still running", status=429), "drain is still running"),
    ],
)
async def test_a_release_without_an_answer_is_sent_again_under_the_same_key(
    build: Any, lost: Exception, said: str
) -> None:
    agents, scaler = Agents([lost, lost]), Scaling(serving={"web-a": False})
    record = restoring(build, after="Removing")
    for attempt in (1, 2):
        record = await step(build, record, agents, scaler)
        assert (record.status.phase, record.status.answered_at, record.status.attempts) == ("Running", None, attempt)
        assert record.status.message == f"{TAKEN_BACK} (attempt {attempt}: {lost})"
        assert said in record.status.message
        assert scaler.serving == {"web-a": True}, "readiness keeps requests away from an engine that is closed"
    record = await step(build, record, agents, scaler)
    assert (record.status.answered_at is not None, record.status.attempts) == (True, 3)
    assert record.status.message == f"{TAKEN_BACK}, and reopened"
    assert len(set(agents.calls)) == 1
    assert len(set(agents.requests)) == 1, "the key demands equal requests"


async def test_an_agent_without_an_address_has_not_answered(build: Any) -> None:
    done = await step(build, restoring(build, after="Removing"), Agents(), Scaling(), reachable=False)
    assert done.status.answered_at is None
    assert "no address" in done.status.message


async def test_an_api_that_refuses_comes_first(build: Any) -> None:
    agents, scaler = Agents(), Scaling(failures=[ClusterError("HTTP 500", status=500)])
    done = await step(build, restoring(build, after="Removing"), agents, scaler)
    assert (done.status.answered_at, agents.calls) == (None, [])


async def test_an_engine_that_stays_closed_ends_the_record(build: Any) -> None:
    agents = Agents([result("release", "Ineffective", "the engine still admits nothing: it is stopping")])
    done = await step(build, restoring(build, after="Removing"), agents, Scaling())
    assert done.status.phase == "Failed"
    assert done.status.message == (f"{TAKEN_BACK}, and not reopened: the engine still admits nothing: it is stopping")


async def test_an_engine_that_nothing_can_close_was_not_closed(build: Any) -> None:
    agents = Agents([result("release", "Unsupported", "no gate")])
    done = await step(build, restoring(build, after="Removing"), agents, Scaling())
    assert (done.status.phase, done.status.answered_at is not None) == ("Running", True)
    assert done.status.message == TAKEN_BACK


def test_that_an_engine_was_closed_is_written_down(build: Any) -> None:
    """Before it is: a restarted operator knows it, whatever became of the drain."""
    record = restoring(build, after="Removing")
    assert Remediation.read(record.write()).status.closed is True
    assert "closed" not in restoring(build, after="Draining").write()["status"]


@pytest.mark.parametrize(
    ("after", "ago", "attempts", "verdict"),
    [
        ("Removing", 119, 9, "Act"),
        ("Removing", 120, 9, "Conclude"),
        ("Removing", 900, 3, "Act"),  # the operator was away: it asks before it gives up
        ("Draining", 900, 9, "Act"),  # the API alone refuses, and the pod must come back into the Service
    ],
)
def test_the_wait_for_an_agent_is_bounded(build: Any, after: str, ago: float, attempts: int, verdict: str) -> None:
    record = restoring(build, after=after)
    status = {"attempts": attempts, "message": f"{TAKEN_BACK} (attempt {attempts}: no answer)"}
    record = record.model_copy(update={"status": record.status.model_copy(update=status)})
    inputs = Inputs(
        service=build.service(replicas={"min": 1, "max": 2}),
        observations=(build.observation(error="refused"),),
        records=(record,),
        fleet=build.fleet(build.pod("web-a", ready=False)),
    )
    decision = decide(inputs, build.now + ago)
    assert decision.verdict == verdict
    if verdict == "Conclude":
        (ended,) = decision.updates
        assert ended.status.phase == "Failed"
        assert ended.status.message == (
            f"{TAKEN_BACK} (attempt 9: no answer); delete web-a if its engine still admits nothing"
        )
    else:
        assert (decision.execute, decision.updates) == (record, ())


@dataclass(frozen=True, slots=True)
class Watched(AgentClient):
    """The real client, whose first `losses` releases get no answer."""

    lost: list[str] = field(default_factory=list)
    losses: int = 0

    async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
        done = await AgentClient.act(self, target, action, request, key=key)
        if action == "release" and len(self.lost) < self.losses:
            self.lost.append(key)
            raise AgentUnreachable("connection reset")
        return done


@pytest.mark.parametrize("losses", [0, 2])
async def test_the_one_engine_that_is_left_reads_open_again(
    build: Any, start_agent: Any, session: aiohttp.ClientSession, records: Any, losses: int
) -> None:
    """The cluster removes the other pod; what was drained is then all that is left of the service."""
    left = await start_agent(PoolSpec(cached=3, peak=0), "web-a")
    removed = await start_agent(PoolSpec(cached=9, peak=0), "web-b")
    scaler, began, passed = Scaling(), time.time(), 0.0
    pods = {name: Pod(name=name, uid=f"uid-{name}", ready=True, ready_at=began - 1000) for name in ("web-a", "web-b")}

    def fleet() -> Fleet:
        return Fleet(pods=tuple(replace(pods[name], serving=on) for name, on in sorted(scaler.serving.items())))

    service = build.service(
        replicas={"min": 1, "max": 2, "desired": 2}, scaleDown={"windowSeconds": 1, "drainSeconds": 60}
    )
    agents = Watched(session, left.credentials.token, client_context(left.credentials), losses=losses)
    loop = Sweeper(service=service, agents=agents, records=records, clock=lambda: time.time() + passed, scaler=scaler)
    stages: list[str | None] = []
    closed = False
    for _ in range(100):
        there = [running for running in (left, removed) if running.target.pod in scaler.serving]
        for running in there:
            await running.polled()
        await loop.tick([running.target for running in there], fleet=fleet)
        passed += 2.0
        record = next((r for r in await records.load() if r.spec.action == "scaleDown"), None)
        if record is None:
            continue
        stages += [record.status.stage] if record.status.stage not in stages else []
        closed = closed or bool((await left.engine.read()).snapshot.draining)
        if record.final:
            break
    assert record is not None
    assert stages == ["Draining", "Removing", "Restoring"]
    assert closed, "it was drained in between"
    assert (record.spec.pod, record.status.phase) == ("web-a", "Ineffective")
    assert record.status.message == f"{TAKEN_BACK}, and reopened"
    assert record.status.attempts == losses + 1
    assert scaler.serving == {"web-a": True}
    assert (await left.engine.read()).snapshot.draining is False
    assert left.engine.acts == ["drain", "release"]
    assert agents.lost == [f"{record.metadata.name}-release"] * losses
