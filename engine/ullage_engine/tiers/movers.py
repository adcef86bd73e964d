"""What makes copies between the pool and host memory: on a CPU, and on an accelerator beside its work.

Whole blocks, contiguous on both sides: codes and scales travel together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ullage_engine.device import Device, Mark
from ullage_engine.tiers.transfer import Copy, Kind, Mover, TierFault

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""[slots, block_bytes] uint8."""


def checksum(data: Bytes) -> int:
    """Of one block's bytes; releases the interpreter while it computes."""
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "little")


def checked(found: int, copy: Copy) -> int | TierFault:
    """A checksum, or a fault where the copy expected another one."""
    if copy.checksum is not None and found != copy.checksum:
        return TierFault("corrupt", f"host slot {copy.slot}: checksum {found:016x}, {copy.checksum:016x} was stored")
    return found


class HostCopies:
    """Between a pool in this machine's main memory and the host tier.

    numpy copies, not torch: torch would start OpenMP workers for these threads too, and more workers than cores make
    every barrier of the step loop sleep.

    Args:
        pool: [blocks, block_bytes] uint8.
        host: the tier's slots.
        verify: compute checksums of all that is stored, and compare when it is loaded.
    """

    def __init__(self, pool: torch.Tensor, host: Bytes, *, verify: bool) -> None:
        self._pool: Bytes = pool.numpy()
        self._host = host
        self._verify = verify

    def movers(self) -> dict[Kind, Mover]:
        return {"store": self.store, "load": self.load}

    def store(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        return [self._store(copy) for copy in copies]

    def load(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        return [self._load(copy) for copy in copies]

    def _store(self, copy: Copy) -> int | None:
        found = checksum(self._pool[copy.block]) if self._verify else None
        np.copyto(self._host[copy.slot], self._pool[copy.block])
        return found

    def _load(self, copy: Copy) -> int | TierFault | None:
        np.copyto(self._pool[copy.block], self._host[copy.slot])
        return checked(checksum(self._pool[copy.block]), copy) if self._verify else None


class DeviceCopies:
    """Between a pool on an accelerator and the host tier, over a lane for each direction.

    A copy waits for all work that the accelerator was given before it was asked for (`mark`): a store must not read
    what is still being written, nor a load overwrite what is still being read. It is reported once it has happened, so
    work that is given afterwards finds it complete.

    Slots that could not be pinned are reached through a ring of pinned buffers, filled and emptied a window at a time:
    a buffer is used again only after its last copy has happened.

    Args:
        pool: [blocks, block_bytes] uint8 on the accelerator.
        host: [slots, block_bytes] uint8, the tier's slots.
        verify: as for `HostCopies`; checksums are of the host's side.
    """

    RING = 8

    def __init__(self, machine: Device, pool: torch.Tensor, host: torch.Tensor, *, verify: bool) -> None:
        self._machine = machine
        self._pool = pool
        self._host = host
        self._bytes: Bytes = host.numpy()
        self._verify = verify
        self._lanes = {"store": machine.lane(), "load": machine.lane()}
        self._asked: Mark = machine.mark()
        ring = None if host.is_pinned() else (2, self.RING, host.shape[1])
        buffers = None if ring is None else machine.host_memory(*ring, dtype=torch.uint8)
        self._rings = {"store": None, "load": None} if buffers is None else {"store": buffers[0], "load": buffers[1]}

    def movers(self) -> dict[Kind, Mover]:
        return {"store": self.store, "load": self.load}

    def mark(self) -> None:
        """Called in the step loop's thread before copies are handed over."""
        self._asked = self._machine.mark()

    def store(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        ring, asked = self._rings["store"], self._asked
        for some in _windows(copies, self.RING):
            buffers = [self._host[copy.slot] for copy in some] if ring is None else [*ring[: len(some)]]
            pairs = [(buffer, self._pool[copy.block]) for buffer, copy in zip(buffers, some, strict=True)]
            self._lanes["store"].run(asked, partial(self._copy, pairs))
            if ring is not None:
                for buffer, copy in zip(buffers, some, strict=True):
                    np.copyto(self._bytes[copy.slot], buffer.numpy())
        return [checksum(self._bytes[copy.slot]) if self._verify else None for copy in copies]

    def load(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        ring, asked = self._rings["load"], self._asked
        results = [checked(checksum(self._bytes[c.slot]), c) if self._verify else None for c in copies]
        for some in _windows(copies, self.RING):
            buffers = [self._host[copy.slot] for copy in some] if ring is None else [*ring[: len(some)]]
            if ring is not None:
                for buffer, copy in zip(buffers, some, strict=True):
                    np.copyto(buffer.numpy(), self._bytes[copy.slot])
            pairs = [(self._pool[copy.block], buffer) for buffer, copy in zip(buffers, some, strict=True)]
            self._lanes["load"].run(asked, partial(self._copy, pairs))
        return results

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            self._machine.copy(target, source)


def _windows(copies: Sequence[Copy], size: int) -> list[Sequence[Copy]]:
    return [copies[at : at + size] for at in range(0, len(copies), size)]
