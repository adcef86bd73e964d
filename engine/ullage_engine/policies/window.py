"""Keys that the last queries attend to stay, weighted by how much their values weigh.

SnapKV (Li et al., arXiv:2404.14469): the attention of an observation window says what the answer will need, and the
neighbours of a wanted token are wanted too. Value norms: Guo et al., arXiv:2406.12335. It works as far as the window
asks what will be asked: at its best when the question has been read, poor when it has not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ullage_engine.policies.base import Needs, SequenceView, by_layer


@dataclass(frozen=True, slots=True)
class Window:
    """Score: attention mass under the observed queries, spread over neighbours, times the norm of the value."""

    neighbours: int = 2
    """Rows on either side of a row whose mass counts for it too, where it is greater."""
    name: str = "window"
    needs: Needs = Needs.QUERIES

    def score(self, view: SequenceView) -> torch.Tensor:
        return by_layer(view, [self._layer(view, layer) for layer in range(view.exists.shape[0])])

    def _layer(self, view: SequenceView, layer: int) -> torch.Tensor:
        mass = view.attention(layer, "sum")
        spread = functional.max_pool1d(mass.unsqueeze(0), 2 * self.neighbours + 1, 1, self.neighbours)[0]
        scores: torch.Tensor = spread * torch.linalg.vector_norm(view.values(layer), dim=-1)
        return scores
