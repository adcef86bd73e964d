"""A ring of host buffers for copies to a device, none of which is written again before its copies have run.

A copy reads host memory when its turn comes, perhaps a step later. Whoever rewrites the buffer before gives the device
another step's numbers. Each buffer therefore carries the mark after its copies, and taking it again waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ullage_engine.device import Device, Mark


class StagingRing:
    """`depth` equal int64 buffers, handed out in turn."""

    def __init__(self, device: Device, depth: int, *shape: int) -> None:
        self._device = device
        self._buffers = [device.host_memory(*shape) for _ in range(depth)]
        self._marks: list[Mark | None] = [None] * depth
        self._at = -1

    @contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        """The next buffer, with whatever its last use left in it; waits for the copies of that use.

        Copies to or from it are given to the device within the `with`, even if it is left by an error.
        """
        self._at = (self._at + 1) % len(self._buffers)
        mark = self._marks[self._at]
        if mark is not None:
            mark.wait()
        try:
            yield self._buffers[self._at]
        finally:
            self._marks[self._at] = self._device.mark()
