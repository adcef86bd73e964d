"""Reads what surrounds the engine: accelerators through their driver, the control group through its files.

A driver's call can hang for ever, so it runs in a daemon thread of its own; while one hangs, its devices are unknown
and nothing else waits. Each source keeps how its last reading went, for the metrics.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ullage_agent.clock import Clock
from ullage_agent.hostmem import read_host
from ullage_agent.wire import Device, Host


class DeviceReader(Protocol):
    """`NvmlDevices`, or what stands in for it. Called from one thread at a time."""

    error: str | None

    def read(self) -> tuple[Device, ...]:
        """All devices; none where there are none. Raises nothing."""
        ...

    def close(self) -> None:
        """Release the driver."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """How the last reading of a source went."""

    ok: bool
    duration_s: float


class AroundReader:
    """Reads both sources when asked. Either may be absent."""

    def __init__(
        self, clock: Clock, *, devices: DeviceReader | None = None, cgroup: Path | None = None, timeout_s: float = 0.5
    ) -> None:
        self._clock = clock
        self._devices = devices
        self._cgroup = cgroup
        self._timeout_s = timeout_s
        self._pending: asyncio.Future[tuple[Device, ...]] | None = None
        self.sources: dict[str, SourceState] = {}
        """By name, `device` and `host`; those that are configured and were read."""

    async def read(self) -> tuple[tuple[Device, ...], Host | None]:
        """Devices and control group as they are now; empty and None where they cannot be read. Bounded in time."""
        return await self._read_devices(), self._read_host()

    def close(self) -> None:
        """Release the driver, unless a call of it hangs."""
        if self._devices is not None and (self._pending is None or self._pending.done()):
            self._devices.close()

    async def _read_devices(self) -> tuple[Device, ...]:
        if self._devices is None:
            return ()
        began = self._clock.monotonic()
        patience = 0.0  # a call that hung before has had its time
        if self._pending is None or self._pending.done():
            self._pending, patience = in_daemon_thread(self._devices.read), self._timeout_s
        done, _ = await asyncio.wait({self._pending}, timeout=patience)
        found = self._pending.result() if done else ()
        ok = bool(done) and self._devices.error is None
        self.sources["device"] = SourceState(ok=ok, duration_s=self._clock.monotonic() - began)
        return found

    def _read_host(self) -> Host | None:
        if self._cgroup is None:
            return None
        began = self._clock.monotonic()
        found = read_host(self._cgroup)
        ok = found is not None and found.used_bytes is not None
        self.sources["host"] = SourceState(ok=ok, duration_s=self._clock.monotonic() - began)
        return found


def in_daemon_thread(work: Callable[[], tuple[Device, ...]]) -> asyncio.Future[tuple[Device, ...]]:
    """Run `work` in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Device, ...]] = loop.create_future()

    def settle(result: tuple[Device, ...]) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        result = work()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="device reader", daemon=True).start()
    return future
