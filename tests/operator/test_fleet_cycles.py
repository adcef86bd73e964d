"""A simulated fleet under the real sweeper and virtual time: whole cycles up and down, and laws under any load."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_agent.wire import Action, ActionRequest, ActionResult, EngineIdentity, RiskReport, Snapshot
from ullage_operator.budget import Budget
from ullage_operator.errors import AgentUnreachable, ClusterError
from ullage_operator.fleet import Fleet, Pod
from ullage_operator.gather import AgentClient
from ullage_operator.manifest import read_service
from ullage_operator.model import FINAL_PHASES, InferenceService, Remediation
from ullage_operator.observation import AgentTarget
from ullage_operator.policy import DISRUPTIVE, Reason
from ullage_operator.sweep import Sweeper

POOL = 100
TICK_S = 2.0
BOOT_S = 40.0
WINDOW_S = 120.0
CAP = 30
EVERYTHING: tuple[Action, ...] = ("evict", "compact", "throttle", "release", "drain")


@dataclass
class Engine:
    """One simulated engine. Its load follows its share of the demand; relief by eviction wears off."""

    pod: Pod
    born: float
    hot: float = 0.0
    relief: float = 0.0
    limit_until: float = 0.0
    cost: int = 0
    stops_at: float | None = None

    def step(self, demand: float, now: float, fall: float) -> None:
        self.relief = max(0.0, self.relief - 0.5 * TICK_S)
        share = demand * (0.8 if self.limit_until > now else 1.0) if self.pod.serving else 0.0
        aim = max(0.0, share - self.relief)
        self.hot += max(-fall, min(8.0, aim - self.hot))

    def report(self, now: float) -> RiskReport:
        hot = int(min(POOL, max(0.0, self.hot)))
        score = min(100.0, max(0.0, self.hot))
        left = self.limit_until - now if self.limit_until > now else None
        snapshot = Snapshot(
            sampled_at=now,
            total_blocks=POOL,
            hot_blocks=hot,
            reclaimable_blocks=0,
            free_blocks=POOL - hot,
            running=1 if hot else 0,
            waiting=0,
            admission_max_prompt_tokens=None if left is None else 9,
            admission_expires_in_s=left,
        )
        return RiskReport(
            engine=EngineIdentity(type="fake", instance=self.pod.uid),
            generated_at=now,
            sample_age_s=0.0,
            score=score,
            winner="classic",
            terms={"classic": score},
            snapshot=snapshot,
            capabilities=EVERYTHING,
        )


@dataclass
class World:
    """Engines, the number wanted of them, and the sweeper that watches. Implements `Scaler`."""

    settings: dict[str, Any] = field(default_factory=dict)
    schedulable: Callable[[int], bool] = lambda count: True
    helpful: bool = True
    fall: float = 8.0
    now: float = 1_800_000_000.0
    desired: int = 1
    engines: dict[str, Engine] = field(default_factory=dict)
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    removed_in_flight: int = 0
    born: int = 0
    stale: bool = False
    broken: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._create(ready=True)
        self.sweeper = self._sweeper()

    def service(self) -> InferenceService:
        return read_service(
            {
                "apiVersion": "ullage.dev/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": "web", "namespace": "prod", "uid": "u"},
                "spec": {
                    "model": {"source": "m"},
                    "engine": {"kvCache": {"memory": "48Mi"}},
                    "replicas": {"min": 1, "max": 4, "desired": self.desired},
                    "remediation": {
                        "maxActionsPerHour": CAP,
                        "scaleUp": {
                            "persistSeconds": 40,
                            "cooldownSeconds": 30,
                            "warmUpSeconds": 20,
                            "pendingSeconds": 90,
                        },
                        "scaleDown": {"windowSeconds": WINDOW_S, "drainSeconds": 120},
                        **self.settings,
                    },
                },
            }
        )

    def _sweeper(self) -> Sweeper:
        client = SimulatedAgents(None, "", ssl.create_default_context(), self)  # type: ignore[arg-type]
        watched = self.sweeper.watch if hasattr(self, "sweeper") else None
        return Sweeper(
            service=self.service(),
            agents=client,
            records=self,
            clock=lambda: self.now,
            scaler=self,
            budget=Budget(3),
            watched=watched,
        )

    def run(self, seconds: float, demand: Callable[[float], float]) -> None:
        asyncio.run(self._run(seconds, demand))

    async def _run(self, seconds: float, demand: Callable[[float], float]) -> None:
        end = self.now + seconds
        while self.now < end:
            self._cluster()
            serving = [e for e in self.engines.values() if e.pod.ready and e.pod.serving]
            for engine in self.engines.values():
                share = demand(self.now) / max(1, len(serving)) if engine.pod.ready else 0.0
                engine.step(share, self.now, self.fall)
            await self._tick()
            self.now += TICK_S

    async def _tick(self) -> None:
        if self.sweeper._service.spec.replicas.desired != self.desired:
            self.sweeper = self._sweeper()
        targets = [
            AgentTarget(pod=name, uid=e.pod.uid, url="", server_name="")
            for name, e in self.engines.items()
            if e.pod.ready and not e.pod.leaving
        ]
        result = await self.sweeper.tick(targets, fleet=lambda: Fleet(pods=tuple(e.pod for e in self.engines.values())))
        self.reasons.append(result.decision.reason)
        self._check_laws(result.records)

    def _check_laws(self, records: tuple[Remediation, ...]) -> None:
        running = [r for r in records if r.status.phase == "Running"]
        assert sum(r.spec.action in DISRUPTIVE for r in running) <= 1
        assert sum(r.spec.action in ("scaleUp", "scaleDown") for r in running) <= 1
        counted = [r for r in records if r.spec.action != "release" and r.status.started_at is not None]
        recent = [r for r in counted if r.status.started_at and r.status.started_at.timestamp() > self.now - 3600]
        assert len(recent) <= CAP
        assert len({r.metadata.name for r in records}) == len(records)

    def _cluster(self) -> None:
        """What the ReplicaSet controller and the kubelet do."""
        for name, engine in list(self.engines.items()):
            booted = self.now - engine.born >= BOOT_S and self.schedulable(len(self.engines))
            if not engine.pod.ready and booted and not engine.pod.leaving:
                engine.pod = replace(engine.pod, ready=True, ready_at=self.now)
            if engine.stops_at is not None and self.now >= engine.stops_at:
                del self.engines[name]
        staying = [e for e in self.engines.values() if not e.pod.leaving]
        for _ in range(self.desired - len(staying)):
            self._create(ready=False)
        surplus = sorted(staying, key=lambda e: (e.pod.ready, e.cost))[: max(0, len(staying) - self.desired)]
        for engine in surplus:
            self.removed_in_flight += int(engine.hot)
            engine.pod = replace(engine.pod, leaving=True)
            engine.stops_at = self.now + 10
        if not self.sizes or self.sizes[-1][1] != self.desired:
            self.sizes.append((self.now, self.desired))

    def _create(self, *, ready: bool) -> None:
        self.born += 1
        name = f"web-{self.born}"
        at = self.now - 1000 if ready else None
        self.engines[name] = Engine(Pod(name=name, uid=f"uid-{name}", ready=ready, ready_at=at), born=self.now)

    async def set_replicas(self, *, expected: int, wanted: int) -> None:
        if self.broken():
            raise ClusterError("HTTP 500", status=500)
        if self.desired not in (expected, wanted):
            raise ClusterError("conflict", status=409)
        self.desired = wanted

    async def set_serving(self, pod: str, *, serving: bool) -> None:
        if self.broken():
            raise ClusterError("HTTP 500", status=500)
        if pod in self.engines:
            self.engines[pod].pod = replace(self.engines[pod].pod, serving=serving)
            self.engines[pod].cost = 0 if serving else -1

    async def load(self) -> list[Remediation]:
        return [Remediation.read(obj) for obj in self.stored.values()]

    async def save(self, record: Remediation) -> None:
        old = self.stored.get(record.metadata.name)
        assert old is None or old["status"]["phase"] not in FINAL_PHASES, "nothing is written to a record that ended"
        self.stored[record.metadata.name] = record.write()

    async def delete(self, name: str) -> None:
        del self.stored[name]

    def phases(self, action: str) -> list[str]:
        return [r["status"]["phase"] for r in self.stored.values() if r["spec"]["action"] == action]


@dataclass(frozen=True, slots=True)
class SimulatedAgents(AgentClient):
    """Answers for the engines of a world."""

    world: World = field(default_factory=World)

    async def risk(self, target: AgentTarget) -> RiskReport:
        world = self.world
        if world.stale:
            raise AgentUnreachable("refused")
        return world.engines[target.pod].report(world.now)

    async def act(self, target: AgentTarget, action: Action, request: ActionRequest, *, key: str) -> ActionResult:
        world, engine = self.world, self.world.engines[target.pod]
        assert not world.stale, "stale data never disrupts"
        freed = 0
        if action == "evict" and world.helpful:
            freed = int(engine.hot * (request.ratio or 0))
            engine.hot -= freed
            engine.relief = freed
        if action == "throttle":
            engine.limit_until = world.now + (request.ttl_s or 0)
        if action == "release":
            engine.limit_until = 0.0
        outcome: Any = "Ineffective" if action in ("evict", "compact") and not freed else "Succeeded"
        return ActionResult(action=action, outcome=outcome, message=action, blocks_freed=freed, bytes_freed=freed)


def directions(world: World) -> list[tuple[float, int]]:
    """Times and signs of the changes of size."""
    steps = itertools.pairwise(world.sizes)
    return [(later[0], 1 if later[1] > earlier[1] else -1) for earlier, later in steps]


def test_up_with_the_load_and_down_again_without_a_request_cut_off() -> None:
    world = World()
    world.run(300, lambda now: 50)
    assert world.desired == 1
    world.run(600, lambda now: 180)
    assert world.desired == 3
    assert {"Succeeded"} == set(world.phases("scaleUp"))
    world.run(1200, lambda now: 30)
    assert world.desired == 1
    assert world.phases("scaleDown").count("Succeeded") == 2
    assert world.removed_in_flight == 0
    assert [sign for _, sign in directions(world)] == [1, 1, -1, -1]
    assert all(r["status"]["phase"] in FINAL_PHASES for r in world.stored.values())


def test_the_time_until_the_new_engine_is_bridged() -> None:
    world = World(helpful=False, settings={"throttle": {"ttlSeconds": 30}})
    world.run(200, lambda now: 130)
    assert world.desired >= 2
    order = [r for r in world.reasons if r in (Reason.EVICT, Reason.THROTTLE, Reason.SCALE_UP, Reason.BRIDGE)]
    assert order[:3] == [Reason.EVICT, Reason.THROTTLE, Reason.SCALE_UP]
    assert Reason.BRIDGE in order
    assert Reason.RELEASE in world.reasons or all(e.limit_until <= world.now for e in world.engines.values())


def test_a_pod_that_never_fits_is_taken_back_and_not_asked_for_all_the_time() -> None:
    world = World(schedulable=lambda count: count < 2)
    world.run(900, lambda now: 120)
    assert world.phases("scaleUp") == ["Ineffective"]
    assert world.desired == 1
    assert Reason.EVICT in world.reasons[-400:], "the planner goes on"


def test_load_that_comes_back_while_one_drains_keeps_it() -> None:
    world = World(desired=2, fall=0.5)
    world.run(60, lambda now: 40)
    start = world.now

    def demand(now: float) -> float:
        draining = any(not e.pod.serving for e in world.engines.values())
        return 95 if draining and now - start > 100 else 40

    world.run(600, demand)
    assert world.desired == 2
    assert "Ineffective" in world.phases("scaleDown")
    assert world.removed_in_flight == 0


def test_on_stale_data_nothing_changes() -> None:
    world = World(desired=2)
    world.run(60, lambda now: 30)
    world.stale = True
    before = dict(world.stored)
    world.run(600, lambda now: 30)
    assert (world.desired, world.stored) == (2, before)


@pytest.mark.parametrize("failing", [2, 3, 5])
def test_an_api_that_fails_now_and_then_stops_nothing(failing: int) -> None:
    calls = [0]

    def broken() -> bool:
        calls[0] += 1
        return calls[0] % failing != 0

    world = World(broken=broken)
    world.run(400, lambda now: 130)
    assert world.desired >= 2
    world.run(1200, lambda now: 20)
    assert world.desired == 1
    assert world.removed_in_flight == 0


@given(
    base=st.lists(st.sampled_from([10.0, 50.0, 84.0, 100.0, 170.0, 300.0]), min_size=1, max_size=4),
    noise=st.lists(st.floats(-15, 15), min_size=1, max_size=12),
    helpful=st.booleans(),
    outage=st.booleans(),
)
@settings(max_examples=25)
def test_no_flapping_on_any_load_with_bounded_noise(
    base: list[float], noise: list[float], helpful: bool, outage: bool
) -> None:
    """At most one change of direction in any window; caps, one action in flight and endings are checked every tick."""
    world = World(helpful=helpful)
    for level in base:
        world.run(260, lambda now, level=level: max(0.0, level + noise[int(now / TICK_S) % len(noise)]))  # type: ignore[misc]
        world.stale = outage and not world.stale
    world.stale = False
    world.run(900, lambda now: 5.0)
    changes = directions(world)
    turns = [later[0] for earlier, later in itertools.pairwise(changes) if earlier[1] != later[1]]
    assert all(later - earlier >= WINDOW_S for earlier, later in itertools.pairwise(turns))
    assert world.removed_in_flight == 0
    assert all(r["status"]["phase"] in FINAL_PHASES for r in world.stored.values() if r["spec"]["action"] != "evict")
