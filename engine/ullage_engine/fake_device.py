"""A device whose work happens as late as its user likes, for tests of what may and what may not be done meanwhile."""

from __future__ import annotations

from collections import deque

import torch

from ullage_engine.device import CpuDevice, Mark, Work


class FakeMark:
    """A `device.Mark` that waits by doing the work before it."""

    def __init__(self, device: FakeDevice, position: int) -> None:
        self._device = device
        self._position = position

    def done(self) -> bool:
        return self._device.finished >= self._position

    def wait(self) -> None:
        self._device.run(self._position - self._device.finished)


class FakeDevice(CpuDevice):
    """Work waits in order until `run` does it, or somebody waits for a mark after it."""

    def __init__(self) -> None:
        self._given = 0
        self.finished = 0
        """Pieces of work done."""
        self._queue: deque[Work] = deque()

    @property
    def pending(self) -> int:
        """Pieces of work given and not done."""
        return len(self._queue)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: super(FakeDevice, self).copy(target, source))

    def launch(self, work: Work) -> None:
        self._given += 1
        self._queue.append(work)

    def mark(self) -> Mark:
        return FakeMark(self, self._given)

    def run(self, count: int) -> None:
        """Do the next `count` pieces of work, or as many as there are."""
        for _ in range(min(count, len(self._queue))):
            self._queue.popleft()()
            self.finished += 1
