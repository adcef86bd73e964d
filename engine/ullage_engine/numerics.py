"""Results that depend on nothing but their own sequence: not on the batch, the chunks, or on what was speculated.

Matrix products are where batches show: libraries choose kernels, and so orders of summation, by the number of rows.
Here every product has exactly `TILE` rows, so it meets the same kernel always; and the kernel is tried, as each layer
is wrapped, on whether a row's result depends on its place among the rows. Where it does, rows are multiplied one by
one. Attention row by row is `attention.make_batch`'s part; norms and rotary embeddings work on single rows anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage_engine.packing import PackedLinear

TILE = 16
"""Rows of a product: the height of AMX tiles, and what a decode step of a few sequences has anyway."""
PROBES = 8
"""Random rows that are tried in every place of a tile."""


class InvariantLinear(nn.Module):
    """A linear layer whose every row is computed alike, whatever rows come with it."""

    def __init__(self, inner: nn.Linear | PackedLinear, like: torch.Tensor) -> None:
        """Wrap `inner`; `like` has the type and device of its inputs."""
        super().__init__()
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.inner = inner
        self.tile = TILE if _places_agree(inner, like) else 1

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """`inner` of values [..., in_features]."""
        rows = values.reshape(-1, self.in_features).contiguous()
        count = rows.shape[0]
        padded = functional.pad(rows, (0, 0, 0, -count % self.tile))
        parts = [self.inner(part) for part in torch.split(padded, self.tile)]
        return torch.cat(parts)[:count].view(*values.shape[:-1], self.out_features)


def make_invariant(model: Any) -> int:
    """Wrap every linear layer of a model whose weights are laid out for good; returns how many."""
    like = next(model.parameters())
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, InvariantLinear)
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, PackedLinear)
    ]
    for parent, name, child in found:
        setattr(parent, name, InvariantLinear(child, like))
    return len(found)


@torch.inference_mode()
def _places_agree(linear: nn.Linear | PackedLinear, like: torch.Tensor) -> bool:
    """Whether equal rows of a tile have equal results."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        row = torch.randn(1, linear.in_features, generator=generator).to(like)
        result = linear(row.repeat(TILE, 1))
        if not torch.equal(result, result[:1].expand_as(result)):
            return False
    return True
