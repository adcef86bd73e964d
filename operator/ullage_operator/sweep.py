"""One sweep over a service's engines: gather, decide, write down, act, write down.

Knows neither Kubernetes nor files: records live behind `RecordStore`, so cluster and local mode share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ullage_operator.alerts import Alert
from ullage_operator.apply import Scaler, apply
from ullage_operator.budget import Budget
from ullage_operator.fleet import Fleet
from ullage_operator.gather import AgentClient, gather
from ullage_operator.model import InferenceService, Remediation
from ullage_operator.observation import AgentTarget, Observation
from ullage_operator.policy import Decision, Inputs, Watch, decide, watch
from ullage_operator.remediation import surplus

DAY_S = 86_400.0


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
    """Sweeps one service. Keeps nothing between ticks but `watch`; one tick at a time."""

    def __init__(
        self,
        *,
        service: InferenceService,
        agents: AgentClient,
        records: RecordStore,
        clock: Callable[[], float],
        limiter: asyncio.Semaphore | None = None,
        silent_limiter: asyncio.Semaphore | None = None,
        scaler: Scaler | None = None,
        budget: Budget | None = None,
        watched: Watch | None = None,
    ) -> None:
        """`clock` gives Unix seconds; `limiter` bounds how many agents all sweepers read at once, `silent_limiter`
        how many of those that did not answer the last time; without `scaler`
        the number of engines is not changed; `watched` goes on from another sweeper of the same service."""
        self._service = service
        self._agents = agents
        self._records = records
        self._clock = clock
        self._limiter = limiter
        self._silent_limiter = silent_limiter
        self._silent: frozenset[str] = frozenset()
        self._scaler = scaler
        self._budget = budget
        self._key = (service.metadata.namespace, service.metadata.name)
        self.watch = watched or Watch()
        """What has been so for a while."""

    async def tick(
        self,
        targets: Sequence[AgentTarget],
        *,
        fleet: Callable[[], Fleet] | None = None,
        alerts: Callable[[], tuple[Alert, ...]] = tuple,
    ) -> SweepResult:
        """Sweep once over the agents that exist now. `fleet` and `alerts` are asked when the readings are there.

        An action is sent only after its record was written; a lost answer is asked for again by a later tick.

        Raises:
            Exception: whatever the record store raises; agents that fail raise nothing.
        """
        observations = await gather(
            self._agents,
            targets,
            clock=self._clock,
            limiter=self._limiter,
            silent=self._silent,
            silent_limiter=self._silent_limiter,
        )
        self._silent = frozenset(o.target.uid for o in observations if o.report is None)
        known = {record.metadata.name: record for record in await self._records.load()}
        pods = fleet() if fleet is not None and self._scaler is not None else None
        decision = self._decide(observations, known, pods, alerts())
        changed = await self._carry_out(decision, targets)
        known.update(changed)
        if self._budget is not None:
            self._budget.enter(self._key, known.values())
        await self._forget_old(known)
        return SweepResult(
            observations=observations,
            decision=decision,
            changed_records=tuple(changed.values()),
            records=tuple(known.values()),
        )

    def _decide(
        self,
        observations: tuple[Observation, ...],
        known: dict[str, Remediation],
        fleet: Fleet | None,
        alerts: tuple[Alert, ...],
    ) -> Decision:
        """Without a pause inside: what the budget grants is entered before anybody else asks."""
        now, budget = self._clock(), self._budget
        inputs = Inputs(
            service=self._service,
            observations=observations,
            records=tuple(known.values()),
            fleet=fleet,
            watch=self.watch,
            alerts=alerts,
            slots_left=None if budget is None else budget.left_for(self._key),
        )
        self.watch = watch(inputs, now)
        decision = decide(replace(inputs, watch=self.watch), now)
        if budget is not None:
            budget.enter(self._key, {**known, **{r.metadata.name: r for r in decision.updates}}.values())
        return decision

    async def _carry_out(self, decision: Decision, targets: Sequence[AgentTarget]) -> dict[str, Remediation]:
        changed: dict[str, Remediation] = {}
        for record in decision.updates:
            await self._records.save(record)
            changed[record.metadata.name] = record
        if decision.execute is not None:
            ended = await apply(decision.execute, targets, self._agents, scaler=self._scaler, clock=self._clock)
            if ended != decision.execute:
                await self._records.save(ended)
                changed[ended.metadata.name] = ended
        return changed

    async def _forget_old(self, known: dict[str, Remediation]) -> None:
        policy = self._service.spec.remediation
        old = surplus(
            tuple(known.values()), limit=policy.history_limit, now=self._clock(), max_age_s=policy.history_days * DAY_S
        )
        for name in old:
            await self._records.delete(name)
            del known[name]
