"""Builders for operator tests: services, observations, records with one aspect set and the rest ordinary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ullage_agent.wire import EngineIdentity, RiskReport, Snapshot
from ullage_operator.fields import moment
from ullage_operator.manifest import read_service
from ullage_operator.model import (
    Evidence,
    InferenceService,
    Parameters,
    Remediation,
    RemediationStatus,
)
from ullage_operator.observation import AgentTarget, Observation
from ullage_operator.remediation import Step, propose

NOW = 1_800_000_000.0
ALL = ("evict", "throttle", "release")


class Build:
    """Makes objects for tests. Times are relative to `now`."""

    now = NOW

    def manifest(self, **remediation: Any) -> dict[str, Any]:
        return {
            "apiVersion": "ullage.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "web", "namespace": "prod", "uid": "uid-web", "generation": 3},
            "spec": {
                "model": {"source": "/models/tiny"},
                "engine": {"kvCache": {"memory": "48Mi"}},
                "remediation": {
                    "settleSeconds": 5,
                    "evict": {"cooldownSeconds": 15},
                    "maxActionsPerHour": 10,
                    **remediation,
                },
            },
        }

    def service(self, *, suspend: bool = False, **remediation: Any) -> InferenceService:
        manifest = self.manifest(**remediation)
        manifest["spec"]["suspend"] = suspend
        return read_service(manifest)

    def target(self, pod: str = "web-a") -> AgentTarget:
        return AgentTarget(
            pod=pod, uid=f"uid-{pod}", url="https://127.0.0.1:1", server_name="web.prod.agents.ullage.dev"
        )

    def observation(
        self,
        score: float | None = 30.0,
        *,
        pod: str = "web-a",
        age: float | None = 0.5,
        received: float = 0.0,
        error: str | None = None,
        **snapshot: Any,
    ) -> Observation:
        """`error` means not read at all. `received` is seconds relative to now; snapshot fields may be set."""
        at = self.now + received
        if error is not None:
            return Observation(target=self.target(pod), received_at=at, error=error)
        capabilities = snapshot.pop("capabilities", ALL)
        seen = Snapshot(
            sampled_at=at,
            **{"total_blocks": 100, "free_blocks": 10, "hot_blocks": 80, "reclaimable_blocks": 10, **snapshot},
        )
        report = RiskReport(
            engine=EngineIdentity(type="fake", instance="i"),
            generated_at=at,
            sample_age_s=age,
            score=score,
            winner=None if score is None else "classic",
            terms={} if score is None else {"classic": score},
            snapshot=seen,
            capabilities=capabilities,
        )
        return Observation(target=self.target(pod), received_at=at, report=report)

    def record(
        self,
        action: str = "evict",
        phase: str = "Running",
        *,
        pod: str = "web-a",
        age: float = 30.0,
        service: InferenceService | None = None,
        approved: bool = False,
        before: float = 95.0,
        **status: Any,
    ) -> Remediation:
        """A record proposed `age` seconds ago; times in `status` are seconds relative to now."""
        parameters = {"evict": Parameters(ratio=0.2), "throttle": Parameters(max_prompt_tokens=9, ttl_seconds=9)}
        inputs = Evidence(sampled_at=moment(self.now - age), score=before)
        step = Step(
            action=action,  # type: ignore[arg-type]
            parameters=parameters.get(action, Parameters()),
            reason="EvictColdBlocks",
            message="as decided",
        )
        made = propose(
            service or self.service(),
            step,
            pod=pod,
            uid=f"uid-{pod}",
            inputs=inputs,
            now=self.now - age,
        )
        times = {k: moment(self.now + v) for k, v in status.items() if k.endswith("_at")}
        others = {k: v for k, v in status.items() if not k.endswith("_at")}
        state = RemediationStatus(
            phase=phase,  # type: ignore[arg-type]
            proposed_at=moment(self.now - age),
            **{"before": inputs, "message": "as decided", **others, **times},
        )
        spec = made.spec.model_copy(update={"approved": approved})
        return made.model_copy(update={"spec": spec, "status": state})

    def older(self, observation: Observation, seconds: float) -> Observation:
        """The same reading, received `seconds` earlier."""
        return replace(observation, received_at=observation.received_at - seconds)


@pytest.fixture(scope="session")
def build() -> Build:
    return Build()
