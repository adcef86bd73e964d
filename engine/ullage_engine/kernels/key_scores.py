"""How much attention each cached key gets from some queries: what eviction policies rank by.

A second pass over the keys with the log-sum-exp of a first: p = exp(logit - lse) is the true probability over all
that a query saw, even where the table given holds only part of it.
"""

from __future__ import annotations

from typing import Literal

import torch

from ullage_engine.kernels import launch, tuning
from ullage_engine.kernels.attend import blank
from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, target_of
from ullage_engine.kernels.tables import Tables, addresses, check_tables
from ullage_engine.kernels.targets import INTERPRETER, Target
from ullage_engine.kernels.view import LayerView

LOGITS = 1 << 24
"""Numbers that the reference's matrix of logits may have."""
Mode = Literal["square", "sum", "entropy"]


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
        mode: over a row's probabilities p of all queries: the sum of p squared (`square`), of p (`sum`) or of -p log p
            (`entropy`), averaged over the query heads of its KV head.
        scaling, window, softcap: as they were in attention.

    Returns:
        [N, kv_heads, B * block_tokens] float32; 0 where there is no row or no query saw it.
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


def kernel(
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
    """`reference`, with each key read once.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    target = target_of(view.data)
    launch.check_view(view)
    check_tables(view, tables, window)
    queries, positions, lse = queries.contiguous(), positions.contiguous(), lse.contiguous()
    _check(view, tables, queries, positions, lse)
    scores = torch.empty((len(tables.at), view.kv_heads, tables.blocks * view.block_tokens), device=queries.device)
    steps = queries.shape[1]
    if not scores.numel() or not steps:
        return scores.zero_()
    tile = _tile(view, target)
    found, strides = addresses(tables, window)
    from ullage_engine.kernels.device.key_scores import score

    score[(len(tables.at) * view.kv_heads, -(-scores.shape[2] // tile.rows))](
        view.data, queries, positions, lse, scores, *found, scaling, softcap or 0.0,
        window or 0, tables.blocks, steps, *strides, view.block_bytes, view.layer_offset,
        **launch.view_constants(view, target), REPEAT=queries.shape[2] // view.kv_heads,
        CELLS=not tables.causal, WINDOW=bool(window), SOFTCAP=bool(softcap), MODE=mode,
        QUERIES=tile.queries, TILE=tile.rows, **launch.options(tile, target),
    )  # fmt: skip
    return scores


def builds(serving: Serving, target: Target) -> list[Build]:
    """Over blocks, and over cells with window and soft cap; the sum is an entropy with less to do."""
    from ullage_engine.kernels.device.key_scores import score

    view, tile = serving.view, _tile(serving.view, target)
    arguments = {
        "data_ptr": "*u8:16", "queries_ptr": f"*{launch.TYPES[serving.element]}:16", "query_positions_ptr": "*i64:16",
        "lse_ptr": "*fp32:16", "scores_ptr": "*fp32:16", "table_ptr": "*i64:16", "rows_ptr": "*i64:16",
        "scaling": "fp32", "softcap": "fp32", "window": "i32", "width": "i32", "queries": "i32",
        **launch.TABLE_STRIDES,
        "block_bytes": "i64:16", "layer_offset": "i64:16",
    }  # fmt: skip
    found = []
    for cells, mode in ((False, "square"), (True, "entropy")):
        constants = {
            **launch.view_constants(view, target), "REPEAT": serving.queries, "CELLS": cells, "WINDOW": cells,
            "SOFTCAP": cells, "MODE": mode, "QUERIES": tile.queries, "TILE": tile.rows,
        }  # fmt: skip
        starts = {"starts_ptr": "*i32:16" if cells else "*i64:16"}
        label = f"key_scores/{mode}/{'cells/window, soft cap' if cells else 'blocks'}"
        limit = launch.register_limit(target)
        found.append(Build(label, score, {**arguments, **starts}, constants, tile.warps, tile.stages, limit))
    return found


def _tile(view: LayerView, target: Target) -> tuning.Tile:
    """A program's rows stay in registers while all queries pass by, of which float32 leaves room for fewer."""
    if target is INTERPRETER:
        return tuning.Tile(64, 256, 4, 1)
    return tuning.Tile(16 if target.backend == "hip" or view.kind.name == "fp32" else 32, 32, 4, 1)


def _check(view: LayerView, tables: Tables, queries: torch.Tensor, positions: torch.Tensor, lse: torch.Tensor) -> None:
    device, count = view.data.device, len(tables.at)
    fits = queries.dim() == 4 and queries.shape[0] == count and queries.shape[3] == view.head_size
    fits = fits and queries.shape[2] % view.kv_heads == 0 and queries.dtype in launch.TYPES
    wanted = f"queries must be [{count}, W, a multiple of {view.kv_heads}, {view.head_size}] on {device}"
    require(fits and queries.device == device, wanted, queries)
    shape = tuple(queries.shape[:3])
    fits = positions.shape == shape[:2] and positions.dtype == torch.int64 and positions.device == device
    require(fits, f"positions must be {shape[:2]} of int64 on {device}", positions)
    fits = lse.shape == shape and lse.dtype == torch.float32 and lse.device == device
    require(fits, f"lse must be {shape} of float32 on {device}", lse)


def _seen(run: Tables, size: int, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[1 or H, W, S] bool: which rows are not after each query, nor out of its window."""
    seen = (positions >= 0)[None, :, None]
    if window or run.causal:
        distance = positions[None, :, None] - run.row_positions(size)[0].unsqueeze(1)
        seen = seen & (distance >= 0) if run.causal else seen
        seen = seen & (distance < window) if window else seen
    return seen


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
    if mode == "entropy":
        chances = -chances * logs.masked_fill(unseen, 0.0)
    elif mode == "square":
        chances = chances.square()
    return chances.sum(2).mean(1)
