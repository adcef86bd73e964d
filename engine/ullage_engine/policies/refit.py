"""Values of what stays, changed so that heads go on saying what they said (dropped rows took a part of it with them).

What a head put out for some queries before the cut is known, and what it would put out now. The difference is shared
out among the values of surviving rows, by the least change that makes it up: ridge regression in its dual form, whose
size is that of the queries and not that of the context. Keys and protected rows stay as they are. Queries are a sample
of those of a re-reading: they look for everything that the context holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Queries
from ullage_engine.policies.mass import Keys, Rule, visible_logits

RIDGE = 0.1
"""Weight of the change itself, as a share of what the queries' mean square attention weighs (docs/adr/0010)."""
VECTORS = 512
"""Query vectors of a KV head, of all heads of its group, that a sample has about."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Of one layer, [H, R] bool: rows that stay, and of these the ones whose values may change."""

    stays: torch.Tensor
    free: torch.Tensor


def refit(queries: Queries, keys: Keys, values: torch.Tensor, part: Part, rule: Rule) -> torch.Tensor:
    """[H, R, D] float32: values that rows get; those of rows that are not free are as they were.

    Args:
        values: [H, R, D] float32, finite everywhere.
    """
    fitted = values.clone()
    for head in range(values.shape[0]):
        if not part.free[head].any():
            continue
        logits, staying = visible_logits(queries, keys, head, rule), part.stays[head].nonzero()[:, 0]
        chances = _chances(logits[:, staying])
        lost = _chances(logits) @ values[head] - chances @ values[head, staying]
        weights = chances[:, part.free[head, staying]]
        change = weights.T @ _solved(weights @ weights.T, lost)
        if bool(change.isfinite().all()):
            fitted[head, part.free[head]] += change
    return fitted


def _chances(logits: torch.Tensor) -> torch.Tensor:
    """Their softmax; 0 for a query that sees nothing."""
    chances = logits.softmax(-1)
    chances[chances[:, :1].isnan().flatten()] = 0.0
    return chances


def _solved(gram: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """(gram + ridge)^-1 lost."""
    diagonal = gram.diagonal()
    diagonal += RIDGE * diagonal.mean() + torch.finfo(gram.dtype).tiny
    factor, failed = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_solve(lost, factor) if not int(failed) else torch.full_like(lost, float("nan"))


class Sample:
    """Some of a re-reading's queries, evenly spread; [S, Hq, D] of each layer."""

    def __init__(self, context: int, kv_heads: int) -> None:
        """`context` tokens are read again."""
        self._context = context
        self._kv_heads = kv_heads
        self._vectors: dict[int, list[torch.Tensor]] = {}
        self._positions: dict[int, list[torch.Tensor]] = {}
        self._rules: dict[int, Rule] = {}

    def take(self, layer: int, queries: Queries, rule: Rule) -> None:
        """Note some queries, none of which was given before."""
        group = queries.vectors.shape[1] // self._kv_heads
        chosen = queries.positions % max(1, self._context * group // VECTORS) == 0
        self._vectors.setdefault(layer, []).append(queries.vectors[chosen])
        self._positions.setdefault(layer, []).append(queries.positions[chosen])
        self._rules[layer] = rule

    def of(self, layer: int) -> tuple[Queries, Rule] | None:
        """What was noted of a layer; None: nothing."""
        if layer not in self._rules:
            return None
        return Queries(torch.cat(self._vectors[layer]), torch.cat(self._positions[layer])), self._rules[layer]
