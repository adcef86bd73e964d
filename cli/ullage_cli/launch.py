"""Start a service's programs: for each replica an engine and its agent, as a pod would hold them.

The admin interface is a Unix socket in a private folder, the agent serves TLS with a certificate and token made
for this run: the same paths through the same code as in a cluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage_operator import certificates
from ullage_operator.arguments import AgentFiles, agent_arguments, engine_arguments
from ullage_operator.certificates import Credentials
from ullage_operator.model import InferenceService
from ullage_operator.observation import AgentTarget

from .errors import BrokenLoop, InputError
from .preflight import HOST
from .processes import Child, ChildSpec, Supervisor

ENGINE_START_S = 600.0
"""Converting and loading a large model on a slow disk takes minutes."""
AGENT_START_S = 60.0
_PROGRESS_S = 0.25
_FIELDS = {
    "--model": "spec.model.source",
    "--max-model-len": "spec.model.maxLength",
    "--kv-memory": "spec.engine.kvCache.memory",
    "--kv-type": "spec.engine.kvCache.type",
    "--block-size": "spec.engine.kvCache.blockSize",
    "--host-memory": "spec.engine.kvCache.hostMemory",
    "--kv-budget": "spec.engine.kvCache.eviction.budget",
    "--eviction-policy": "spec.engine.kvCache.eviction.policy",
    "--evict-interval": "spec.engine.kvCache.eviction.interval",
    "--protected-tokens": "spec.engine.kvCache.eviction.protectedTokens",
    "--recent-tokens": "spec.engine.kvCache.eviction.recentTokens",
    "--max-batch-tokens": "spec.engine.maxBatchTokens",
    "--max-sequences": "spec.engine.maxSequences",
    "--dtype": "spec.engine.dtype",
    "--numerics": "spec.engine.numerics",
    "--speculation": "spec.engine.speculation.method",
    "--draft-model": "spec.engine.speculation.draftModel",
    "--speculation-tokens": "spec.engine.speculation.tokens",
    "--threads": "spec.engine.threads",
    "--port": "spec.engine.port",
    "--poll-seconds": "spec.agent.pollSeconds",
}
"""Flags of the programs and the fields of the manifest that set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Commands of the two programs, without arguments."""

    engine: tuple[str, ...]
    agent: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders of a run."""

    scratch: Path
    """Private and short-lived: sockets, certificate, token."""
    logs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningReplica:
    """An engine and its agent that both serve."""

    name: str
    url: str
    """The engine's public interface."""
    metrics_url: str
    """The agent's Prometheus metrics."""
    target: AgentTarget


Progress = Callable[[str], None]


def installed_programs() -> Programs:
    """The programs installed beside this one, else those on the PATH."""

    def find(name: str) -> str:
        beside = Path(sys.executable).parent / name
        return str(beside) if beside.exists() else shutil.which(name) or name

    return Programs(engine=(find("ullage-engine"),), agent=(find("ullage-agent"),))


def make_credentials(service: InferenceService) -> Credentials:
    """Certificate and token of this run's agents."""
    return certificates.issue(_server_name(service), now=time.time())


class Launcher:
    """Starts replicas under one supervisor and says what is being waited for."""

    def __init__(
        self,
        service: InferenceService,
        supervisor: Supervisor,
        places: Places,
        programs: Programs,
        credentials: Credentials,
        progress: Progress,
    ) -> None:
        self._service = service
        self._supervisor = supervisor
        self._places = places
        self._programs = programs
        self._progress = progress
        self._files = _write_credentials(places.scratch, credentials)

    async def launch(self) -> list[RunningReplica]:
        """Start all replicas; returns when all serve. A single engine has the service's port itself.

        The first engine starts alone, so that a model is converted once and not by each of them.

        Raises:
            InputError: a program refused its settings.
            BrokenLoop: a program died or did not get ready.
        """
        count = self._service.spec.replicas.effective
        first = await self._replica(0, self._service.spec.engine.port if count == 1 else 0)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._replica(index, 0)) for index in range(1, count)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
        return [first, *(task.result() for task in tasks)]

    async def _replica(self, index: int, port: int) -> RunningReplica:
        name = f"{self._service.metadata.name}-{index}"
        admin = f"unix:{self._places.scratch / f'{index}.sock'}"
        engine = self._start(f"engine-{index}", self._programs.engine, self._engine_arguments(port, admin))
        agent = self._start(f"agent-{index}", self._programs.agent, self._agent_arguments(admin))
        agent_facts = await self._ready(agent, AGENT_START_S)
        engine_facts = await self._ready(engine, ENGINE_START_S)
        target = AgentTarget(
            pod=name,
            uid=uuid.uuid4().hex,
            url=_fact(agent, agent_facts, "actions"),
            server_name=_server_name(self._service),
        )
        return RunningReplica(
            name=name,
            url=_fact(engine, engine_facts, "public"),
            metrics_url=_fact(agent, agent_facts, "metrics") + "/metrics",
            target=target,
        )

    def _start(self, name: str, program: Sequence[str], arguments: Sequence[str]) -> Child:
        log = self._places.logs / f"{name}.log"
        return self._supervisor.start(ChildSpec(name=name, argv=(*program, *arguments), log=log))

    async def _ready(self, child: Child, timeout_s: float) -> dict[str, Any]:
        waiting = asyncio.create_task(child.ready(timeout_s), name=f"{child.name} ready")
        try:
            while not waiting.done():
                self._progress(f"{child.name} is starting{': ' if child.last_line else ''}{child.last_line}")
                await asyncio.wait((waiting,), timeout=_PROGRESS_S)
            return waiting.result()
        except TimeoutError as error:
            raise BrokenLoop(str(error)) from error
        except InputError as error:
            name = f"InferenceService/{self._service.metadata.name}"
            raise InputError(f"{name}: {in_manifest_words(str(error))}") from error
        finally:
            waiting.cancel()

    def _engine_arguments(self, port: int, admin: str) -> list[str]:
        # no cache folder: the engine's own, so that a model is converted once for it, however it is started
        return engine_arguments(self._service, host=HOST, port=port, admin=admin)

    def _agent_arguments(self, admin: str) -> list[str]:
        return agent_arguments(
            self._service, engine_url=admin, host=HOST, metrics_port=0, action_port=0, files=self._files
        )


def in_manifest_words(message: str) -> str:
    """A program's complaint with the manifest's fields in place of the flags that they became."""
    for flag, place in _FIELDS.items():
        message = re.sub(rf"{flag}(?![a-z-])", place, message)
    return message


def _server_name(service: InferenceService) -> str:
    return certificates.server_name(service.metadata.name, service.metadata.namespace)


def _write_credentials(folder: Path, credentials: Credentials) -> AgentFiles:
    def write(name: str, text: str) -> str:
        path = folder / name
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        return str(path)

    return AgentFiles(
        certificate=write("agent.crt", credentials.certificate),
        key=write("agent.key", credentials.key),
        token=write("agent.token", credentials.token),
    )


def _fact(child: Child, facts: dict[str, Any], name: str) -> str:
    value = facts.get(name)
    if not isinstance(value, str):
        raise BrokenLoop(f"{child.name}: its ready line has no {name!r}: {facts} (log: {child.log})")
    return value
