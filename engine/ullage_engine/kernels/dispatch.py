"""Which implementation of each operation over the cache runs: the one place that knows backends.

Every operation has a module beside this one; its `reference` (torch) says what is computed and is the contract of all
others. A backend may implement some operations only and take the rest from another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ullage_engine.kernels import copy_blocks, gather_cells, key_scores, kv_write, merge, paged_decode, paged_prefill
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
    paged_decode: Callable[..., None]
    paged_prefill: Callable[..., None]
    merge: Callable[..., None]
    key_scores: Callable[..., torch.Tensor]
    native: CpuKernels | None = None
    """The compiled CPU kernels, where these are in use."""


TORCH = Kernels(
    name="torch",
    kv_write=kv_write.reference,
    copy_blocks=copy_blocks.reference,
    gather_cells=gather_cells.reference,
    paged_decode=paged_decode.reference,
    paged_prefill=paged_prefill.reference,
    merge=merge.reference,
    key_scores=key_scores.reference,
)
"""Works everywhere."""


def choose(layout: CacheLayout, native: CpuKernels | None) -> Kernels:
    """The fastest that serves this layout: compiled for the CPU where it is given and can, else torch."""
    if native is None or not native.serves(layout):
        return TORCH
    prefill = paged_prefill.reading_with(native.read)
    return replace(
        TORCH, name="cpu", kv_write=native.write, paged_decode=native.decode, paged_prefill=prefill, native=native
    )
