"""Where `top` reads from. Each gives a whole fleet at a time, or raises CliError."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from ..agents import fetch_agents
from ..api import Api, ApiFailed, Object, Where, path_of
from ..doctor.facts import METRICS_PORT, SERVICE_LABEL, agent_text
from ..errors import InputError
from ..running import read_running
from .fleet import ActionRow, EngineRow, Fleet, ServiceRow, action_row, engine_row, service_row

ACTIONS = 20
PROXIED_AT_ONCE = 32
FORBIDDEN = "HTTP 403"
STATUS_ONLY = "agents' metrics may not be read (pods/proxy); risks are those of the statuses"


class Source(Protocol):
    """Reads a fleet."""

    async def read(self) -> Fleet:
        """Everything now.

        Raises:
            CliError: it cannot be had.
        """
        ...


class ClusterSource:
    """Objects of the API server, and each agent's metrics through the server's proxy where that is allowed."""

    def __init__(self, api: Api, where: Where, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._where = where
        self._clock = clock
        self._gate = asyncio.Semaphore(PROXIED_AT_ONCE)

    async def read(self) -> Fleet:
        """One list of each kind, and one call for each pod."""
        api, where = self._api, self._where
        services, pods, records = await asyncio.gather(
            self._services(),
            api.list(path_of(where, api, "pods", "/api/v1"), SERVICE_LABEL),
            api.list(path_of(where, api, "remediations")),
        )
        ports = {_key(obj): ((obj.get("spec") or {}).get("agent") or {}).get("metricsPort") for obj in services}
        asked = (self._engine(pod, ports.get(_owner(pod)) or METRICS_PORT) for pod in pods)
        rows = list(await asyncio.gather(*asked))
        barred = any(FORBIDDEN in row.problem for row in rows)
        rows = [replace(row, problem="") if FORBIDDEN in row.problem else row for row in rows]
        by_service: dict[tuple[str, str], list[EngineRow]] = {}
        for pod, row in zip(pods, rows, strict=True):
            by_service.setdefault(_owner(pod), []).append(row)
        return Fleet(
            at=self._clock(),
            problem=STATUS_ONLY if barred else "",
            source=api.server if where.all_namespaces else f"{api.server}, namespace {api.namespace}",
            services=tuple(service_row(obj, by_service.get(_key(obj), [])) for obj in services),
            actions=recent([action_row(record, last_change(record)) for record in records]),
        )

    async def _services(self) -> list[Object]:
        found = await self._api.get(path_of(self._where, self._api, "inferenceservices"))
        if found is None:
            raise InputError("the cluster does not know InferenceServices; apply manifests/crd, then ullage doctor")
        return await self._api.list(path_of(self._where, self._api, "inferenceservices"))

    async def _engine(self, pod: Object, port: int) -> EngineRow:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        status = pod.get("status") or {}
        if not status.get("podIP"):
            return EngineRow(name=name, problem=str(status.get("phase") or "Pending"))
        async with self._gate:
            return engine_row(name, await agent_text(self._api, namespace, name, port))


class LocalSource:
    """Services that `ullage up` runs on this machine, found by their state folders."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    async def read(self) -> Fleet:
        """Every service that runs, with its records."""
        rows, actions = [], []
        for state, running in read_running(self._folder):
            replicas: Sequence[dict[str, str]] = running["replicas"]
            found = await fetch_agents([replica["metrics"] for replica in replicas])
            engines = [engine_row(replica["name"], one) for replica, one in zip(replicas, found, strict=True)]
            row = service_row(running["service"], engines)
            rows.append(local_row(row))
            actions += _records(state / "remediations")
        return Fleet(
            at=self._clock(), source=f"this machine, {self._folder}", services=tuple(rows), actions=recent(actions)
        )


class AgentSource:
    """Bare agents by URL, as beside a server that no operator looks after."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._urls = list(urls)
        self._clock = clock

    async def read(self) -> Fleet:
        """Each agent as a service of its own."""
        found = await fetch_agents(self._urls)
        rows = []
        for url, one in zip(self._urls, found, strict=True):
            engine = engine_row(url.removeprefix("http://").removesuffix("/metrics"), one)
            name = engine.name if isinstance(one, str) else one.model or engine.name
            obj: dict[str, Any] = {"metadata": {"namespace": "-", "name": name}, "spec": {"remediation": {"mode": "–"}}}
            rows.append(local_row(service_row(obj, [engine])))
        return Fleet(at=self._clock(), source="agents by URL", services=tuple(rows))


def local_row(row: ServiceRow) -> ServiceRow:
    """A service without an operator's status: an engine that is read counts as ready."""
    ready = sum(engine.metrics is not None for engine in row.engines)
    phase = "Running" if ready == len(row.engines) else "Unreachable" if ready == 0 else "Degraded"
    return replace(row, phase=phase, ready=ready, wanted=len(row.engines))


def recent(rows: Sequence[ActionRow]) -> tuple[ActionRow, ...]:
    """The newest, newest first."""
    return tuple(sorted(rows, key=lambda row: (-row.at, row.name))[:ACTIONS])


def last_change(record: Object) -> float:
    """Unix seconds of the last thing that happened to a record; 0 where nothing is told."""
    status = record.get("status") or {}
    for name in ("finishedAt", "answeredAt", "startedAt", "proposedAt"):
        if status.get(name):
            return datetime.fromisoformat(str(status[name])).timestamp()
    created = record["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(str(created)).timestamp() if created else 0.0


def _records(folder: Path) -> list[ActionRow]:
    rows = []
    for file in folder.glob("[!.]*.yaml"):
        try:
            # JSON's view of YAML: times stay texts
            record = json.loads(json.dumps(yaml.safe_load(file.read_text(encoding="utf-8")), default=_iso))
            rows.append(action_row(record, last_change(record)))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            continue  # being written, or not a record; `ullage up` itself complains about those
    return rows


def _iso(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _owner(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["labels"][SERVICE_LABEL]


__all__ = ["AgentSource", "ApiFailed", "ClusterSource", "LocalSource", "Source"]
