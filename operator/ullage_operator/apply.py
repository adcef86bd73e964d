"""Carry out one step of a running remediation and put the outcome into the record. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ullage_agent.wire import ActionRequest
from ullage_operator.errors import AgentError, AgentRefused, AgentUnreachable, ClusterError
from ullage_operator.gather import AgentClient
from ullage_operator.model import ENGINE_ACTIONS, EngineAction, Remediation
from ullage_operator.observation import AgentTarget
from ullage_operator.remediation import answered, finish, sent, stepped, unanswered

ACTION_TIMEOUT_S = 10.0
"""Bound that the agent is given for one action."""
DRAIN_TIMEOUT_S = 5.0
"""Bound of the last drain of an engine that has nothing in flight, and of its end."""
ATTEMPT = " (attempt "
"""Begins what a step's last attempt that was not answered adds to the record's message."""


class Scaler(Protocol):
    """Changes the number of engines. Every call may be repeated; each may raise ClusterError."""

    async def set_replicas(self, *, expected: int, wanted: int) -> None:
        """Want that many engines; refused when neither `expected` nor `wanted` is what is wanted now."""
        ...

    async def set_serving(self, pod: str, *, serving: bool) -> None:
        """Let the Service send requests to a pod or not, and make it the first or an ordinary one to be removed."""
        ...


def request_for(record: Remediation) -> ActionRequest:
    """The wire form of a record's action. Equal for every sending, as its idempotency key demands."""
    parameters = record.spec.parameters
    return ActionRequest(
        ratio=parameters.ratio,
        max_prompt_tokens=parameters.max_prompt_tokens,
        ttl_s=parameters.ttl_seconds,
        budget_ms=parameters.budget_ms,
        timeout_s=ACTION_TIMEOUT_S,
        reason=record.spec.reason,
    )


async def apply(
    record: Remediation,
    targets: Sequence[AgentTarget],
    agents: AgentClient,
    *,
    scaler: Scaler | None,
    clock: Callable[[], float],
) -> Remediation:
    """Take the step that a Running record, which the caller has written down before, stands at.

    Returns the record to write: answered (Running until its effect is judged, or final), or still Running
    without an answer when it was lost. Taking the same step again is safe.
    """
    target = next((t for t in targets if t.uid == record.spec.pod_uid), None)
    action = next((name for name in ENGINE_ACTIONS if name == record.spec.action), None)
    if action is not None:
        return record if target is None else await _act(record, action, target, agents, clock=clock)
    if scaler is None:
        return finish(sent(record), "Failed", message="the number of engines cannot be changed here", now=clock())
    return await _scale(record, target, agents, scaler, clock=clock)


async def _act(
    record: Remediation, action: EngineAction, target: AgentTarget, agents: AgentClient, *, clock: Callable[[], float]
) -> Remediation:
    tried = sent(record)
    try:
        result = await agents.act(target, action, request_for(record), key=record.metadata.name)
    except AgentRefused as error:
        return finish(tried, "Failed", message=f"the agent refused: {error}", now=clock())
    except AgentUnreachable as error:
        return unanswered(tried, f"attempt {tried.status.attempts}: {error}")
    return answered(tried, result, now=clock())


async def _scale(
    record: Remediation,
    target: AgentTarget | None,
    agents: AgentClient,
    scaler: Scaler,
    *,
    clock: Callable[[], float],
) -> Remediation:
    tried, stage, message = sent(record), record.status.stage, _plain(record.status.message)
    before, after = record.spec.parameters.from_replicas or 1, record.spec.parameters.to_replicas or 1
    try:
        if stage == "Draining":
            await scaler.set_serving(record.spec.pod, serving=False)
        elif stage == "Restoring":
            return await _restore(tried, target, agents, scaler, message, clock=clock)
        elif stage == "Cancelling":
            await scaler.set_replicas(expected=after, wanted=before)
        else:
            if stage == "Removing" and target is not None:
                await _drain(record, target, agents)
            await scaler.set_replicas(expected=before, wanted=after)
    except (AgentError, ClusterError) as error:
        return unanswered(tried, f"{message}{ATTEMPT}{tried.status.attempts}: {error})"[:1000])
    return stepped(tried, message, now=clock())


async def _drain(record: Remediation, target: AgentTarget, agents: AgentClient) -> None:
    """Close an engine that has nothing in flight, so that it is not ready and goes first. Its end drains it again."""
    request = ActionRequest(timeout_s=DRAIN_TIMEOUT_S, reason=record.spec.reason)
    try:
        await agents.act(target, "drain", request, key=f"{record.metadata.name}-drain")
    except (AgentRefused, AgentUnreachable):
        return  # it takes no more requests in any case, and preStop drains whatever came


async def _restore(
    tried: Remediation,
    target: AgentTarget | None,
    agents: AgentClient,
    scaler: Scaler,
    message: str,
    *,
    clock: Callable[[], float],
) -> Remediation:
    """Let the Service send requests again, and open the engine where it was closed.

    Raises:
        ClusterError, AgentError: one of the two is not known to be done. An agent that refuses may be busy.
    """
    await scaler.set_serving(tried.spec.pod, serving=True)
    if not tried.status.closed:
        return stepped(tried, message, now=clock())
    if target is None:
        raise AgentUnreachable("its agent has no address")
    request = ActionRequest(timeout_s=DRAIN_TIMEOUT_S, reason=tried.spec.reason)
    result = await agents.act(target, "release", request, key=f"{tried.metadata.name}-release")
    if result.outcome in ("Ineffective", "Failed"):
        return finish(tried, "Failed", message=f"{message}, and not reopened: {result.message}", now=clock())
    reopened = result.outcome == "Succeeded"  # Unsupported: nothing had closed it either
    return stepped(tried, f"{message}, and reopened" if reopened else message, now=clock())


def _plain(message: str) -> str:
    """Without what the last attempt added."""
    return message.partition(ATTEMPT)[0]
