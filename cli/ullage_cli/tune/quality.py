"""How far two caches' predictions are apart, from what an engine's public API tells: the likeliest tokens. Pure.

KL is the Kullback-Leibler divergence from the reference's prediction in nats, over the tokens that both list; all
others are taken as one, which makes the figure a lower bound of the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Prediction = Mapping[str, float]
"""Log probabilities of the likeliest tokens."""
TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One cache beside the reference."""

    kl: float
    """Mean over positions."""
    worst: float
    """Greatest of any position."""
    top1: float
    """Share of positions with the same likeliest token."""
    positions: int


def divergence(reference: Prediction, other: Prediction) -> float:
    """KL at one position."""
    shared = reference.keys() & other.keys()
    p_known = sum(math.exp(reference[token]) for token in shared)
    q_known = sum(math.exp(other[token]) for token in shared)
    total = sum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    p_rest, q_rest = max(TINY, 1 - p_known), max(TINY, 1 - q_known)
    return max(0.0, total + p_rest * math.log(p_rest / q_rest))


def compare(reference: Sequence[Prediction], other: Sequence[Prediction]) -> Quality:
    """Over all positions, which are the same in both."""
    found = [divergence(p, q) for p, q in zip(reference, other, strict=True)]
    same = [max(p, key=lambda t: p[t]) == max(q, key=lambda t: q[t]) for p, q in zip(reference, other, strict=True)]
    return Quality(kl=sum(found) / len(found), worst=max(found), top1=sum(same) / len(same), positions=len(found))
