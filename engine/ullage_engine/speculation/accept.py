"""Whether a drafted token stands: pure decisions over the model's logits.

A draft that was certain (n-gram lookup, a greedy draft model) stands when the model's own choice, drawn as it would be
without speculation and from the same random numbers, is that token. The answer is then what it would have been without
speculation, whatever was drafted. For a certain draft that is rejection sampling: the token stands with the model's
probability of it, and what replaces it has the distribution that remains.

A draft drawn from probabilities q stands with probability min(1, p / q), else its replacement is drawn from what p has
more than q: max(0, p - q), normalised. Either way tokens have the model's distribution p, temperature and top-p
included. Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023),
appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.request import SamplingParams
from ullage_engine.sampler import Row, Sampled, described, distribution, draw, sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows at one position."""

    chosen: Sampled | None
    """None where the logits are not finite."""
    accepted: bool
    """Whether it is the drafted token, so that the next position's logits count too."""


def judge(
    row: Row,
    draft: int | None,
    proposed: torch.Tensor | None,
    params: SamplingParams,
    generator: torch.Generator | None,
) -> Verdict:
    """Choose the token of one position.

    Args:
        row: the model's logits given all tokens before, drafted ones included.
        draft: the token drafted for this position; None after the last one.
        proposed: [V] float64 what the draft was drawn from; None: it was certain.
    """
    if draft is None or proposed is None or params.temperature == 0 or not row.finite:
        chosen = sample(row, params, generator)
        return Verdict(chosen, chosen is not None and chosen.token == draft)
    token = _rejection(distribution(row.logits, params), proposed, draft, generator)
    return Verdict(described(row, token, params), token == draft)


def _rejection(target: torch.Tensor, proposed: torch.Tensor, draft: int, generator: torch.Generator | None) -> int:
    """The draft or its replacement; both distributions [V] sum to 1."""
    chance = torch.rand((), dtype=torch.float64, generator=generator)
    if chance * proposed[draft] < target[draft]:
        return draft
    rest = (target - proposed).clamp_min(0.0)
    # equal distributions reject by rounding only, and leave nothing to draw from
    return draw(rest, generator) if bool(rest.sum() > 0) else draft
