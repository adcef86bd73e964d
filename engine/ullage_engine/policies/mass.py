"""How much attention queries pay to keys, in plain torch: `kernels.key_scores` for rows of any layout.

p = exp(logit - lse), with the log-sum-exp of each query over all that it sees. Everything goes by tiles of queries, so
that no more than `TILE` logits exist at a time whatever the context is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ullage_engine.policies.base import Mode, Queries

TILE = 1 << 19
"""Logits of one tile (float32): as many as a core's cache holds, and enough for a matrix product to pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a layer's attention makes logits, and what it lets a query see."""

    scaling: float
    window: int | None = None
    """Keys at this distance or farther are not seen; None: all are."""
    softcap: float | None = None
    """Logits are squashed to `softcap * tanh(logits / softcap)`; None: they are not."""


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """Keys of one layer."""

    vectors: torch.Tensor
    """[H, R, D] after RoPE; finite everywhere."""
    positions: torch.Tensor
    """[H, R]; a query sees keys that are not after it."""
    exists: torch.Tensor
    """[H, R] bool."""


Attention: TypeAlias = Callable[[Queries, Keys, torch.Tensor | None, Mode, Rule], torch.Tensor]
"""What computes `attention`: that function, or `kernels.cpu.CpuKernels.attention`."""


def log_sum_exp(queries: Queries, keys: Keys, rule: Rule) -> torch.Tensor:
    """[W, Hq] natural log of each query's sum of exp(logits) over the keys it sees; -inf where it sees none."""
    parts = [logits.logsumexp(-1) for _, logits in _tiles(queries, keys, rule)]
    return torch.cat(parts, 2).flatten(0, 1).T  # [H, G, W] -> [W, Hq]


def attention(queries: Queries, keys: Keys, lse: torch.Tensor | None, mode: Mode, rule: Rule) -> torch.Tensor:
    """[H, R] of the queries' probabilities of each key (`Mode`).

    Args:
        lse: [W, Hq] of each query over all that it saw; None: it saw no more than these keys, and one pass does.
    """
    heads, rows = keys.exists.shape
    found = torch.zeros((heads, queries.vectors.shape[1] // heads, rows), device=keys.vectors.device)
    for at, logits in _tiles(queries, keys, rule):
        total = logits.logsumexp(-1, keepdim=True) if lse is None else lse[at].T.reshape(*logits.shape[:3], 1)
        # a query that saw nothing has a total of -inf, and gives nothing
        logs = logits.sub_(total.masked_fill(total == float("-inf"), 0.0))
        if mode == "square":
            found += logs.mul_(2).exp_().sum(2)
        elif mode == "sum":
            found += logs.exp_().sum(2)
        else:
            chances = logs.exp()
            found -= torch.where(chances > 0, chances * logs, 0.0).sum(2)
    return found.mean(1)


def visible_logits(queries: Queries, keys: Keys, head: int, rule: Rule) -> torch.Tensor:
    """[G * W, R] float32 of one KV head and the query heads of its group; -inf where a query does not see a key."""
    group = queries.vectors.shape[1] // keys.exists.shape[0]
    some = queries.vectors[:, head * group : (head + 1) * group].float().transpose(0, 1)
    logits = _capped((some * rule.scaling) @ keys.vectors[head].float().T, rule)
    own = slice(head, head + 1)
    hidden = ~_seen(queries.positions, Keys(keys.vectors[own], keys.positions[own], keys.exists[own]), rule)
    if hidden.any():  # seldom: who reads again comes after all rows
        logits.masked_fill_(hidden, float("-inf"))
    return logits.flatten(0, 1)


def _tiles(queries: Queries, keys: Keys, rule: Rule) -> Iterator[tuple[slice, torch.Tensor]]:
    """Logits [H, G, some of W, R] float32, -inf where a query does not see a key, and which queries those are."""
    steps, query_heads, size = queries.vectors.shape
    heads, rows = keys.exists.shape
    per_tile = max(1, TILE // (query_heads * rows))
    transposed = keys.vectors.float().transpose(-1, -2).unsqueeze(1)  # [H, 1, D, R]
    for first in range(0, steps, per_tile):
        at = slice(first, min(first + per_tile, steps))
        some = queries.vectors[at].float().transpose(0, 1).reshape(heads, -1, at.stop - at.start, size)
        logits = _capped((some * rule.scaling) @ transposed, rule)
        seen = _seen(queries.positions[at], keys, rule)
        yield at, logits.masked_fill_(~seen.unsqueeze(1), float("-inf"))


def _capped(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    return rule.softcap * torch.tanh(logits / rule.softcap) if rule.softcap else logits


def _seen(positions: torch.Tensor, keys: Keys, rule: Rule) -> torch.Tensor:
    """[H, W, R] bool."""
    distance = positions[None, :, None] - keys.positions.unsqueeze(1)
    seen = (distance >= 0) & keys.exists.unsqueeze(1)
    return seen & (distance < rule.window) if rule.window else seen
