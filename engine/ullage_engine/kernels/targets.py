"""GPUs that kernels are compiled for, and what a kernel may use on each.

Limits of shared memory a thread block: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
LDS of gfx942: CDNA3 instruction set architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from ullage_engine.errors import KernelError


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture."""

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    """As Triton names it: ten times the compute capability, or AMD's `gfx` name."""
    warp_size: int
    shared_bytes: int
    """Shared memory (LDS) that one thread block may take."""
    native_e4m3: bool
    """Whether instructions convert from and to OCP e4m3 (gfx942 knows another float8 with other numbers)."""
    tile: int = 2048
    """Elements that one program of a copying kernel takes: 16 registers of each of 128 threads."""


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 166_912, False),
    Target("sm_86", "cuda", 86, 32, 101_376, False),
    Target("sm_89", "cuda", 89, 32, 101_376, True),
    Target("sm_90", "cuda", 90, 32, 232_448, True),
    Target("sm_100", "cuda", 100, 32, 232_448, True),
    Target("sm_120", "cuda", 120, 32, 101_376, True),
    Target("gfx942", "hip", "gfx942", 64, 65_536, False),
)
INTERPRETER = Target("interpreter", "cuda", 80, 32, 65_536, False, 65_536)
"""Triton's interpreter, which runs kernels on CPU tensors: conversions by integer operations, and programs as large as
they can be, since it takes a millisecond an operation whatever the operation's size."""


def of(device: torch.device) -> Target:
    """What kernels for tensors on `device` are compiled for.

    Raises:
        KernelError: the GPU is older than all targets, or AMD's and not among them.
    """
    return INTERPRETER if device.type == "cpu" else _of_gpu(torch.cuda.current_device(), device.index)


@cache
def _of_gpu(current: int, index: int | None) -> Target:
    properties = torch.cuda.get_device_properties(current if index is None else index)
    if torch.version.hip:
        return of_amd(properties.gcnArchName)
    return of_nvidia(properties.major * 10 + properties.minor)


def of_nvidia(capability: int) -> Target:
    """The newest target that is not newer than the GPU; `capability` is ten times its compute capability."""
    fitting = [t for t in TARGETS if isinstance(t.arch, int) and t.arch <= capability]
    if not fitting:
        raise KernelError(f"a GPU of compute capability {capability / 10} is older than 8.0, the oldest supported")
    return fitting[-1]


def of_amd(name: str) -> Target:
    """The target of a `gcnArchName` such as `gfx942:sramecc+:xnack-`."""
    arch = name.partition(":")[0]
    for target in TARGETS:
        if target.arch == arch:
            return target
    known = ", ".join(str(t.arch) for t in TARGETS if t.backend == "hip")
    raise KernelError(f"an AMD GPU {arch} is not supported; {known} is")


def side(size: int) -> int:
    """Of a tile that holds `size`: the least power of two that is not below it, as Triton's shapes are."""
    return 1 << (size - 1).bit_length()
