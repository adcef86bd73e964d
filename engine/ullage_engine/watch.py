"""Who sees the queries of a sequence while attention computes them."""

from __future__ import annotations

from typing import Protocol

import torch

from ullage_engine.policies.mass import Rule


class Watch(Protocol):
    """Sees a reader's queries."""

    def see(self, layer: int, queries: torch.Tensor, first: int, rule: Rule) -> None:
        """Take in one layer's queries [n, Hq, D] after RoPE, at positions from `first` on; their keys are stored."""
        ...
