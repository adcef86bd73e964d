"""Keys that many of the last queries attend to in part stay: their share in the entropy of attention.

Of a query's attention p over the keys, key i contributes -p_i log p_i to its entropy. That is 0 for a key that gets
nothing and also for a key that gets *everything*, and greatest at p = 1/e: keys that spread attention leans on are
kept, keys that one query needs alone are not. See docs/eviction.md for what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, SequenceView, by_layer


@dataclass(frozen=True, slots=True)
class Entropy:
    """Score: sum of -p log p under the observed queries."""

    name: str = "entropy"
    needs: Needs = Needs.QUERIES

    def score(self, view: SequenceView) -> torch.Tensor:
        return by_layer(view, [view.attention(layer, "entropy") for layer in range(view.exists.shape[0])])
