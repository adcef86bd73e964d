"""Whole blocks from one pool of memory to another or within one: codes and scales of all layers and heads."""

from __future__ import annotations

import torch


def reference(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy `source[sources[i]]` to `target[targets[i]]`; all sources are read before any target is written.

    Args:
        source, target: [blocks, block_bytes] uint8, perhaps the same memory.
        sources, targets: [n] int64 on the device of their pool; targets are all different.
    """
    target[targets] = source[sources].to(target.device)
