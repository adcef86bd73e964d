"""Which implementation of each operation over the cache runs: the one place that knows backends.

Every operation has a module beside this one; its `reference` (torch) says what is computed and is the contract of all
others. A backend may implement some operations only and take the rest from another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ullage_engine.kernels import copy_blocks, gather_cells, kv_write
from ullage_engine.kernels.view import LayerView

if TYPE_CHECKING:
    from ullage_engine.kernels.cpu import CpuKernels
    from ullage_engine.layout import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation; contracts are the docstrings of the modules' `reference`."""

    name: str
    kv_write: Callable[[LayerView, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    gather_cells: Callable[[LayerView, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    native: CpuKernels | None = None
    """The compiled CPU kernels, where these are in use."""


TORCH = Kernels(
    name="torch",
    kv_write=kv_write.reference,
    copy_blocks=copy_blocks.reference,
    gather_cells=gather_cells.reference,
)
"""Works everywhere."""


def choose(layout: CacheLayout, native: CpuKernels | None) -> Kernels:
    """The fastest that serves this layout: compiled for the CPU where it is given and can, else torch."""
    if native is None or not native.serves(layout):
        return TORCH
    return replace(TORCH, name="cpu", kv_write=native.write, native=native)
