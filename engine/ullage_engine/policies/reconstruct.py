"""Keys that a repeat of the context needs stay (Kim et al., KVzip, arXiv:2505.23416).

Whoever can recite a context from what is left of its cache can answer any question about it, so the model is made to
re-read the context, and each key's score is the *greatest* attention that any of those queries paid to it, times the
size of its value: a digit of a number is read once, by one query head of one group, and must not lose against what is
looked at often or by more heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, SequenceView, by_layer


@dataclass(frozen=True, slots=True)
class Reconstruct:
    """Score: greatest attention in the re-reading, times the norm of the value."""

    name: str = "reconstruct"
    needs: Needs = Needs.REREADING

    def score(self, view: SequenceView) -> torch.Tensor:
        return by_layer(view, [self._layer(view, layer) for layer in range(view.exists.shape[0])])

    def _layer(self, view: SequenceView, layer: int) -> torch.Tensor:
        scores: torch.Tensor = view.reread(layer) * torch.linalg.vector_norm(view.values(layer), dim=-1)
        return scores
