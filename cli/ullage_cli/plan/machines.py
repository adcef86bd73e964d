"""Accelerators as their makers describe them: memory and its bandwidth. Prices differ by the day and are options.

Memory is in bytes of the label's gigabytes (10^9); drivers keep some of it and show some more, which is what
`--reserve` is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    """Bytes a second of its memory; None: not known."""


def _gpu(name: str, gigabytes: float, gigabytes_per_s: float) -> Gpu:
    return Gpu(name=name, memory_bytes=round(gigabytes * 1e9), bandwidth=gigabytes_per_s * 1e9)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 16, 320),
        _gpu("V100-32GB", 32, 900),
        _gpu("A10", 24, 600),
        _gpu("A30", 24, 933),
        _gpu("A40", 48, 696),
        _gpu("A100-40GB", 40, 1555),
        _gpu("A100-80GB", 80, 2039),
        _gpu("L4", 24, 300),
        _gpu("L40S", 48, 864),
        _gpu("RTX-3090", 24, 936),
        _gpu("RTX-4090", 24, 1008),
        _gpu("RTX-5090", 32, 1792),
        _gpu("RTX-A6000", 48, 768),
        _gpu("H20", 96, 4000),
        _gpu("H100-PCIe", 80, 2000),
        _gpu("H100-SXM", 80, 3350),
        _gpu("H100-NVL", 94, 3900),
        _gpu("H200", 141, 4800),
        _gpu("B200", 180, 8000),
        _gpu("MI210", 64, 1600),
        _gpu("MI300X", 192, 5300),
        _gpu("MI325X", 256, 6000),
    )
}


def find_gpu(name: str) -> Gpu:
    """An accelerator by name, in any case.

    Raises:
        InputError: not in the table.
    """
    found = {known.lower(): gpu for known, gpu in GPUS.items()}.get(name.lower())
    if found is None:
        raise InputError(f"--gpu: {name!r} is not in the table ({', '.join(GPUS)}); give --memory and --bandwidth")
    return found
