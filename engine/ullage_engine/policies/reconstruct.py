"""Keys that a repeat of the context needs stay (after Kim et al., KVzip, arXiv:2505.23416).

Whoever can recite a context from what is left of its cache can answer any question about it, so the model is made to
re-read the context. A query that gives a row the probability p loses about p v of its head's output when the row goes,
v being the row's value; the score is the square of that loss, summed over all queries. KVzip ranks by the greatest p
alone: it keeps what one query needs just as well, and forgets what many queries need a little, which a sum of p would
let win over everything (docs/adr/0009).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, SequenceView, by_layer


@dataclass(frozen=True, slots=True)
class Reconstruct:
    """Score: squared attention in the re-reading, times the square of the value's norm."""

    name: str = "reconstruct"
    needs: Needs = Needs.REREADING

    def score(self, view: SequenceView) -> torch.Tensor:
        return by_layer(view, [self._layer(view, layer) for layer in range(view.exists.shape[0])])

    def _layer(self, view: SequenceView, layer: int) -> torch.Tensor:
        return view.reread(layer) * view.values(layer).square().sum(-1)
