"""Which implementation of each operation over the cache runs: the one place that knows backends.

Every operation has a module beside this one; its `reference` (torch) says what is computed and is the contract of all
others. A backend may implement some operations only and take the rest from another.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from ullage_engine.errors import KernelError
from ullage_engine.kernels import (
    copy_blocks,
    gather_cells,
    key_scores,
    kv_write,
    merge,
    paged_decode,
    paged_prefill,
    targets,
)
from ullage_engine.kernels.build import Operation
from ullage_engine.kernels.view import LayerView
from ullage_engine.policies import mass

if TYPE_CHECKING:
    from ullage_engine.kernels.cpu import CpuKernels
    from ullage_engine.layout import CacheLayout

log = logging.getLogger(__name__)

OPERATIONS: tuple[Operation, ...] = (
    kv_write, copy_blocks, gather_cells, paged_decode, paged_prefill, merge, key_scores,
)  # fmt: skip
"""What has a Triton kernel; each module is a `build.Operation`."""
Choice: TypeAlias = "CpuKernels | Literal['torch', 'triton'] | None"
"""Who computes: compiled for the CPU, where they serve the layout (else torch); None: the fastest that needs no
compiler: Triton on a GPU that it knows, else torch."""


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
    attention: mass.Attention
    """`key_scores` of float32 keys of any layout."""
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
    attention=mass.attention,
)
"""Works everywhere."""
TRITON = replace(
    TORCH,
    name="triton",
    kv_write=kv_write.kernel,
    copy_blocks=copy_blocks.kernel,
    gather_cells=gather_cells.kernel,
    paged_decode=paged_decode.kernel,
    paged_prefill=paged_prefill.kernel,
    merge=merge.kernel,
    key_scores=key_scores.kernel,
)
"""For GPUs; on CPU tensors in Triton's interpreter alone."""


def choose(layout: CacheLayout, device: torch.device, wanted: Choice = None) -> Kernels:
    """Implementations for a store of this layout on this device.

    Raises:
        KernelError: Triton was asked for, and cannot serve here.
    """
    if wanted is None:
        wanted = _fastest(device)
    if wanted == "triton":
        require_triton(device)
        return TRITON
    return TORCH if wanted == "torch" or not wanted.serves(layout) else _compiled(wanted)


def _compiled(native: CpuKernels) -> Kernels:
    prefill = paged_prefill.reading_with(native.read)
    return replace(
        TORCH,
        name="native",
        kv_write=native.write,
        paged_decode=native.decode,
        paged_prefill=prefill,
        attention=native.attention,
        native=native,
    )


@cache  # so that what it warns of is said once
def _fastest(device: torch.device) -> Literal["torch", "triton"]:
    if device.type == "cpu":
        return "torch"
    try:
        require_triton(device)
    except KernelError as error:
        log.warning("torch computes attention, which is many times slower than kernels for this GPU: %s", error)
        return "torch"
    return "triton"


def require_triton(device: torch.device) -> None:
    """Make sure that Triton's kernels can run on this device.

    Raises:
        KernelError: they cannot; says what to do.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelError("--kernels: triton is not installed; pip install 'ullage[gpu]', or leave the option out")
    from ullage_engine.kernels.device import interpreter

    if device.type == "cpu" and not interpreter.active():
        raise KernelError("--kernels: triton needs a GPU, and torch sees none here; leave the option out")
    targets.of(device)
