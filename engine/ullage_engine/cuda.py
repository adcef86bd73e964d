"""Everything that only CUDA knows: streams, events, pinned memory, graphs, free memory.

CI has no GPU, so nothing here is run by it: keep it short, and keep decisions out of it. ROCm builds of torch answer
to the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch

from ullage_engine import sizing
from ullage_engine.device import Lane, Mark, Work

WARM_UPS = 2
"""Runs before a graph is captured: kernels are compiled and libraries choose theirs outside of it."""


class CudaMark:
    """A `device.Mark`: an event recorded in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class CudaLane:
    """A `device.Lane`: a stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, after: Mark, work: Work) -> None:
        after.wait()
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()


class CudaDevice:
    """A `device.Device`: the GPU that torch uses first. Work is given to the current stream."""

    records = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Those that live. They share one pool of memory, as they run one after the other; it goes with the last."""

    def host_memory(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return CudaMark()

    def record(self, work: Work) -> Work:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph, other = torch.cuda.CUDAGraph(), next(iter(self._graphs), None)
        with torch.cuda.graph(graph, pool=None if other is None else other.pool()):
            work()
        self._graphs.add(graph)
        return graph.replay

    def launch(self, work: Work) -> None:
        work()

    def lane(self) -> Lane:
        return CudaLane()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        self._settle()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before

    def memory(self) -> sizing.Memory:
        self._settle()
        free, _ = torch.cuda.mem_get_info()
        return sizing.Memory(available=free, source=f"free memory of {torch.cuda.get_device_name()}", shared=False)

    def _settle(self) -> None:
        """Give back what the allocator holds without need, so that it counts as free."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def allocator_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that torch's allocator has reserved and, of those, handed out."""
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
