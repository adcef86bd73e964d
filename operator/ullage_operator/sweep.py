"""One sweep over a service's engines: gather, decide, write down, act, write down.

Knows neither Kubernetes nor files: records live behind `RecordStore`, so cluster and local mode share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ullage_operator.apply import apply
from ullage_operator.gather import AgentClient, gather
from ullage_operator.model import InferenceService, Remediation
from ullage_operator.observation import AgentTarget, Observation
from ullage_operator.policy import Decision, Inputs, decide
from ullage_operator.remediation import surplus


class RecordStore(Protocol):
    """Durable remediations of one service. An exception ends the sweep; the next finds what was written."""

    async def load(self) -> Sequence[Remediation]:
        """All records, in any order."""
        ...

    async def save(self, record: Remediation) -> None:
        """Create or replace the record of that name. Durable when this returns."""
        ...

    async def delete(self, name: str) -> None:
        """Remove a record; one that is gone already is no error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What one sweep saw and did."""

    observations: tuple[Observation, ...]
    decision: Decision
    changed_records: tuple[Remediation, ...]
    """Records as last written in this sweep, each once."""
    records: tuple[Remediation, ...]
    """All records after this sweep, those deleted for age left out."""


class Sweeper:
    """Sweeps one service. Keeps nothing between ticks; one tick at a time."""

    def __init__(
        self,
        *,
        service: InferenceService,
        agents: AgentClient,
        records: RecordStore,
        clock: Callable[[], float],
        limiter: asyncio.Semaphore | None = None,
    ) -> None:
        """`clock` gives Unix seconds; `limiter` bounds how many agents all sweepers read at once."""
        self._service = service
        self._agents = agents
        self._records = records
        self._clock = clock
        self._limiter = limiter

    async def tick(self, targets: Sequence[AgentTarget]) -> SweepResult:
        """Sweep once over the agents that exist now.

        An action is sent only after its record was written; a lost answer is asked for again by a later tick.

        Raises:
            Exception: whatever the record store raises; agents that fail raise nothing.
        """
        observations = await gather(self._agents, targets, clock=self._clock, limiter=self._limiter)
        known = {record.metadata.name: record for record in await self._records.load()}
        inputs = Inputs(service=self._service, observations=observations, records=tuple(known.values()))
        decision = decide(inputs, self._clock())
        changed = await self._carry_out(decision, targets)
        known.update(changed)
        for name in surplus(tuple(known.values()), limit=self._history_limit, now=self._clock()):
            await self._records.delete(name)
            del known[name]
        return SweepResult(
            observations=observations,
            decision=decision,
            changed_records=tuple(changed.values()),
            records=tuple(known.values()),
        )

    @property
    def _history_limit(self) -> int:
        return self._service.spec.remediation.history_limit

    async def _carry_out(self, decision: Decision, targets: Sequence[AgentTarget]) -> dict[str, Remediation]:
        changed: dict[str, Remediation] = {}
        for record in decision.updates:
            await self._records.save(record)
            changed[record.metadata.name] = record
        running = decision.execute
        target = next((t for t in targets if running and t.uid == running.spec.pod_uid), None)
        if running is not None and target is not None:
            ended = await apply(running, target, self._agents, clock=self._clock)
            await self._records.save(ended)
            changed[ended.metadata.name] = ended
        return changed
