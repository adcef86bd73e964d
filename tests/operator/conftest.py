"""Builders for operator tests: services, observations, records with one aspect set and the rest ordinary."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.app import Agent
from ullage_agent.config import AgentConfig
from ullage_agent.wire import EngineIdentity, RiskReport, Snapshot
from ullage_operator.certificates import Credentials, issue
from ullage_operator.errors import ClusterError
from ullage_operator.fields import moment
from ullage_operator.fleet import Fleet, Pod
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

DNS_NAME = "web.prod.agents.ullage.dev"
NOW = 1_800_000_000.0
ALL = ("evict", "throttle", "release")
WARM_S = 1000.0


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

    def service(
        self, *, suspend: bool = False, replicas: dict[str, Any] | None = None, **remediation: Any
    ) -> InferenceService:
        manifest = self.manifest(**remediation)
        manifest["spec"] |= {"suspend": suspend, "replicas": replicas or {}}
        return read_service(manifest)

    def fleet(self, *pods: str | Pod) -> Fleet:
        """Pods by name, ready for long and serving, or as given."""
        return Fleet(pods=tuple(self.pod(p) if isinstance(p, str) else p for p in pods))

    def pod(self, name: str, *, ready: bool = True, age: float = WARM_S, **changes: Any) -> Pod:
        """A pod that has been ready for `age` seconds."""
        ready_at = self.now - age if ready else None
        return Pod(name=name, uid=f"uid-{name}", ready=ready, ready_at=ready_at, **changes)

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
        terms = {} if score is None else snapshot.pop("terms", {"classic": score})
        seen = Snapshot(
            sampled_at=at,
            **{"total_blocks": 100, "free_blocks": 10, "hot_blocks": 80, "reclaimable_blocks": 10, **snapshot},
        )
        report = RiskReport(
            engine=EngineIdentity(type="fake", instance="i"),
            generated_at=at,
            sample_age_s=age,
            score=score,
            winner=max(terms, key=terms.__getitem__, default=None),
            terms=terms,
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
        parameters = {
            "evict": Parameters(ratio=0.2),
            "throttle": Parameters(max_prompt_tokens=9, ttl_seconds=9),
            "scaleUp": Parameters(from_replicas=1, to_replicas=2),
            "scaleDown": Parameters(from_replicas=2, to_replicas=1),
        }
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


class MemoryRecords:
    """Records in memory, through their written form. `fail_at` makes the n-th write from now fail."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Any]] = {}
        self.fail_at: int | None = None
        self.writes = 0

    async def load(self) -> list[Remediation]:
        return [Remediation.read(obj) for obj in self.stored.values()]

    async def save(self, record: Remediation) -> None:
        self.writes += 1
        if self.fail_at is not None and self.writes == self.fail_at:
            raise ClusterError("the store failed")
        self.stored[record.metadata.name] = record.write()

    async def delete(self, name: str) -> None:
        self.stored.pop(name, None)

    async def only(self) -> Remediation:
        (record,) = await self.load()
        return record


@pytest.fixture
def records() -> MemoryRecords:
    return MemoryRecords()


class RunningAgent:
    """The real agent on loopback with a simulated engine behind it."""

    def __init__(self, agent: Agent, target: AgentTarget, credentials: Credentials) -> None:
        self.agent = agent
        self.target = target
        self.credentials = credentials
        assert isinstance(agent.adapter, FakeAdapter)
        self.engine = agent.adapter

    async def polled(self) -> None:
        """Wait until a reading begun after this call is published."""
        seen = self.engine.readings
        while self.engine.readings < seen + 2:  # noqa: ASYNC110  the engine counts readings, it signals none
            await asyncio.sleep(0.01)


@pytest.fixture
async def start_agent(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[RunningAgent]]]:
    """Starts real agents; all share one token and certificate."""
    credentials = issue(DNS_NAME, now=time.time())
    files = {"cert": credentials.certificate, "key": credentials.key, "token": credentials.token}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    async with AsyncExitStack() as stack:

        async def start(pool: PoolSpec, pod: str = "web-a") -> RunningAgent:
            config = AgentConfig(
                engine="fake",
                engine_url="unused",
                metrics_host="127.0.0.1",
                metrics_port=0,
                action_host="127.0.0.1",
                action_port=0,
                tls_cert=tmp_path / "cert",
                tls_key=tmp_path / "key",
                token_file=tmp_path / "token",
                poll_seconds=0.05,
            )
            adapters = {"fake": lambda c: FakeAdapter.simulated(pool, c.clock)}
            agent = await stack.enter_async_context(Agent(config, adapters=adapters))
            assert agent.action_address is not None
            host, port = agent.action_address
            target = AgentTarget(pod=pod, uid=f"uid-{pod}", url=f"https://{host}:{port}", server_name=DNS_NAME)
            running = RunningAgent(agent, target, credentials)
            await running.polled()
            return running

        yield start


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(trust_env=False) as made:
        yield made


@dataclass
class MemoryCluster:
    """The calls of `kube.Cluster` on a dictionary. `failures` are raised by the next calls, one each."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    patches: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, kind: str, namespace: str, name: str, *, version: str = "") -> dict[str, Any] | None:
        self.gets.append(kind)
        if self.failures:
            raise self.failures.pop(0)
        return copy.deepcopy(self.objects.get((kind, name)))

    async def list(
        self, kind: str, namespace: str | None, selector: str = "", *, version: str = ""
    ) -> list[dict[str, Any]]:
        self.lists.append(kind)
        if self.failures:
            raise self.failures.pop(0)
        return [copy.deepcopy(obj) for (found, _), obj in self.objects.items() if found == kind]

    async def resources(self, group_version: str) -> frozenset[str]:
        return frozenset()

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        place = obj["kind"], obj["metadata"]["name"]
        made = copy.deepcopy(obj)
        made["metadata"] |= {"uid": f"uid-{'-'.join(place)}", "resourceVersion": str(len(self.written) + 1)}
        self.objects[place] = made
        self._note(obj["kind"])
        return copy.deepcopy(made)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.created.append(obj)
        return obj

    async def write_status(self, kind: str, namespace: str, name: str, status: Any) -> dict[str, Any]:
        obj = self.objects[kind, name]
        obj["status"] = {k: v for k, v in status.items() if v is not None}
        self._note(f"{kind}.status")
        return obj

    async def patch(
        self, kind: str, namespace: str, name: str, body: dict[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop(0)
        self.patches.append((kind, name, subresource, body))
        return {}

    async def delete(self, kind: str, namespace: str, name: str) -> None:
        self.objects.pop((kind, name), None)

    def _note(self, what: str) -> None:
        self.written.append(what)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()
