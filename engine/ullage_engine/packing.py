"""Linear layers whose weights are laid out once for the CPU's matrix units.

torch's plain bfloat16 linear reorders the weight on every call. oneDNN's reordered weight, which torch.compile uses
when it freezes a model, can be used without a compiler: measured on one core with AMX, the head of a 49,152-word
vocabulary takes half to a quarter of the time, the other layers two thirds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TYPICAL_ROWS = 32
"""oneDNN chooses the order for about so many rows."""


def cpu_has_matrix_units() -> bool:
    """Whether bfloat16 is faster than float32 on this CPU: AMX or AVX-512 with bfloat16 products."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


class PackedLinear(nn.Module):
    """`nn.Linear` with a oneDNN weight; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_ROWS)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(values, self._packed, self.bias, "none", [], "")
        return result


def pack_linears(model: Any) -> int:
    """Replace every plain linear layer of a bfloat16 model on the CPU; returns how many."""
    # by name, as a list of the layers themselves would keep all old weights until the last is replaced
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name in found:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    return len(found)
