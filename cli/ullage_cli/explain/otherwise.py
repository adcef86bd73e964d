"""What would have happened otherwise: the forecast without the step, and what the policy itself would have done next.

The second is no guess: `decide` is asked again with the same evidence and the step turned off. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ullage_agent.wire import EngineIdentity, Forecast, RiskReport, Snapshot
from ullage_operator.model import Evidence, InferenceService, Remediation, RemedyAction
from ullage_operator.observation import AgentTarget, Observation
from ullage_operator.policy import Decision, Inputs, decide

from .. import words
from .story import clock

ENGINE: tuple[RemedyAction, ...] = ("evict", "compact", "throttle")
SETTINGS = {"evict": "evict", "compact": "compact", "throttle": "throttle", "scaleUp": "scale_up"}


def otherwise(record: Remediation, service: InferenceService | None, records: Sequence[Remediation] = ()) -> str:
    """Sentences on the alternative. `records` are the service's others."""
    parts = [without(record)]
    if service is not None and record.spec.action in SETTINGS:
        parts.append(instead(record, service, records))
    return " ".join(part for part in parts if part)


def without(record: Remediation) -> str:
    """What the evidence foretold."""
    spec, seconds = record.spec, record.spec.inputs.exhaustion_seconds
    match spec.action:
        case "release":
            return "Without it the limit would have lifted by itself at the end of its time."
        case "scaleDown":
            return "Without it one engine more than the load needed would have gone on running."
    if spec.inputs.winner in ("device", "host"):
        return (
            f"Without it, memory outside the cache ({spec.inputs.winner}) would have gone on filling; when it is gone "
            "the process is killed and every request on it fails."
        )
    if seconds is None:
        return (
            "Whether the cache would have run full is not known: no exhaustion was in sight, the risk came from "
            f"{spec.inputs.winner or 'the present state'}."
        )
    moment = clock(spec.inputs.sampled_at + timedelta(seconds=seconds))
    waiting = spec.inputs.waiting or 0
    queue = f" {waiting} requests were waiting already." if waiting else ""
    return (
        f"Without it the cache would have been full at about {moment} ({words.duration(seconds)} later, if nothing "
        f"else had changed). From then on requests are preempted and computed again, or wait.{queue}"
    )


def instead(record: Remediation, service: InferenceService, records: Sequence[Remediation]) -> str:
    """What the policy would have done had this step not been to be had."""
    decision = ask_again(record, service, records)
    if decision.action is None or decision.verdict == "Hold":
        return f"With {record.spec.action} turned off the policy would have done nothing: {decision.message}."
    return f"With {record.spec.action} turned off the policy would have taken {decision.action}: {decision.message}."


def ask_again(record: Remediation, service: InferenceService, records: Sequence[Remediation]) -> Decision:
    """`decide` on the recorded evidence, without this step and without what came later."""
    began = record.status.proposed_at
    earlier = tuple(
        r for r in records if r.final and r.status.finished_at is not None and r.status.finished_at <= began
    )
    name = SETTINGS[record.spec.action]
    policy = service.spec.remediation
    part = getattr(policy, name).model_copy(update={"enabled": False})
    changed = policy.model_copy(update={name: part, "mode": "Enforce"})
    spec = service.spec.model_copy(update={"remediation": changed, "suspend": False})
    inputs = Inputs(
        service=service.model_copy(update={"spec": spec}),
        observations=(observed(record.spec.pod, record.spec.pod_uid, record.spec.inputs),),
        records=earlier,
    )
    return decide(inputs, record.spec.inputs.sampled_at.timestamp())


def observed(pod: str, uid: str, evidence: Evidence) -> Observation:
    """The evidence as the observation it came from. Which steps the engine offered is not recorded: all are assumed."""
    at = evidence.sampled_at.timestamp()
    report = RiskReport(
        engine=EngineIdentity(type="recorded", instance=uid),
        generated_at=at,
        sample_age_s=0.0,
        score=evidence.score,
        winner=evidence.winner or None,
        terms=dict(evidence.terms),
        snapshot=Snapshot(
            sampled_at=at,
            total_blocks=evidence.total_blocks,
            hot_blocks=evidence.hot_blocks,
            reclaimable_blocks=evidence.reclaimable_blocks,
            free_blocks=evidence.free_blocks,
            largest_free_run_blocks=evidence.largest_free_run_blocks,
            compactable_blocks=evidence.compactable_blocks,
            running=evidence.running,
            waiting=evidence.waiting,
            admission_max_prompt_tokens=evidence.max_prompt_tokens,
        ),
        forecast=Forecast(exhaustion_p50_s=evidence.exhaustion_seconds),
        capabilities=("evict", "compact", "throttle", "release"),
    )
    target = AgentTarget(pod=pod, uid=uid, url="https://recorded", server_name="recorded")
    return Observation(target=target, received_at=at, report=report)
