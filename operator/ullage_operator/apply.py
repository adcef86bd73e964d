"""Send one running remediation to its agent and write the answer into the record. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from ullage_agent.wire import ActionRequest
from ullage_operator.errors import AgentRefused, AgentUnreachable
from ullage_operator.gather import AgentClient
from ullage_operator.model import Remediation
from ullage_operator.observation import AgentTarget
from ullage_operator.remediation import answered, finish, sent, unanswered

ACTION_TIMEOUT_S = 10.0
"""Bound that the agent is given for one action."""


def request_for(record: Remediation) -> ActionRequest:
    """The wire form of a record's action. Equal for every sending, as its idempotency key demands."""
    parameters = record.spec.parameters
    return ActionRequest(
        ratio=parameters.ratio,
        max_prompt_tokens=parameters.max_prompt_tokens,
        ttl_s=parameters.ttl_seconds,
        timeout_s=ACTION_TIMEOUT_S,
        reason=record.spec.reason,
    )


async def apply(
    record: Remediation, target: AgentTarget, agents: AgentClient, *, clock: Callable[[], float]
) -> Remediation:
    """Send a Running record, which the caller has written down before, under its name as the key.

    Returns the record to write: answered (Running until its effect is judged, or final), or still Running
    without an answer when it was lost. Sending the same record again is safe.
    """
    tried = sent(record)
    key = record.metadata.name
    try:
        result = await agents.act(target, record.spec.action, request_for(record), key=key)
    except AgentRefused as error:
        return finish(tried, "Failed", message=f"the agent refused: {error}", now=clock())
    except AgentUnreachable as error:
        return unanswered(tried, f"attempt {tried.status.attempts}: {error}")
    return answered(tried, result, now=clock())
