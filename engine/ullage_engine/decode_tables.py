"""Block tables of decoding sequences in device memory: one row each, and only rows that changed are sent.

A table changes once in a block's worth of steps, so most steps send nothing. What a row holds is compared with what it
should hold, not inferred from who touched which table.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from itertools import groupby

import torch

from ullage_engine.device import Device
from ullage_engine.sequence import Sequence
from ullage_engine.staging import StagingRing

DEPTH = 2
"""Staging buffers: one is read by copies while the next step fills the other."""


class DecodeTables:
    """Tables of up to `rows` sequences with up to `width` blocks each."""

    def __init__(self, device: Device, rows: int, width: int) -> None:
        self.width = width
        self.tables = torch.zeros((rows, width), dtype=torch.int64, device=device.torch_device)
        """[rows, width] block ids; 0 behind a table's end and in rows without a sequence, which see no row of it."""
        self.starts = torch.zeros((rows, width), dtype=torch.int64, device=device.torch_device)
        """[rows, width] position of each block's first token."""
        self._device = device
        self._staging = StagingRing(device, DEPTH, 2, rows, width)
        self._held: list[tuple[list[int], list[int]] | None] = [([], [])] * rows
        """What each row in device memory holds; None: not known."""

    def send(self, sequences: Several[Sequence], rows: int) -> None:
        """Make row i that of sequence i, and the rows up to `rows` that follow nobody's."""
        wanted: list[tuple[list[int], list[int]]] = [(s.table, s.starts) for s in sequences]
        wanted += [([], [])] * (rows - len(sequences))
        changed = [row for row, content in enumerate(wanted) if self._held[row] != content]
        if not changed:
            return
        with self._staging.buffer() as host:
            for first, last in _runs(changed):
                self._held[first:last] = [None] * (last - first)
                for row in range(first, last):
                    for host_row, values in zip(host[:, row], wanted[row], strict=True):
                        host_row[: len(values)] = torch.tensor(values, dtype=torch.int64)
                        host_row[len(values) :] = 0
                self._device.copy(self.tables[first:last], host[0, first:last])
                self._device.copy(self.starts[first:last], host[1, first:last])
                self._held[first:last] = [(list(table), list(starts)) for table, starts in wanted[first:last]]


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """First row and the one after the last, of each run of neighbours in an ascending list."""
    for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        members = [row for _, row in run]
        yield members[0], members[-1] + 1
