"""How many blocks the KV cache gets, and whether the model fits the machine's memory at all.

Pure arithmetic on numbers that `read_memory` collects; every refusal shows the sum that led to it and the largest
setting that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ullage_engine.errors import SizingError
from ullage_engine.layout import CacheLayout

MIN_BLOCKS = 2
"""Fewer can't hold one prompt and its answer."""
DEFAULT_SHARE = 0.5
"""Of the memory left after weights and activations, when no size is given."""
DEFAULT_CEILING = 4 << 30
"""Bytes: more of a host's memory is never taken unasked."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of memory that this process may use."""

    available: int
    source: str
    """Which limit it is, for messages."""
    shared: bool = True
    """Whether others live in it too: a host's memory; an accelerator's is the engine's own."""


def read_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Host memory: the smaller of the kernel's MemAvailable and what the cgroup (v2 or v1) still allows.

    Of a cgroup's usage, file pages that were not used lately don't count: the kernel drops them before it refuses.
    """
    available = Memory(available=_mem_available(proc), source="MemAvailable")
    for limit_file, used_file, stat_file, cold in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is None or used is None:
            continue
        left = max(0, limit - used + _stat(cgroup / stat_file, cold))
        if left < available.available:
            available = Memory(available=left, source=f"cgroup {limit_file.rpartition('/')[2]}")
    return available


def activation_bytes(*, hidden: int, intermediate: int, vocabulary: int, tokens: int, sequences: int) -> int:
    """Largest activations of one step and its logits, float32: an estimate from above for one layer at a time."""
    return 4 * (tokens * (6 * hidden + 3 * intermediate) + 2 * sequences * vocabulary)


def block_count(
    layout: CacheLayout,
    *,
    kv_memory: int | None,
    weights: int,
    activations: int,
    memory: Memory,
    kv_fraction: float | None = None,
    beside: int = 0,
) -> int:
    """Blocks to allocate.

    Args:
        beside: bytes that each block takes elsewhere too: a draft model's cache of the same tokens.
        kv_memory: bytes asked for; None: a share of what is left.
        kv_fraction: that share; None: `DEFAULT_SHARE`, but never above `DEFAULT_CEILING`.
        weights: bytes still to be loaded.
        activations: bytes that the largest step takes.

    Raises:
        SizingError: it does not fit.
    """
    left = memory.available - weights - activations
    if left <= 0:
        raise SizingError(
            f"--model: weights {_mib(weights)} + activations {_mib(activations)} do not fit the "
            f"{_mib(memory.available)} that {memory.source} leaves; use a smaller model or raise the memory limit"
        )
    share = int(left * (kv_fraction or DEFAULT_SHARE))
    if kv_fraction is None and memory.shared:
        share = min(share, DEFAULT_CEILING)
    wanted = share if kv_memory is None else kv_memory
    each = layout.block_bytes + beside
    blocks, least = wanted // each, MIN_BLOCKS * each
    if blocks < MIN_BLOCKS:
        raise SizingError(
            f"--kv-memory: {_mib(wanted)} holds {blocks} blocks of {each} bytes; at least {least} bytes "
            f"({MIN_BLOCKS} blocks) are needed"
        )
    if wanted > left:
        raise SizingError(
            f"--kv-memory: {_mib(wanted)} does not fit: {memory.source} leaves {_mib(memory.available)}, minus weights "
            f"{_mib(weights)}, minus activations {_mib(activations)}, is {_mib(left)}; the largest that fits is "
            f"{left // each * each} bytes"
        )
    return blocks


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SizingError(f"{path} has no MemAvailable line; give --kv-memory on a Linux kernel of 3.14 or later")


def _number(path: Path) -> int | None:
    """A cgroup file's number; None where there is no such file or no limit (`max`)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, field: str) -> int:
    """One field of a cgroup's memory.stat; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field} ")), 0)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
