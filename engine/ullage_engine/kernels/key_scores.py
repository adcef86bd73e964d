"""How much attention each cached key gets from some queries: what eviction policies rank by.

A second pass over the keys with the log-sum-exp of a first: p = exp(logit - lse) is the true probability over all
that a query saw, even where the table given holds only part of it.
"""

from __future__ import annotations

from typing import Literal

import torch

from ullage_engine.kernels.attend import blank
from ullage_engine.kernels.tables import Tables
from ullage_engine.kernels.view import LayerView

LOGITS = 1 << 24
"""Numbers that the reference's matrix of logits may have."""
Mode = Literal["max", "sum", "entropy"]


def reference(
    view: LayerView,
    tables: Tables,
    queries: torch.Tensor,
    positions: torch.Tensor,
    lse: torch.Tensor,
    mode: Mode,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Scores of all rows of the tables.

    Args:
        tables: sequences; of block tables `rows` are the rows to score, and a query sees those not after it.
            `at` and `positions` are not looked at.
        queries: [N, W, Hq, D] after RoPE.
        positions: [N, W] int64 of the queries; -1: not a query.
        lse: [N, W, Hq] float32 of each query over all it saw, as attention gave it.
        mode: over a row's probabilities p of all queries, `max` the greatest, `sum` their sum, `entropy` the sum of
            -p log p.
        scaling, window, softcap: as they were in attention.

    Returns:
        [N, kv_heads, B * block_tokens] float32, averaged over the query heads of each KV head; 0 where there is no
        row or no query saw it.
    """
    size, heads = view.block_tokens, view.kv_heads
    scores = torch.zeros((len(tables.at), heads, tables.blocks * size), dtype=torch.float32, device=queries.device)
    per_run = max(1, LOGITS // (queries.shape[1] * queries.shape[2] * size))
    for n in range(len(tables.at)):
        for first in range(0, tables.blocks, per_run):
            run = tables.pick(slice(n, n + 1), slice(first, first + per_run))
            some = slice(first * size, (first + run.blocks) * size)
            existing = tables.pick(slice(n, n + 1), slice(None)).existing(size, 1)[0, :, some]
            if not existing.any():
                continue
            keys = run.read(view)[0].values(torch.float32)[0]
            blank(keys.unsqueeze(0), existing.unsqueeze(0), 0)
            seen = _seen(run, size, positions[n], window) & existing[:, None]
            logits = _logits(keys, queries[n], scaling, softcap)
            scores[n, :, some] = _reduced(logits, lse[n], seen, mode)
    return scores


def _seen(run: Tables, size: int, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[1 or H, W, S] bool: which rows are not after each query, nor out of its window."""
    if not window and not run.causal:
        return (positions >= 0)[None, :, None]
    distance = positions[None, :, None] - run.row_positions(size)[0].unsqueeze(1)
    seen = (distance >= 0) & (positions >= 0)[None, :, None]
    return seen & (distance < window) if window else seen


def _logits(keys: torch.Tensor, queries: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """[H, G, W, S] of keys [H, S, D] and queries [W, Hq, D]."""
    steps, _, size = queries.shape
    grouped = queries.float().transpose(0, 1).reshape(keys.shape[0], -1, steps, size) * scaling
    logits = grouped @ keys.transpose(-1, -2).unsqueeze(1)
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _reduced(logits: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, mode: Mode) -> torch.Tensor:
    """[H, S] of logits [H, G, W, S], lse [W, Hq] and seen [1 or H, W, S]."""
    total = lse.T.reshape(*logits.shape[:3], 1)
    unseen = ~seen.unsqueeze(1) | (total == float("-inf"))
    logs = (logits - total).masked_fill(unseen, float("-inf"))
    chances = logs.exp()
    if mode == "max":
        reduced = chances.amax(2)
    elif mode == "sum":
        reduced = chances.sum(2)
    else:
        reduced = -(chances * logs.masked_fill(unseen, 0.0)).sum(2)
    scores: torch.Tensor = reduced.mean(1)
    return scores
