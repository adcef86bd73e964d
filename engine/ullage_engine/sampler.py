"""From logits to tokens: greedy, or temperature and nucleus sampling with each sequence's own randomness."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ullage_engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token."""

    token: int
    logprob: float | None = None
    """Natural logarithm of its probability before temperature; None when not asked for."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Logits of one position, with what one pass over all rows has found."""

    logits: torch.Tensor
    """[V] float32."""
    peak: float
    """The greatest; NaN where any is NaN."""
    likeliest: int

    @property
    def finite(self) -> bool:
        """Whether something can be chosen: one look is enough, as the greatest of numbers with a NaN among them is NaN,
        and -inf everywhere leaves -inf."""
        return math.isfinite(self.peak)


def rows_of(logits: torch.Tensor) -> list[Row]:
    """The rows of logits [n, V]."""
    if not len(logits):
        return []
    peaks, likeliest = logits.max(-1)
    return [Row(*row) for row in zip(logits, peaks.tolist(), likeliest.tolist(), strict=True)]


def sample(row: Row, params: SamplingParams, generator: torch.Generator | None) -> Sampled | None:
    """Choose one token; None where the model gave NaN or infinity, from which nothing can be chosen."""
    if not row.finite:
        return None
    greedy = params.temperature == 0
    token = row.likeliest if greedy else draw(distribution(row.logits, params), generator)
    return described(row, token, params)


def described(row: Row, token: int, params: SamplingParams) -> Sampled:
    """A chosen token with the log probabilities asked for."""
    if params.logprobs is None:
        return Sampled(token)
    logprobs = row.logits.float().log_softmax(-1)
    values, indices = logprobs.topk(min(params.logprobs, row.logits.numel()))
    top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] float64 probabilities of finite logits [V], after a temperature above 0 and top-p."""
    # double, and the peak moved to 0 first: tiny temperatures then sharpen instead of overflowing
    probs = ((logits.double() - logits.double().max()) / params.temperature).softmax(-1)
    if params.top_p >= 1.0:
        return probs
    ordered, indices = probs.sort(descending=True)
    # a token stays when the mass before it is below top_p, so the likeliest always does
    kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= params.top_p, 0.0)
    return torch.zeros_like(probs).scatter_(0, indices, kept / kept.sum())


def draw(weights: torch.Tensor, generator: torch.Generator | None) -> int:
    """One index of weights [V] of a sum above 0, with a chance in proportion."""
    return int(torch.multinomial(weights, 1, generator=generator))
