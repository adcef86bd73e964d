"""Keys that queries yet to come are expected to attend to stay (Devoto et al., Expected Attention, arXiv:2510.00636).

Queries of one head are much alike but for their rotation. Taken to be normal with the mean m and covariance C of the
observed ones, exp(q.k) has the mean exp(m.k + k.C.k / 2). Observed queries are turned back to position 0, and their
statistics are turned forward by the average rotation over the next `horizon` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, Queries, SequenceView, by_layer


@dataclass(frozen=True, slots=True)
class Expected:
    """Score: expected probability of the row under a future query, times the norm of its value."""

    scaling: float
    """Of the model's attention."""
    horizon: int = 512
    """Tokens ahead over which rotation is averaged."""
    floor: float = 0.02
    """Added to each probability, so that a value of weight is not lost by a small one."""
    name: str = "expected"
    needs: Needs = Needs.QUERIES

    def score(self, view: SequenceView) -> torch.Tensor:
        return by_layer(view, [self._layer(view, layer) for layer in range(view.exists.shape[0])])

    def _layer(self, view: SequenceView, layer: int) -> torch.Tensor:
        mean, covariance = self._future(view.queries(layer), view.frequencies(layer), view.length)
        keys = view.keys(layer)
        heads, _, size = keys.shape
        mean, covariance = mean.reshape(heads, -1, size), covariance.reshape(heads, -1, size, size)
        logits = torch.einsum("hgd,hrd->hgr", mean, keys) * self.scaling
        logits += torch.einsum("hrd,hgde,hre->hgr", keys, covariance, keys) * (self.scaling**2 / 2)
        logits = logits.masked_fill(~view.exists[layer].unsqueeze(1), float("-inf"))
        chances = logits.softmax(-1).nan_to_num(0.0).mean(1)
        scores: torch.Tensor = (chances + self.floor) * torch.linalg.vector_norm(view.values(layer), dim=-1)
        return scores

    def _future(
        self, queries: Queries, frequencies: torch.Tensor | None, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [Hq, D] and covariance [Hq, D, D] of queries at the positions to come."""
        vectors = queries.vectors.float()
        if frequencies is None:
            return _statistics(vectors)
        size = vectors.shape[-1]
        back = rotations(-queries.positions[:, None] * frequencies.double(), size)  # [W, D, D]
        mean, covariance = _statistics(torch.einsum("wde,whe->whd", back, vectors))
        ahead = torch.arange(length, length + self.horizon, device=vectors.device)
        forward = rotations(ahead[:, None] * frequencies.double(), size).mean(0)
        return mean @ forward.T, forward @ covariance @ forward.T


def rotations(angles: torch.Tensor, size: int) -> torch.Tensor:
    """[N, size, size] float32 matrices of RoPE by angles [N, P]: pair (i, i + P) turns by its own, the rest stays."""
    count, pairs = angles.shape
    cosine, sine = angles.cos().float(), angles.sin().float()
    matrix = torch.eye(size, device=angles.device).repeat(count, 1, 1)
    low = torch.arange(pairs, device=angles.device)
    high = low + pairs
    matrix[:, low, low] = matrix[:, high, high] = cosine
    matrix[:, low, high], matrix[:, high, low] = -sine, sine
    return matrix


def _statistics(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [Hq, D] and covariance [Hq, D, D] of [W, Hq, D]."""
    mean = vectors.mean(0)
    apart = vectors - mean
    return mean, torch.einsum("whd,whe->hde", apart, apart) / max(1, vectors.shape[0] - 1)
