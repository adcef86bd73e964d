"""Memory and faults of the accelerators, through NVML. A machine without a driver has none, which is normal.

The library is injected (`pynvml` from nvidia-ml-py, or anything with its functions). Its calls can hang with a sick
driver, so the poller makes them in a thread of their own. What one device cannot say stays None.

Attribution: NVML names the processes that use a device; those that exist in the agent's own process namespace are
the engine's (a pod with a shared one), the others are neighbours on a shared device. Where none can be seen, nothing
is attributed, and the total still counts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ullage_agent.wire import Device

log = logging.getLogger(__name__)

RETRY_READINGS = 60
"""A driver that failed is tried again at every sixtieth reading: looking for its library costs more than a poll."""
XID_EVENT = 0x8
"""nvmlEventTypeXidCriticalError."""


class NvmlDevices:
    """Reads every device. Used from one thread at a time; never raises."""

    def __init__(self, nvml: Any, is_ours: Callable[[int], bool]) -> None:
        self._nvml = nvml
        self._is_ours = is_ours
        self._handles: list[Any] | None = None
        self._events: Any = None
        self._xids: dict[int, int] = {}
        self._said: str | None = None
        self._skip = 0
        self.error: str | None = None
        """Why the last reading found nothing; None when it found devices."""

    def read(self) -> tuple[Device, ...]:
        """All devices; none without a driver, and after a failure of it."""
        if self._skip:
            self._skip -= 1
            return ()
        try:
            handles = self._open()
            self._collect_xids()
            devices = tuple(self._device(index, handle) for index, handle in enumerate(handles))
        except self._nvml.NVMLError as error:
            self._forget(str(error))
            return ()
        self.error = None
        return devices

    def close(self) -> None:
        """Release the driver; safe to call twice."""
        if self._handles is not None:
            self._handles = None
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _open(self) -> list[Any]:
        if self._handles is None:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._watch_xids(self._handles)
        return self._handles

    def _forget(self, why: str) -> None:
        """Try again later: a driver may be loaded, or come back after a reset."""
        self._skip = RETRY_READINGS - 1
        if self._said != why:
            log.info("no device memory to watch: %s", why)
        self._said = self.error = why
        self.close()

    def _device(self, index: int, handle: Any) -> Device:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        ours, others = self._per_process(handle)
        return Device(
            index=index,
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)),
            total_bytes=_count(getattr(memory, "total", None)),
            used_bytes=_count(getattr(memory, "used", None)),
            engine_bytes=ours,
            other_bytes=others,
            uncorrected_ecc_errors=_count(self._ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)),
            last_xid=self._xids.get(index),
        )

    def _per_process(self, handle: Any) -> tuple[int | None, int | None]:
        """Bytes of the engine's processes and of others; None where a part cannot be told."""
        found = [
            *(self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()),
            *(self._ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or ()),
        ]
        sizes = {process.pid: _count(process.usedGpuMemory) for process in found}
        ours = [size for pid, size in sizes.items() if self._is_ours(pid)]
        if not ours or None in sizes.values():
            return None, None
        known = [size for size in sizes.values() if size is not None]
        mine = sum(size for size in ours if size is not None)
        return mine, sum(known) - mine

    def _ask(self, function: str, *arguments: Any) -> Any:
        """An answer, or None where this device or driver offers none. A lost device raises."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            if isinstance(error, self._lost_errors()):
                raise
            return None

    def _lost_errors(self) -> tuple[type[BaseException], ...]:
        names = ("NVMLError_GpuIsLost", "NVMLError_Uninitialized", "NVMLError_DriverNotLoaded")
        return tuple(getattr(self._nvml, name) for name in names if hasattr(self._nvml, name))

    def _watch_xids(self, handles: Iterable[Any]) -> None:
        self._events = None
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            for handle in handles:
                self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except self._nvml.NVMLError as error:
            log.info("device faults (XID) are not offered here: %s", error)

    def _collect_xids(self) -> None:
        while self._events is not None and self._handles:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                return  # a timeout: nothing happened
            index = next((at for at, handle in enumerate(self._handles) if handle == event.device), None)
            if index is None:
                return
            self._xids[index] = int(event.eventData)
            log.error("device %d reports XID %d", index, event.eventData)


def system_devices(proc: Path = Path("/proc")) -> NvmlDevices | None:
    """NVML of this machine; None where nvidia-ml-py is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    return NvmlDevices(nvml, lambda pid: (proc / str(pid)).exists())


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53 else None


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value[:256] if isinstance(value, str) else None
