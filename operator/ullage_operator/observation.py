"""What the operator knows about one engine at one time.

Ages are taken on one clock: the agent says how old its sample was when it answered, and the operator adds the
time since then. The two machines' wall clocks are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage_agent.wire import RiskReport
from ullage_operator.fields import moment
from ullage_operator.model import Evidence

OUTSIDE_TERMS = frozenset({"device", "host"})
"""Terms of the risk score that are about memory outside the KV cache's pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTarget:
    """Where the agent of one engine answers."""

    pod: str
    """Name of the pod, or of the process in local mode."""
    uid: str
    """Identity of that pod: another pod under the same name has another one."""
    url: str
    """`https://HOST:PORT`."""
    server_name: str
    """Name that the agent's certificate must carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One attempt to read one agent: a report, or the reason why there is none."""

    target: AgentTarget
    received_at: float
    """Unix seconds by the operator's clock when the answer came or the attempt failed."""
    report: RiskReport | None = None
    error: str | None = None

    @property
    def score(self) -> float:
        """Risk 0..100; 0.0 where there is none, so check `usable` first."""
        return 0.0 if self.report is None or self.report.score is None else self.report.score

    @property
    def usable(self) -> bool:
        """Whether there is a score with the snapshot that it came from and its age."""
        report = self.report
        return report is not None and None not in (report.score, report.snapshot, report.sample_age_s)

    @property
    def sampled_at(self) -> float:
        """Unix seconds by the operator's clock when the engine was read; minus infinity where it was not."""
        if self.report is None or self.report.sample_age_s is None:
            return float("-inf")
        return self.received_at - max(0.0, self.report.sample_age_s)

    @property
    def outside_score(self) -> float:
        """Greatest risk of memory outside the cache (device, host), which no eviction gives back; 0.0 without."""
        terms = self.report.terms if self.report else {}
        return max((score for name, score in terms.items() if name in OUTSIDE_TERMS), default=0.0)

    @property
    def pool_score(self) -> float:
        """Greatest risk of the cache itself; the whole score where the agent tells of no terms."""
        terms = self.report.terms if self.report else {}
        pool = [score for name, score in terms.items() if name not in OUTSIDE_TERMS]
        return max(pool) if pool else 0.0 if terms else self.score

    @property
    def load(self) -> float | None:
        """Share of blocks that running sequences hold, in percent; None where the engine cannot say."""
        snapshot = self.report.snapshot if self.report else None
        if snapshot is None or snapshot.hot_blocks is None or not snapshot.total_blocks:
            return None
        return 100.0 * snapshot.hot_blocks / snapshot.total_blocks

    @property
    def in_flight(self) -> int | None:
        """Requests running and waiting; None where the engine cannot say."""
        snapshot = self.report.snapshot if self.report else None
        if snapshot is None or snapshot.running is None or snapshot.waiting is None:
            return None
        return snapshot.running + snapshot.waiting

    @property
    def warm_blocks(self) -> int:
        """Blocks that would be lost with the engine: held by sequences or kept for reuse."""
        snapshot = self.report.snapshot if self.report else None
        return 0 if snapshot is None else (snapshot.hot_blocks or 0) + (snapshot.reclaimable_blocks or 0)

    def fresh(self, *, now: float, stale_after_s: float) -> bool:
        """Whether anything may be decided on it: usable, and not older than `stale_after_s`."""
        return self.usable and now - self.sampled_at <= stale_after_s

    def problem(self, *, now: float) -> str:
        """Why it is not fresh, for people."""
        if self.report is None:
            return self.error or "was not read"
        if not self.usable:
            return self.report.error or "has no sample yet"
        because = f" ({self.report.error})" if self.report.error else ""
        return f"sample is {now - self.sampled_at:.1f} s old{because}"


def evidence(observation: Observation) -> Evidence:
    """The figures of a usable observation as a remediation records them."""
    report = observation.report
    if report is None or report.score is None or report.snapshot is None:
        raise ValueError(f"observation of {observation.target.pod} is not usable")
    snapshot, forecast = report.snapshot, report.forecast
    return Evidence(
        sampled_at=moment(observation.sampled_at),
        score=round(report.score, 2),
        winner=report.winner or "",
        terms={name: round(value, 2) for name, value in sorted(report.terms.items())},
        sequence=snapshot.sequence,
        total_blocks=snapshot.total_blocks,
        hot_blocks=snapshot.hot_blocks,
        reclaimable_blocks=snapshot.reclaimable_blocks,
        free_blocks=snapshot.free_blocks,
        largest_free_run_blocks=snapshot.largest_free_run_blocks,
        compactable_blocks=snapshot.compactable_blocks,
        running=snapshot.running,
        waiting=snapshot.waiting,
        exhaustion_seconds=None if forecast is None else forecast.exhaustion_p50_s,
        max_prompt_tokens=snapshot.admission_max_prompt_tokens,
    )
