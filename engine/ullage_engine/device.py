"""What the engine asks of the machine that computes: order of work, host memory for copies, and how much there is.

Work given to a device happens in the order it was given, later than the call returns: a copy from host memory reads
what is there when its turn comes. `CpuDevice` does everything at once; `cuda.CudaDevice` is the one module that knows
CUDA. Non-goal: what is computed (`runner`, `decode_graphs`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ullage_engine import sizing

log = logging.getLogger(__name__)

Work = Callable[[], None]

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs: the peak of resident memory starts anew (proc(5))."""


class Mark(Protocol):
    """A point in a device's order of work."""

    def done(self) -> bool:
        """Whether all work given before it has happened; never waits."""
        ...

    def wait(self) -> None:
        """Return once all work given before it has happened."""
        ...


class Lane(Protocol):
    """An order of work beside the device's own, for copies between tiers; used by one thread, any one."""

    def run(self, after: Mark, work: Work) -> None:
        """Do `work` once what came before `after` has happened, beside the device's own; returns when it is done."""
        ...


class Device(Protocol):
    """One machine that computes. Only the step loop's thread gives it work."""

    torch_device: torch.device
    records: bool
    """Whether recorded work costs less to repeat than the work itself."""

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Zeroes in host memory, made so that copies between it and the device need not be waited for."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between device memory and `host_memory`, either way, when its turn comes."""
        ...

    def mark(self) -> Mark:
        """The point after all work given so far."""
        ...

    def record(self, work: Work) -> Work:
        """Work over tensors that stay where they are, made cheap to repeat; `work` itself may be done now, repeatedly.

        The result does what `work` did, without the Python around it: what `work` decides, it decides here for good.
        """
        ...

    def launch(self, work: Work) -> None:
        """Give the device work, recorded or not."""
        ...

    def lane(self) -> Lane:
        """Another lane for copies."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do `work`; the most memory that it held at once beyond what was held before, allocator's waste included."""
        ...

    def memory(self) -> sizing.Memory:
        """What is left of the memory that weights and cache live in."""
        ...


class _Past:
    """A mark of a device that does everything at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class HostLane:
    """Copies of a device that does everything at once: made where they are asked for."""

    def run(self, after: Mark, work: Work) -> None:
        after.wait()
        work()


class CpuDevice:
    """The host itself: all work is done when the call returns."""

    torch_device = torch.device("cpu")
    records = False

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return _Past()

    def record(self, work: Work) -> Work:
        return work

    def launch(self, work: Work) -> None:
        work()

    def lane(self) -> Lane:
        return HostLane()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
        except OSError:  # some sandboxes have no such file: the peak so far stands for the peak of the step
            log.warning("%s cannot be written; the largest step is estimated from the peak so far", CLEAR_REFS)
        before = _resident("VmRSS")
        work()
        return max(0, _resident("VmHWM") - before)

    def memory(self) -> sizing.Memory:
        return sizing.read_memory()


def find_device() -> Device:
    """The accelerator, if torch sees one; else the host."""
    if not torch.cuda.is_available():
        return CpuDevice()
    from ullage_engine.cuda import CudaDevice

    return CudaDevice()


def tensor_on(device: torch.device, values: Any) -> torch.Tensor:
    """An int64 tensor of numbers, without waiting for the device: torch keeps the pinned copy until it was read."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _resident(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
