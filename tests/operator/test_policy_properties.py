"""Laws of the policy, held against any history of readings, answers, approvals, waits and mode changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_agent.wire import ActionResult
from ullage_operator.model import FINAL_PHASES, Remediation
from ullage_operator.observation import Observation
from ullage_operator.policy import Decision, Inputs, decide
from ullage_operator.remediation import HOUR_S, TRANSITIONS, answered, finish, sent, surplus, unanswered

PODS = ("web-a", "web-b")
LIMIT = 4


@dataclass(frozen=True)
class Reading:
    """What one agent shows at one step."""

    score: float | None
    age: float | None
    error: str | None
    throttled: bool
    free: int
    capabilities: tuple[str, ...]
    exists: bool


@dataclass(frozen=True)
class Step:
    """One tick: what is seen, how an act would be answered, what people do, how long until the next tick."""

    readings: tuple[Reading, ...]
    answer: str
    approve: bool
    mode: str
    wait: float


READING = st.builds(
    Reading,
    score=st.one_of(st.none(), st.sampled_from([0.0, 59.0, 60.0, 61.0, 84.0, 85.0, 99.0, 100.0])),
    age=st.sampled_from([None, 0.0, 1.0, 4.9, 5.1, 60.0]),
    error=st.sampled_from([None, None, None, "refused"]),
    throttled=st.booleans(),
    free=st.sampled_from([0, 10, 100]),
    capabilities=st.sampled_from(
        [(), ("evict",), ("throttle", "release"), ("evict", "throttle", "release"), ("evict", "throttle", "release")]
    ),
    exists=st.sampled_from([True, True, True, False]),
)
STEP = st.builds(
    Step,
    readings=st.tuples(READING, READING),
    answer=st.sampled_from(["Succeeded", "Succeeded", "Ineffective", "Failed", "Unsupported", "lost", "refused"]),
    approve=st.booleans(),
    mode=st.sampled_from(["Enforce", "Enforce", "Propose", "Observe"]),
    wait=st.sampled_from([0.0, 0.5, 2.0, 7.0, 16.0, 70.0, 400.0, 4000.0]),
)


@dataclass
class World:
    """Records as a store would hold them, and every law that may be checked on the way."""

    build: Any
    now: float
    records: dict[str, Remediation] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    endings: dict[str, str] = field(default_factory=dict)

    def tick(self, step: Step) -> Decision:
        service = self.build.service(mode=step.mode, maxActionsPerHour=LIMIT)
        if step.approve:
            self._approve()
        observations = tuple(self._observe(step))
        inputs = Inputs(service=service, observations=observations, records=tuple(self.records.values()))
        decision = decide(inputs, self.now)
        self._check_deterministic(inputs, decision)
        self._check_authority(decision, observations, service.stale_after_s)
        for record in decision.updates:
            self._save(record)
        if decision.execute is not None:
            self._save(self._answer(decision.execute, step.answer))
        open_records = [r for r in self.records.values() if not r.final]
        assert sum(r.status.phase == "Running" for r in open_records) <= 1
        proposed = [r.spec.action for r in open_records if r.status.phase != "Running"]
        assert len(set(proposed)) == len(proposed), "one question at a time for each action"
        for name in surplus(tuple(self.records.values()), limit=2, now=self.now):
            assert self.records[name].final
            del self.records[name]
        return decision

    def _observe(self, step: Step) -> list[Observation]:
        return [
            self.build.older(
                self.build.observation(
                    r.score,
                    pod=pod,
                    age=r.age,
                    error=r.error,
                    capabilities=r.capabilities,
                    free_blocks=r.free,
                    admission_max_prompt_tokens=9 if r.throttled else None,
                ),
                self.build.now - self.now,
            )
            for pod, r in zip(PODS, step.readings, strict=True)
            if r.exists
        ]

    def _approve(self) -> None:
        for name, record in self.records.items():
            if record.status.phase == "Proposed":
                spec = record.spec.model_copy(update={"approved": True})
                self.records[name] = record.model_copy(update={"spec": spec})

    def _save(self, record: Remediation) -> None:
        name = record.metadata.name
        old = self.records.get(name)
        if old is not None:
            assert not old.final, "nothing is written to a record that has ended"
            assert record.status.phase == old.status.phase or _reachable(old.status.phase, record.status.phase)
        begins = record.status.started_at is not None and (old is None or old.status.started_at is None)
        if begins and record.spec.action != "release":
            self._check_budget()
        if record.final:
            assert name not in self.endings, "one ending each"
            self.endings[name] = record.status.phase
        self.records[name] = record

    def _check_budget(self) -> None:
        self.starts = [start for start in self.starts if start > self.now - HOUR_S]
        self.starts.append(self.now)
        assert len(self.starts) <= LIMIT

    def _check_deterministic(self, inputs: Inputs, decision: Decision) -> None:
        turned = Inputs(service=inputs.service, observations=inputs.observations[::-1], records=inputs.records[::-1])
        assert decide(turned, self.now) == decision

    def _check_authority(self, decision: Decision, observations: tuple[Observation, ...], stale_after_s: float) -> None:
        if decision.execute is None:
            return
        target = [o for o in observations if o.target.uid == decision.execute.spec.pod_uid]
        assert target, "an act is meant for an engine that exists"
        assert target[0].fresh(now=self.now, stale_after_s=stale_after_s), "stale data never disrupts"
        assert decision.action in (target[0].report.capabilities if target[0].report else ()) or (
            decision.reason in ("Unanswered", "Approved")
        )

    def _answer(self, record: Remediation, answer: str) -> Remediation:
        tried = sent(record)
        if answer == "lost":
            return unanswered(tried, "no answer")
        if answer == "refused":
            return finish(tried, "Failed", message="refused", now=self.now)
        freed = 10 if answer == "Succeeded" else 0
        result = ActionResult(
            action=record.spec.action,
            outcome=answer,
            message=answer,
            bytes_freed=freed,  # type: ignore[arg-type]
        )
        return answered(tried, result, now=self.now)


def _reachable(start: str, end: str) -> bool:
    following = TRANSITIONS[start]  # type: ignore[index]
    return end in following or any(_reachable(phase, end) for phase in following)


@given(steps=st.lists(STEP, max_size=25))
@settings(max_examples=150)
def test_any_history_keeps_the_laws_and_ends_every_record(build: Any, steps: list[Step]) -> None:
    world = World(build, build.now)
    for step in steps:
        world.tick(step)
        world.now += step.wait
    calm = Step(
        readings=(Reading(10.0, 0.0, None, False, 100, (), True),) * 2,
        answer="lost",
        approve=False,
        mode="Enforce",
        wait=1000.0,
    )
    for _ in range(4):
        world.tick(calm)
        world.now += calm.wait
    assert all(record.status.phase in FINAL_PHASES for record in world.records.values())


@given(steps=st.lists(STEP, max_size=12))
@settings(max_examples=100)
def test_a_restart_between_any_two_ticks_changes_nothing(build: Any, steps: list[Step]) -> None:
    """All that decisions depend on survives being written down and read back."""
    plain, restarted = World(build, build.now), World(build, build.now)
    for step in steps:
        first, second = plain.tick(step), restarted.tick(step)
        assert first == second
        restarted.records = {name: Remediation.read(r.write()) for name, r in restarted.records.items()}
        assert restarted.records == plain.records
        plain.now = restarted.now = plain.now + step.wait
