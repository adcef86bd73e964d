"""One policy over recorded readings: the agent's own analysis and the operator's own `decide`. No IO.

A lane has one engine and no cluster, as `ullage up` has: steps that change the number of engines are not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ullage_agent.analysis import Analysis
from ullage_agent.wire import Action, RiskReport
from ullage_operator.model import InferenceService, Remediation
from ullage_operator.observation import AgentTarget, Observation
from ullage_operator.policy import Decision, Inputs, Watch, decide, watch
from ullage_operator.remediation import answered, sent

from .data import Moment, Recording
from .effects import Effects

CAPABILITIES: dict[str, tuple[Action, ...]] = {
    "ullage": ("evict", "throttle", "release"),
    "fake": ("evict", "compact", "throttle", "release"),
}
GATED: tuple[Action, ...] = ("throttle", "release")
"""What engines offer that are steered by the admission gate alone."""
SWEEP_S = 2.0
FULL = 0.99
"""Share of hot blocks from which the pool counts as full."""
TARGET = AgentTarget(pod="engine", uid="recorded", url="https://recorded", server_name="recorded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the policy saw at one time."""

    at: float
    risk: float | None
    winner: str
    hot: float | None
    """Share of the pool."""
    exhaustion_s: float | None
    throttled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A decision other than to go on as before."""

    at: float
    verdict: str
    reason: str
    action: str
    message: str
    risk: float | None


@dataclass(slots=True)
class Lane:
    """One policy's run."""

    name: str
    service: InferenceService
    estimate: bool
    """Whether effects are estimated; False: the readings are taken to show them."""
    capabilities: tuple[Action, ...]
    sweep_s: float = SWEEP_S
    analysis: Analysis = field(default_factory=Analysis)
    effects: Effects = field(default_factory=Effects)
    records: dict[str, Remediation] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    watched: Watch = field(default_factory=Watch)
    _swept_at: float = float("-inf")
    _observation: Observation | None = None

    def run(self, recording: Recording) -> None:
        """All of a recording."""
        for moment in recording.moments:
            self.take(moment)

    def take(self, moment: Moment) -> None:
        """One reading, and a decision if it is time for one."""
        if moment.reading is not None:
            self._observe(moment)
        due = moment.at - self._swept_at >= self.sweep_s - 1e-6
        if due and self._observation is not None:
            self._swept_at = moment.at
            self._decide(moment)

    def _observe(self, moment: Moment) -> None:
        assert moment.reading is not None  # noqa: S101  its caller looked
        reading = self.effects.apply(moment.reading, moment.at) if self.estimate else moment.reading
        reading = replace(reading, snapshot=replace(reading.snapshot, sampled_at=moment.wall))
        found = self.analysis.take(reading, moment.at, moment.around)
        report = RiskReport(
            engine=reading.identity,
            generated_at=moment.wall,
            sample_age_s=0.0,
            score=found.risk.score,
            winner=found.risk.winner,
            terms=found.risk.terms,
            snapshot=reading.snapshot,
            fragmentation=found.fragmentation,
            forecast=found.forecast,
            service=found.service,
            liveness=found.liveness,
            devices=moment.around.devices,
            host=moment.around.host,
            capabilities=self.capabilities,
            violations=reading.violations,
        )
        self._observation = Observation(target=TARGET, received_at=moment.wall, report=report)
        state = reading.snapshot
        known = state.hot_blocks is not None and state.total_blocks
        self.points.append(
            Point(
                at=moment.at,
                risk=found.risk.score,
                winner=found.risk.winner or "",
                hot=(state.hot_blocks or 0) / (state.total_blocks or 1) if known else None,
                exhaustion_s=found.forecast.exhaustion_p50_s,
                throttled=state.admission_max_prompt_tokens is not None,
            )
        )

    def _decide(self, moment: Moment) -> None:
        assert self._observation is not None  # noqa: S101  its caller looked
        inputs = Inputs(
            service=self.service,
            observations=(self._observation,),
            records=tuple(self.records.values()),
            watch=self.watched,
        )
        self.watched = watch(inputs, moment.wall)
        decision = decide(replace(inputs, watch=self.watched), moment.wall)
        self._note(decision, moment.at)
        self.records |= {record.metadata.name: record for record in decision.updates}
        if decision.execute is not None:
            self._execute(decision.execute, moment)

    def _execute(self, record: Remediation, moment: Moment) -> None:
        observation = self._observation
        if observation is None or observation.report is None or observation.report.snapshot is None:
            return
        result = self.effects.act(record, observation.report.snapshot, moment.at)
        self.records[record.metadata.name] = answered(sent(record), result, now=moment.wall)

    def _note(self, decision: Decision, at: float) -> None:
        if decision.verdict == "Hold":
            last = self.happenings[-1] if self.happenings else None
            seen = self._observation is not None and self._observation.usable
            interesting = seen and decision.reason in ("RateLimited", "LadderExhausted", "StaleData")
            if not interesting or (last is not None and last.reason == decision.reason):
                return
        observation = self._observation
        self.happenings.append(
            Happening(
                at=at,
                verdict=decision.verdict,
                reason=str(decision.reason),
                action=decision.action or "",
                message=decision.message,
                risk=observation.score if observation is not None and observation.usable else None,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A lane in figures."""

    name: str
    peak: float | None
    at_risk_s: float
    """Seconds with the score at the policy's threshold or above."""
    full_s: float
    """Seconds with the pool full of hot blocks."""
    throttled_s: float
    first_action_s: float | None
    lead_s: float | None
    """From the first action to the first preemption of the recording; None without either."""
    actions: dict[str, int]
    """Done or, without leave to act, proposed or noted down."""
    effective: int
    ineffective: int
    blocks_freed: int


def outcome(lane: Lane, preempted_at: float | None) -> Outcome:
    """Sum a lane up."""
    threshold = lane.service.spec.remediation.risk_threshold
    at_risk = full = throttled = 0.0
    for now, following in zip(lane.points, lane.points[1:], strict=False):
        span = following.at - now.at
        at_risk += span if (now.risk or 0.0) >= threshold else 0.0
        full += span if (now.hot or 0.0) >= FULL else 0.0
        throttled += span if now.throttled else 0.0
    begun = [h for h in lane.happenings if h.verdict in ("Act", "Propose", "Observe") and h.reason != "Unanswered"]
    first = begun[0].at if begun else None
    actions: dict[str, int] = {}
    for happening in begun:
        actions[happening.action] = actions.get(happening.action, 0) + 1
    records = list(lane.records.values())
    risks = [point.risk for point in lane.points if point.risk is not None]
    return Outcome(
        name=lane.name,
        peak=max(risks, default=None),
        at_risk_s=at_risk,
        full_s=full,
        throttled_s=throttled,
        first_action_s=first,
        lead_s=None if first is None or preempted_at is None else preempted_at - first,
        actions=actions,
        effective=sum(record.status.phase == "Succeeded" for record in records),
        ineffective=sum(record.status.phase in ("Ineffective", "Failed") for record in records),
        blocks_freed=sum(record.status.blocks_freed or 0 for record in records),
    )
