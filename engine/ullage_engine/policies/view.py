"""A sequence as plain tensors: what a policy sees where nothing is paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ullage_engine.policies import mass
from ullage_engine.policies.base import Mode, Queries
from ullage_engine.policies.mass import Keys, Rule


@dataclass(frozen=True, eq=False)
class TensorView:
    """Implements `SequenceView`."""

    all_keys: Sequence[torch.Tensor]
    """For each layer [H, R, D]."""
    all_values: Sequence[torch.Tensor]
    positions: torch.Tensor
    exists: torch.Tensor
    length: int
    rule: Rule
    observed: Sequence[Queries] = field(default=())
    rereading: torch.Tensor | None = None
    """[L, H, R]."""
    inverse_frequencies: torch.Tensor | None = None
    attend: mass.Attention = mass.attention

    def keys(self, layer: int) -> torch.Tensor:
        return self.all_keys[layer].float()

    def values(self, layer: int) -> torch.Tensor:
        return self.all_values[layer].float()

    def queries(self, layer: int) -> Queries:
        return self.observed[layer]

    def attention(self, layer: int, mode: Mode) -> torch.Tensor:
        keys = Keys(self.keys(layer), self.positions[layer], self.exists[layer])
        return self.attend(self.observed[layer], keys, None, mode, self.rule)

    def reread(self, layer: int) -> torch.Tensor:
        if self.rereading is None:
            raise ValueError("this sequence was not re-read")
        return self.rereading[layer]

    def frequencies(self, layer: int) -> torch.Tensor | None:
        return self.inverse_frequencies
