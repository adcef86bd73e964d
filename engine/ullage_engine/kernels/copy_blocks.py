"""Whole blocks from one pool of memory to another or within one: codes and scales of all layers and heads."""

from __future__ import annotations

import torch

from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, require_indices, target_of
from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.view import UNIT

WARPS = 4
WORDS = 2
"""Words of four bytes that a program moves for each element of the target's tile: 128 bytes a thread in flight."""


def reference(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy `source[sources[i]]` to `target[targets[i]]`.

    Within one pool no block may be both a source and a target: the order of copies is not defined.

    Args:
        source, target: [blocks, block_bytes] uint8, perhaps the same memory.
        sources, targets: [n] int64 on the device of their pool; targets are all different.
    """
    target[targets] = source[sources].to(target.device)


def kernel(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`reference` in one launch. One of the pools may be in pinned host memory, which the GPU reaches over the bus.

    Raises:
        ValueError: pools or lists that do not fit together, or host memory that is not pinned.
    """
    on = source if source.device.type == "cuda" else target
    machine = target_of(on)
    _check(source, target, sources, targets, on)
    if not len(sources):
        return
    from ullage_engine.kernels.device.copy_blocks import copy

    units, columns = source.shape[1] // UNIT, machine.tile * WORDS
    sources, targets = sources.to(on.device), targets.to(on.device)
    copy[(len(sources), -(-units * (UNIT // 4) // columns))](
        source, target, sources, targets, source.stride(0), target.stride(0), units, columns, num_warps=WARPS
    )


def builds(serving: Serving, target: Target) -> list[Build]:
    """One for all configurations."""
    from ullage_engine.kernels.device.copy_blocks import copy

    pools = dict.fromkeys(("source_ptr", "target_ptr"), "*u8:16")
    lists = dict.fromkeys(("sources_ptr", "targets_ptr"), "*i64:16")
    strides = dict.fromkeys(("source_stride", "target_stride"), "i64:16")
    arguments = {**pools, **lists, **strides, "units": "i64"}
    return [Build("copy_blocks", copy, arguments, {"COLUMNS": target.tile * WORDS}, WARPS)]


def _check(
    source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, on: torch.Tensor
) -> None:
    for name, pool, blocks in (("source", source, sources), ("target", target, targets)):
        fits = pool.dim() == 2 and pool.dtype == torch.uint8 and pool.shape[1] == source.shape[1]
        require(fits, f"{name} must be [blocks, {source.shape[-1]}] of uint8", pool)
        aligned = pool.stride(1) == 1 and not (pool.stride(0) | pool.shape[1] | pool.data_ptr()) % UNIT
        require(aligned, f"{name} must have contiguous blocks on multiples of {UNIT} bytes", pool)
        reached = pool.device == on.device or pool.is_pinned()
        require(reached, f"{name} must be on {on.device}, or in pinned host memory", pool)
        require_indices(f"{name}s", blocks, pool)
        require(len(blocks) == len(sources), f"{name}s must be as many as sources, {len(sources)}", blocks)
