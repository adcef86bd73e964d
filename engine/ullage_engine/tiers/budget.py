"""Whether the host tier fits the memory that this process may use, and whether it may be pinned.

Pure arithmetic on figures that `sizing.read_memory` and `read_lock_limit` collect.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

from ullage_engine.errors import SizingError
from ullage_engine.sizing import MIB, Memory


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What the host tier gets."""

    slots: int
    pinned: bool
    """Whether to lock it in memory, so that an accelerator copies at full speed."""
    note: str = ""
    """Why not, for the log."""


def read_lock_limit() -> int | None:
    """Bytes that this process may lock (RLIMIT_MEMLOCK); None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def beside_tier(memory: Memory, wanted: int | None) -> Memory:
    """What is left for weights and KV cache beside a host tier of `wanted` bytes.

    Raises:
        SizingError: the tier does not fit at all.
    """
    if wanted is None:
        return memory
    if wanted >= memory.available:
        raise SizingError(
            f"--host-memory: {wanted / MIB:,.1f} MiB does not fit the {memory.available / MIB:,.1f} MiB that "
            f"{memory.source} leaves; lower it or raise the memory limit"
        )
    return replace(memory, available=memory.available - wanted, source=f"{memory.source} beside --host-memory")


def disk_slots(wanted: int, block_bytes: int) -> int:
    """Blocks that `wanted` bytes of a disk hold.

    Raises:
        SizingError: none.
    """
    if wanted < block_bytes:
        raise SizingError(f"--disk-memory: {wanted} bytes hold no block of {block_bytes} bytes; give more")
    return wanted // block_bytes


def host_plan(wanted: int, block_bytes: int, *, accelerator: bool, lock_limit: int | None) -> HostPlan:
    """Slots for `wanted` bytes. Without an accelerator there is nothing to pin for.

    Raises:
        SizingError: not one block fits.
    """
    slots = wanted // block_bytes
    if slots < 1:
        raise SizingError(f"--host-memory: {wanted} bytes hold no block of {block_bytes} bytes; give more")
    if not accelerator:
        return HostPlan(slots, pinned=False)
    if lock_limit is not None and slots * block_bytes > lock_limit:
        return HostPlan(
            slots,
            pinned=False,
            note=f"the limit of locked memory (ulimit -l) is {lock_limit} bytes, --host-memory takes "
            f"{slots * block_bytes}: it is not pinned, and copies take about twice as long",
        )
    return HostPlan(slots, pinned=True)
