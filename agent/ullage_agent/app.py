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
from ullage_agent.board import Board
from ullage_agent.clock import Clock, SystemClock
from ullage_agent.collector import make_registry
from ullage_agent.config import AgentConfig
from ullage_agent.credentials import Credentials
from ullage_agent.errors import ConfigError
from ullage_agent.forecast import ForecastConfig
from ullage_agent.poller import PollConfig, Poller
from ullage_agent.server import Listener, action_app, metrics_app

CREDENTIALS_PERIOD_S = 5.0
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
    ) -> None:
        clock = clock or SystemClock()
        self.config = config
        self.credentials = _credentials(config)
        self.adapter = _factory(config.engine, adapters)(
            AdapterConfig(url=config.engine_url, clock=clock, read_timeout_s=config.read_timeout_s)
        )
        self.board = Board(clock)
        self.actions = ActionRunner(self.adapter, clock, limits)
        self.poller = Poller(self.adapter, self.board, clock, _poll_config(config))
        self.registry = make_registry(self.board, self.actions.outcomes, stale_after_s=config.stale_after_s)
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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.adapter.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _open_ports(self) -> None:
        config = self.config
        plain = Listener(metrics_app(self.board, self.registry, fresh_s=config.fresh_s), "--metrics-port")
        self._listeners.append(plain)
        self.metrics_address = await plain.open(config.metrics_host, config.metrics_port)
        if self.credentials is None:
            return
        secure = Listener(action_app(self.board, self.actions, self.credentials), "--action-port")
        self._listeners.append(secure)
        self.action_address = await secure.open(config.action_host, config.action_port, self.credentials.context)


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
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CREDENTIALS_PERIOD_S)
        credentials.refresh()
