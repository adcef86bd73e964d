"""What launchers ask of their arguments before anything runs, since a kernel checks nothing."""

from __future__ import annotations

import torch

from ullage_engine.kernels import targets
from ullage_engine.kernels.targets import Target


def require(condition: bool, wanted: str, given: torch.Tensor) -> None:
    """Raise ValueError that says what was wanted, and what the tensor is."""
    if not condition:
        raise ValueError(
            f"{wanted}, not {tuple(given.shape)} of {given.dtype} on {given.device} with strides {given.stride()}"
        )


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()


def require_indices(name: str, given: torch.Tensor, like: torch.Tensor) -> None:
    """`given` must be a contiguous list of int64 beside `like`."""
    fits = given.dtype == torch.int64 and given.dim() == 1 and given.is_contiguous() and given.device == like.device
    require(fits, f"{name} must be a contiguous list of int64 on {like.device}", given)


def target_of(data: torch.Tensor) -> Target:
    """What kernels over `data` are compiled for.

    Raises:
        ValueError: it is in host memory, and Triton's interpreter is not in use.
        KernelError: see `targets.of`.
    """
    from ullage_engine.kernels.device import interpreter

    on_gpu = data.device.type == "cuda"  # AMD's too, in torch
    require(on_gpu or interpreter.active(), "Triton's kernels need tensors on a GPU", data)
    return targets.of(data.device)
