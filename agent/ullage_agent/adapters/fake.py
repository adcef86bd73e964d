"""An engine that is not there: a script of snapshots, or a small simulated pool. For tests and demonstrations.

From the command line it is `--engine fake --engine-url FILE.json`; the file holds one of
`{"steps": [{"snapshot": {…}}, {"error": "…"}, {"hang_s": 3}]}`, one step a reading, the last one repeating, and
`{"pool": {…}}` with the fields of `PoolSpec`. `instance` and `model` may stand beside either. A scripted engine
has no actions. A simulated one has all of them, and they have their effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ullage_agent.adapters.base import AdapterConfig, Reading
from ullage_agent.adapters.contract import Ledger, build_snapshot
from ullage_agent.adapters.simulation import PoolSpec, SimulatedPool
from ullage_agent.clock import Clock, SystemClock
from ullage_agent.errors import ConfigError, EngineUnreachable
from ullage_agent.wire import ACTIONS, Action, ActionRequest, ActionResult, EngineIdentity, Rank, Snapshot, Violation

REMEMBERED_KEYS = 1024


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One reading: at most a hang, then either a snapshot or an error."""

    snapshot: dict[str, Any] | None = None
    """Fields of `wire.Snapshot`; `sampled_at` is filled in, those left out are None."""
    violations: tuple[Violation, ...] = ()
    error: str | None = None
    """The engine cannot be reached, for this reason."""
    hang_s: float = 0.0
    """Real seconds before the engine answers."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file behind `--engine-url`."""

    steps: tuple[Step, ...] = ()
    pool: PoolSpec | None = None
    instance: str = "fake"
    model: str = "fake"


@dataclass(frozen=True, slots=True)
class _Done:
    action: Action
    request: ActionRequest
    result: ActionResult


class FakeAdapter:
    """Plays a `Scenario`. Implements `EngineAdapter`.

    `pool` is None for a script. `readings` counts the calls of `read`, `acts` lists the actions really done.
    """

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        if bool(scenario.steps) == (scenario.pool is not None):
            raise ConfigError("a fake engine needs exactly one of 'steps' and 'pool'")
        self._scenario = scenario
        self._clock = clock
        self._done: dict[str, _Done] = {}
        self.identity = EngineIdentity(type="fake", instance=scenario.instance, version="0", model=scenario.model)
        self.pool = None if scenario.pool is None else SimulatedPool(scenario.pool, clock.monotonic())
        self.readings = 0
        self.acts: list[Action] = []

    @classmethod
    def from_config(cls, config: AdapterConfig) -> FakeAdapter:
        return cls(load_scenario(config.url), config.clock)

    @classmethod
    def scripted(cls, snapshots: Sequence[Snapshot | Exception], clock: Clock) -> FakeAdapter:
        """A script from Python: an exception's text becomes the engine's error."""
        return cls(Scenario(steps=tuple(_step(item) for item in snapshots)), clock)

    @classmethod
    def simulated(cls, spec: PoolSpec, clock: Clock) -> FakeAdapter:
        """A simulated pool from Python."""
        return cls(Scenario(pool=spec), clock)

    async def read(self) -> Reading:
        self.readings += 1
        if self.pool is not None:
            snapshot = self.pool.snapshot(self._clock.monotonic(), self._clock.wall(), self.readings)
            return Reading(snapshot=snapshot, identity=self.identity)
        step = self._scenario.steps[min(self.readings, len(self._scenario.steps)) - 1]
        if step.hang_s:
            await asyncio.sleep(step.hang_s)
        if step.snapshot is None:
            raise EngineUnreachable(step.error or "the script has no snapshot here")
        return self._checked(step.snapshot, step.violations)

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        if self.pool is None:
            return ActionResult(action=action, outcome="Unsupported", message=f"a scripted engine has no {action}")
        known = self._done.get(idempotency_key)
        if known is not None and (known.action, known.request) == (action, request):
            return known.result
        result = self._act_on(self.pool, action, request)
        self.acts.append(action)
        self._remember(idempotency_key, _Done(action, request, result))
        return result

    def capabilities(self) -> tuple[Action, ...]:
        return () if self.pool is None else ACTIONS

    async def close(self) -> None:
        """Nothing is held."""

    def _act_on(self, pool: SimulatedPool, action: Action, request: ActionRequest) -> ActionResult:
        now, wall = self._clock.monotonic(), self._clock.wall()
        before = pool.snapshot(now, wall, self.readings)
        result = pool.act(action, request, now)
        return replace(result, before=before, after=pool.snapshot(now, wall, self.readings))

    def _checked(self, values: dict[str, Any], given: tuple[Violation, ...]) -> Reading:
        ledger = Ledger()
        parts = {name: value for name, value in values.items() if name not in ("sampled_at", "ranks")}
        ranks = msgspec.convert(values.get("ranks", ()), type=tuple[Rank, ...])
        snapshot = build_snapshot(parts, sampled_at=self._clock.wall(), in_flight=0, ledger=ledger, ranks=ranks)
        return Reading(snapshot=snapshot, identity=self.identity, violations=(*given, *ledger.violations))

    def _remember(self, key: str, done: _Done) -> None:
        self._done[key] = done
        if len(self._done) > REMEMBERED_KEYS:
            del self._done[next(iter(self._done))]


def load_scenario(path: str) -> Scenario:
    """Read a scenario file.

    Raises:
        ConfigError: it cannot be read, or a field of it is wrong; the message names file and field.
    """
    try:
        scenario = msgspec.json.decode(Path(path).read_bytes(), type=Scenario)
        for index, step in enumerate(scenario.steps):
            _check_fields(step, f"$.steps[{index}].snapshot")
        FakeAdapter(scenario, SystemClock())
    except OSError as error:
        raise ConfigError(
            f"--engine-url {path}: {error.strerror}; give the path of a fake engine's JSON file"
        ) from error
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"--engine-url {path}: {error}; see ullage_agent.adapters.fake for its fields") from error
    return scenario


def _check_fields(step: Step, where: str) -> None:
    if step.snapshot is None:
        return
    unknown = step.snapshot.keys() - {known.name for known in fields(Snapshot)}
    if unknown:
        raise ConfigError(f"{where} has no field {min(unknown)!r}")
    try:
        msgspec.convert({"sampled_at": 0.0, **step.snapshot}, type=Snapshot)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _step(item: Snapshot | Exception) -> Step:
    if isinstance(item, Snapshot):
        return Step(snapshot=msgspec.to_builtins(item))
    return Step(error=str(item))
