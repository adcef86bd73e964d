"""Sockets, and the two applications behind them in one event loop.

Purpose: take the addresses before anything expensive happens, serve until told to stop, then stop well: admit
nothing more, let what is in flight finish within a bound, close. Non-goals: arguments and signals (`main`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from ullage_engine.api.admin import create_admin_app
from ullage_engine.api.core import LoadedEngine
from ullage_engine.api.drain import Door
from ullage_engine.api.public import create_public_app
from ullage_engine.config import ServerConfig, TcpAddress, UnixAddress
from ullage_engine.errors import ConfigError, LoopUnavailable

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5
"""After the drain, how long answers that are complete may take to reach slow clients."""
KEEP_ALIVE_SECONDS = 75
"""Above the idle time of common load balancers, so that they close first and never meet a closed connection."""
MAX_UNIX_PATH = 107
"""Bytes that `sockaddr_un` holds on Linux."""


@dataclass(slots=True)
class Sockets:
    """Bound sockets that do not listen yet: a client is refused until the model is loaded."""

    public: socket.socket
    admin: socket.socket | None
    admin_path: Path | None

    def describe(self) -> dict[str, Any]:
        """Addresses as clients write them."""
        host, port = self.public.getsockname()[:2]
        admin = None
        if self.admin_path is not None:
            admin = f"unix:{self.admin_path}"
        elif self.admin is not None:
            admin = f"http://{TcpAddress(*self.admin.getsockname()[:2])}"
        return {"public": f"http://{TcpAddress(host, port)}", "port": port, "admin": admin}

    def close(self) -> None:
        """Give the addresses back. Idempotent."""
        self.public.close()
        if self.admin is not None:
            self.admin.close()
        if self.admin_path is not None:
            self.admin_path.unlink(missing_ok=True)


def bind(config: ServerConfig) -> Sockets:
    """Take all addresses, or none.

    Raises:
        ConfigError: an address is in use or cannot be had; names the flag, the address and the remedy.
    """
    public = _bind_tcp(config.public, flags=("--host", "--port"))
    try:
        if isinstance(config.admin, UnixAddress):
            return Sockets(public, _bind_unix(config.admin.path), config.admin.path)
        if config.admin is not None:
            require_loopback(config.admin)
            return Sockets(public, _bind_tcp(config.admin, flags=("--admin", "--admin")), None)
    except BaseException:
        public.close()
        raise
    return Sockets(public, None, None)


def require_loopback(address: TcpAddress) -> None:
    """Raises ConfigError for an admin address that others than this pod could reach."""
    try:
        loopback = address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"--admin: {str(address)!r} could be reached from outside; give unix:PATH or a loopback address "
            "such as 127.0.0.1:8001"
        )


def _bind_tcp(address: TcpAddress, *, flags: tuple[str, str]) -> socket.socket:
    host_flag, port_flag = flags
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host_flag}: {address.host!r} is no address of this machine: {error}") from error
    family, kind, protocol, _, target = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(target)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{port_flag}: {address} cannot be had ({error.strerror}); stop what uses it, or give another port, "
            "or 0 for any free one"
        ) from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    if len(str(path).encode()) > MAX_UNIX_PATH:
        raise ConfigError(f"--admin: unix:{path} is longer than {MAX_UNIX_PATH} bytes; give a shorter path")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        bound.bind(str(path))
        path.chmod(0o600)  # nobody can have connected before: it does not listen yet
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--admin: unix:{path} cannot be had ({error.strerror}); give a path in a folder that can be written"
        ) from error
    except ConfigError:
        bound.close()
        raise
    return bound


def _remove_stale(path: Path) -> None:
    """Remove a socket that a process which is gone left behind; refuse anything else that is in the way."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--admin: unix:{path} exists and is no socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"--admin: unix:{path} is in use by another process; stop it or give another path")


class Stop:
    """Asks a server to stop: once to drain first, twice to do so at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        """Ask once more."""
        (self.hurry if self.asked.is_set() else self.asked).set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, telling when it serves."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self.serving = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `main`'s."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.serving.set()


async def serve(
    engine: LoadedEngine,
    sockets: Sockets,
    config: ServerConfig,
    *,
    stop: Stop,
    announce: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until `stop` is asked; `announce` is called with the addresses once both sides answer.

    Raises:
        ConfigError: another process began to listen on an address while the model was loading.
    """
    public = create_public_app(engine.core, engine.tokenizer, config)

    def in_flight() -> int:
        return public.generations.in_flight

    door = Door(engine.core, in_flight)
    servers = [(_Server(public.app), sockets.public)]
    if sockets.admin is not None:
        admin = create_admin_app(engine.core, door, latency=public.metrics.latency)
        servers.append((_Server(admin), sockets.admin))
    tasks = [asyncio.ensure_future(server.serve([bound])) for server, bound in servers]
    try:
        await _until(tasks, *(server.serving for server, _ in servers))
        announce(sockets.describe() | {"model": engine.core.model_name})
        await _until(tasks, stop.asked)
        await _drain(door, in_flight, config.drain_seconds, stop)
        public.generations.give_up("the server is stopping, and this request took too long to finish")
        for server, _ in servers:
            server.should_exit = True
            server.force_exit = stop.hurry.is_set()
        await asyncio.gather(*tasks)
    except OSError as error:
        raise ConfigError(f"--port: an address was taken while the model was loading: {error}") from error
    finally:
        await _cancel([*tasks, *(task for server, _ in servers for task in server.server_state.tasks)])
        public.preparer.close()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End servers and requests that are left; a cancelled request aborts its sequences."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until(tasks: Sequence[asyncio.Task[None]], *events: asyncio.Event) -> None:
    """Wait for all events; a server that ends before is an error."""
    waiting = asyncio.gather(*(event.wait() for event in events))
    try:
        either: list[asyncio.Future[Any]] = [waiting, *tasks]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            for task in tasks:
                if task.done():
                    task.result()
            raise RuntimeError("a server ended without being asked")
    finally:
        waiting.cancel()


async def _drain(door: Door, in_flight: Callable[[], int], seconds: float, stop: Stop) -> None:
    draining = asyncio.ensure_future(door.stop(seconds))
    hurry = asyncio.ensure_future(stop.hurry.wait())
    either: tuple[asyncio.Future[Any], ...] = (draining, hurry)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    for task in either:
        task.cancel()
    for failure in await asyncio.gather(draining, hurry, return_exceptions=True):
        if isinstance(failure, LoopUnavailable):
            log.error("stopping without a drain: %s", failure)
    left = in_flight()
    if left:
        log.warning("stopping with %d sequences in flight", left)
