"""Device and host memory, from a driver that is not there and a file system that is a folder."""

# ruff: noqa: N802 - the names are those of the library that is stood in for

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.around import AroundReader
from ullage_agent.clock import ManualClock, SystemClock
from ullage_agent.device import RETRY_READINGS, NvmlDevices, system_devices
from ullage_agent.hostmem import read_host
from ullage_agent.wire import Device, Host

GIB = 1 << 30


class NVMLError(Exception):
    pass


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801 - the library's name
    pass


class Nvml:
    """Stands in for `pynvml`, with its function names."""

    NVMLError = NVMLError
    NVMLError_GpuIsLost = NVMLError_GpuIsLost

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver
        self.lost = False
        self.processes: list[tuple[int, int | None]] = [(10, 60 * GIB), (77, 5 * GIB)]
        self.events: list[tuple[str, int]] = []
        self.inits = 0

    def nvmlInit(self) -> None:
        self.inits += 1
        if not self.driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu{index}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return SimpleNamespace(total=80 * GIB, used=66 * GIB, free=14 * GIB)

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"Accelerator"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return "GPU-1"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        raise NVMLError("Not Supported")

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        pass

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        if not self.events:
            raise NVMLError("Timeout")
        handle, xid = self.events.pop(0)
        return SimpleNamespace(device=handle, eventData=xid)


def ours(*pids: int) -> Callable[[int], bool]:
    return lambda pid: pid in pids


def test_memory_is_attributed_by_process() -> None:
    """Case: time-sliced devices, whose neighbours nobody counted."""
    (device,) = NvmlDevices(Nvml(), ours(10)).read()
    assert (device.total_bytes, device.used_bytes) == (80 * GIB, 66 * GIB)
    assert (device.engine_bytes, device.other_bytes) == (60 * GIB, 5 * GIB)
    assert (device.name, device.uuid, device.uncorrected_ecc_errors) == ("Accelerator", "GPU-1", None)


def test_where_no_process_can_be_told_nothing_is_attributed() -> None:
    (device,) = NvmlDevices(Nvml(), ours()).read()
    assert (device.engine_bytes, device.other_bytes) == (None, None)
    hidden = Nvml()
    hidden.processes = [(10, None), (77, 5 * GIB)]
    (device,) = NvmlDevices(hidden, ours(10)).read()
    assert (device.engine_bytes, device.other_bytes) == (None, None)


def test_no_driver_is_normal_and_one_may_come() -> None:
    nvml = Nvml(driver=False)
    devices = NvmlDevices(nvml, ours())
    assert devices.read() == ()
    assert devices.error == "Driver Not Loaded"
    nvml.driver = True
    assert [len(devices.read()) for _ in range(RETRY_READINGS)] == [0] * (RETRY_READINGS - 1) + [1]
    assert nvml.inits == 2
    assert devices.error is None


def test_a_lost_device_is_opened_anew() -> None:
    nvml = Nvml()
    devices = NvmlDevices(nvml, ours())
    devices.read()
    nvml.lost = True
    assert devices.read() == ()
    nvml.lost = False
    assert [len(devices.read()) for _ in range(RETRY_READINGS)][-1] == 1
    assert nvml.inits == 2


def test_faults_are_kept() -> None:
    nvml = Nvml()
    devices = NvmlDevices(nvml, ours())
    devices.read()
    nvml.events = [("gpu0", 13), ("gpu0", 79)]
    (device,) = devices.read()
    assert device.last_xid == 79


def test_this_machine_can_be_asked() -> None:
    devices = system_devices()
    assert devices is not None
    assert isinstance(devices.read(), tuple)
    devices.close()


class Hanging:
    """A driver that does not come back until told to."""

    error = None

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def read(self) -> tuple[Device, ...]:
        self.calls += 1
        self.release.wait(30.0)
        return (Device(index=0),)

    def close(self) -> None:
        raise AssertionError("a driver that hangs must not be closed")


async def test_a_hanging_driver_delays_nothing() -> None:
    driver = Hanging()
    reader = AroundReader(SystemClock(), devices=driver, timeout_s=0.02)
    for _ in range(3):
        assert await reader.read() == ((), None)
    assert driver.calls == 1
    assert reader.sources["device"].ok is False
    reader.close()
    driver.release.set()


async def test_both_sources_are_read(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "memory.current").write_text("500\n")
    reader = AroundReader(clock, devices=NvmlDevices(Nvml(), ours()), cgroup=tmp_path)
    devices, host = await reader.read()
    assert len(devices) == 1
    assert host == Host(used_bytes=500)
    assert {name: state.ok for name, state in reader.sources.items()} == {"device": True, "host": True}
    reader.close()


V2 = {
    "memory.current": "3000\n",
    "memory.max": "4000\n",
    "memory.stat": "anon 1\ninactive_file 500\n",
    "memory.pressure": "some avg10=12.50 avg60=1.0 avg300=0 total=1\nfull avg10=4.00 avg60=0 avg300=0 total=1\n",
}
V1 = {
    "memory.usage_in_bytes": "3000\n",
    "memory.limit_in_bytes": "9223372036854771712\n",
    "memory.stat": "total_inactive_file 100\nhierarchical_memory_limit 5000\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_version_2(tmp_path: Path) -> None:
    assert read_host(write(tmp_path, V2)) == Host(
        limit_bytes=4000, used_bytes=2500, psi_some_avg10=0.125, psi_full_avg10=0.04
    )


@pytest.mark.parametrize("inside", ["", "memory"])
def test_version_1_takes_the_tighter_limit(tmp_path: Path, inside: str) -> None:
    write(tmp_path / inside, V1)
    assert read_host(tmp_path) == Host(limit_bytes=5000, used_bytes=2900)


def test_no_limit_is_none(tmp_path: Path) -> None:
    found = read_host(write(tmp_path, {**V2, "memory.max": "max\n"}))
    assert found is not None and found.limit_bytes is None


def test_no_group_is_none(tmp_path: Path) -> None:
    assert read_host(tmp_path) is None


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), name=st.sampled_from(sorted(V2)))
def test_odd_files_leave_values_unknown(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    folder = write(tmp_path_factory.mktemp("group"), {**V2, name: text})
    found = read_host(folder)
    assert found is not None
    for value in (found.limit_bytes, found.used_bytes, found.psi_some_avg10, found.psi_full_avg10):
        assert value is None or value >= 0
