"""One agent, put together: adapter, poller, board, metrics, actions and the two ports.

    async with Agent(AgentConfig(engine="fake", engine_url="scenario.json", metrics_port=0)) as agent:
        agent.metrics_address   # ("0.0.0.0", 41234)

Several agents can live in one process. Adapters and clock are injected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from ullage_agent.actions import ActionLimits, ActionRunner
from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig, AdapterFactory
from ullage_agent.adapters.base import EngineAdapter, HasCanary
from ullage_agent.analysis import Surroundings
from ullage_agent.around import AroundReader, DeviceReader
from ullage_agent.board import Assessment, Board
from ullage_agent.canary import CanaryKeeper
from ullage_agent.clock import Clock, SystemClock
from ullage_agent.collector import make_registry
from ullage_agent.config import AgentConfig
from ullage_agent.credentials import Credentials
from ullage_agent.device import system_devices
from ullage_agent.errors import ConfigError
from ullage_agent.forecast import ForecastConfig
from ullage_agent.history import History
from ullage_agent.page import Page
from ullage_agent.poller import PollConfig, Poller
from ullage_agent.record import Recorder
from ullage_agent.reflex import Reflex
from ullage_agent.server import Listener, action_app, metrics_app
from ullage_agent.wire import Action, ActionRequest, ActionResult

CREDENTIALS_PERIOD_S = 5.0
CHECK_EVERY = 12
"""Looks at the files between two looks at the clock: a certificate expires by the minute, not by the second."""
ACTION_GRACE_S = 5.0


class Agent:
    """Made, started, stopped once. Making it checks settings and reads certificate and token, but opens nothing.

    Raises:
        ConfigError: from the constructor or `start`; then nothing is left open.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        adapters: Mapping[str, AdapterFactory] = BUILTIN_ADAPTERS,
        clock: Clock | None = None,
        limits: ActionLimits | None = None,
        devices: DeviceReader | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.config = config
        self.credentials = _credentials(config)
        self.adapter = _factory(config.engine, adapters)(
            AdapterConfig(
                url=config.engine_url,
                clock=clock,
                read_timeout_s=config.read_timeout_s,
                gate_file=config.gate_file,
            )
        )
        self.board = Board(clock)
        self.actions = ActionRunner(self.adapter, clock, limits)
        self.history = History(clock)
        self.recorder = None if config.record is None else Recorder(config.record)
        self.around = AroundReader(clock, devices=devices or _devices(config), cgroup=config.cgroup)
        self.canary = _canary(self.adapter, config)
        self.poller = Poller(
            self.adapter, self.board, clock, _poll_config(config), around=self.around, canary=self.canary
        )
        self._clock = clock
        self._reflex = _reflex(self.actions, clock, config)
        self._reflexes: set[asyncio.Task[None]] = set()
        self._listen()
        self.registry = make_registry(
            self.board,
            self.actions.outcomes,
            stale_after_s=config.stale_after_s,
            sources=self.around.sources,
            credentials=self.credentials,
        )
        self.metrics_address: tuple[str, int] | None = None
        """Host and port once started."""
        self.action_address: tuple[str, int] | None = None
        """Host and port once started; None without certificate and token."""
        self._listeners: list[Listener] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bind both ports, then begin to poll. All or nothing."""
        try:
            await self._open_ports()
        except ConfigError:
            await self.stop()
            raise
        self._tasks.append(asyncio.create_task(self.poller.run(self._stop), name="poller"))
        if self.credentials is not None:
            watch = _watch(self.credentials, self._stop)
            self._tasks.append(asyncio.create_task(watch, name="credentials"))

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. A background task that ends before is a bug, and its exception is raised."""
        waiting = asyncio.create_task(stop.wait(), name="stop")
        done, _ = await asyncio.wait({waiting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done - {waiting}:
            task.result()

    async def stop(self) -> None:
        """End polling, let a running action end within a bound, close everything. Safe to call twice."""
        self._stop.set()
        for listener in self._listeners:
            await listener.close()
        await self.actions.close(ACTION_GRACE_S)
        for task in self._tasks:
            task.cancel()
        for task in self._reflexes:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._reflexes, return_exceptions=True)
        if self.canary is not None:
            await self.canary.close()
        if self.recorder is not None:
            self.recorder.close()
        self.around.close()
        await self.adapter.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _listen(self) -> None:
        """Everyone who wants to know of polls and actions."""
        self.poller.listeners.append(self._on_poll)
        self.actions.listeners.append(self._on_action)
        if self.recorder is not None:
            self.poller.on_failure.append(self.recorder.failure)

    def _on_poll(self, found: Assessment, around: Surroundings) -> None:
        self.history.note_score(found.risk.score, dict(found.risk.terms), found.began_at)
        if self.recorder is not None:
            self.recorder.sample(found.began_at, found.reading, around, found.risk.score, found.risk.terms)
        report = self.board.report()
        if self._reflex is not None and report is not None and not self._reflexes:
            task = asyncio.create_task(self._reflex.look(report), name="reflex")
            self._reflexes.add(task)
            task.add_done_callback(self._reflexes.discard)

    def _on_action(self, action: Action, request: ActionRequest, origin: str, ended: ActionResult | str) -> None:
        self.history.note_action(action, ended, request.reason, origin)
        if self.recorder is not None and not isinstance(ended, str):
            self.recorder.action(self._clock.monotonic(), origin, request.reason, ended)

    async def _open_ports(self) -> None:
        config = self.config
        page = Page(self.board, self.history, self.adapter, self._clock)
        plain = Listener(metrics_app(self.board, self.registry, fresh_s=config.fresh_s, page=page), "--metrics-port")
        self._listeners.append(plain)
        self.metrics_address = await plain.open(config.metrics_host, config.metrics_port)
        if self.credentials is None:
            return
        secure = Listener(action_app(self.board, self.actions, self.credentials), "--action-port")
        self._listeners.append(secure)
        self.action_address = await secure.open(config.action_host, config.action_port, self.credentials.context)


def _devices(config: AgentConfig) -> DeviceReader | None:
    return system_devices() if config.watch_devices else None


def _canary(adapter: EngineAdapter, config: AgentConfig) -> CanaryKeeper | None:
    if not config.canary_seconds:
        return None
    if not isinstance(adapter, HasCanary):
        raise ConfigError(
            f"--canary-seconds {config.canary_seconds:g}: --engine {config.engine} takes no canary, its step clock "
            "tells whether it lives; leave it out"
        )
    return CanaryKeeper(adapter, config.canary_seconds)


def _reflex(actions: ActionRunner, clock: Clock, config: AgentConfig) -> Reflex | None:
    if not config.reflex_seconds:
        return None
    return Reflex(actions, clock, deadline_s=config.reflex_seconds, fresh_s=config.fresh_s)


def _factory(name: str, adapters: Mapping[str, AdapterFactory]) -> AdapterFactory:
    try:
        return adapters[name]
    except KeyError:
        raise ConfigError(f"--engine {name!r} is unknown; there are {', '.join(sorted(adapters))}") from None


def _credentials(config: AgentConfig) -> Credentials | None:
    if config.tls_cert is None or config.tls_key is None or config.token_file is None:
        return None
    return Credentials(config.tls_cert, config.tls_key, config.token_file)


def _poll_config(config: AgentConfig) -> PollConfig:
    return PollConfig(
        period_s=config.poll_seconds,
        read_timeout_s=1.5 * config.read_timeout_s,  # the adapter's own bound knows more to say
        forecast=ForecastConfig(horizon_s=config.forecast_horizon_s),
    )


async def _watch(credentials: Credentials, stop: asyncio.Event) -> None:
    looks = 0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CREDENTIALS_PERIOD_S):
                await stop.wait()
        looks += 1
        if not credentials.refresh() and looks % CHECK_EVERY == 0:
            credentials.check()
