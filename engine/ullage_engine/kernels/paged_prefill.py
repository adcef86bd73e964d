"""Attention of chunks of queries over cached rows, the chunks' own among them: prefill, and verification of drafts.

A chunk's keys and values are written to the cache before, so the past and the chunk are one table, and causality is
a matter of rows: query i of a sequence sees i rows more than its first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ullage_engine.kernels import launch, merge
from ullage_engine.kernels.attend import attend, attend_values, blank, finite
from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.tables import BlockTables, Chunks, Tables
from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.view import LayerView

LOGITS = 1 << 24
"""Numbers that the reference's matrix of logits may have, where it is built."""
Reader = Callable[[LayerView, torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""Dequantised keys and values [N, kv_heads, B * block_tokens, head_size] of blocks [N, B] int64."""


def read_values(view: LayerView, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The `Reader` in torch."""
    keys, values = view.of_blocks(blocks)
    return keys.values(dtype), values.values(dtype)


def reference(
    view: LayerView,
    chunks: Chunks,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend, into the places of the chunks in `out` and `lse`; other places are left alone.

    Args are as `paged_decode.reference` has them, but for the chunks.
    """
    attend_chunks = partial(_attend_chunks, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    attend_chunks(read_values, view, chunks, query, out, lse)


def kernel(
    view: LayerView,
    chunks: Chunks,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`reference`, with rows read once for some queries; positions of block tables ascend.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    launch.attend(
        view, chunks.tables, chunks, query, out, lse, scaling=scaling, window=window, softcap=softcap, sinks=sinks
    )


def builds(serving: Serving, target: Target) -> list[Build]:
    """Chunks of a prompt over all their rows, and a few drafts in splits."""
    return [
        *launch.builds("paged_prefill", serving, target, (launch.PLAIN, launch.RICH), longest=512, split=False),
        *launch.builds("paged_prefill/verify", serving, target, (launch.RICH_CELLS,), longest=5, split=True),
    ]


def reading_with(reader: Reader) -> Callable[..., None]:
    """`reference` with another way of gathering and dequantising."""
    return partial(_attend_chunks, reader)


def _attend_chunks(
    reader: Reader,
    view: LayerView,
    chunks: Chunks,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    size = view.block_tokens
    tables = chunks.tables
    for n, (at, count) in enumerate(zip(tables.at.tolist(), chunks.counts.tolist(), strict=True)):
        least = int(tables.rows[n].min())
        most = int(tables.rows[n].max()) + (count - 1 if isinstance(tables, BlockTables) else 0)
        one = tables.pick(slice(n, n + 1), slice(max(1, -(-most // size))))
        queries = query[at : at + count].transpose(0, 1).unsqueeze(0)
        if lse is None and least > 0 and not softcap and sinks is None and isinstance(one, BlockTables):
            existing = one.existing(size, count)
            keys, values = (blank(rows, existing, most) for rows in reader(view, one.tables, query.dtype))
            result = attend_values(queries, keys, values, one.visible(size, count, window), scaling)
        else:
            step = partial(attend, scaling=scaling, softcap=softcap)
            result, logs = _streamed(view, one, queries, least, window, sinks, step)
            if lse is not None:
                lse[at : at + count] = logs[0].T.float()
        out[at : at + count] = result[0].transpose(0, 1).to(out.dtype)


def _streamed(
    view: LayerView,
    one: Tables,
    queries: torch.Tensor,
    least: int,
    window: int | None,
    sinks: torch.Tensor | None,
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [1, Hq, Q, D] and log-sum-exps [1, Hq, Q] of one sequence, some of its rows at a time."""
    heads, count = queries.shape[1:3]
    size = view.block_tokens
    visible, existing = one.visible(size, count, window), one.existing(size, count)
    blocks = max(1, LOGITS // (heads * count * size))
    parts: list[torch.Tensor] = []
    logs: list[torch.Tensor] = []
    for first in range(0, one.blocks, blocks):
        some = slice(first * size, (first + blocks) * size)
        sections = one.pick(slice(None), slice(first, first + blocks)).read(view)
        keys, values = (finite(section, existing[..., some], max(0, least - first * size)) for section in sections)
        result, log = step(queries, keys, values, visible[..., some], sinks=None if first else sinks)
        parts.append(result.flatten(0, 1).transpose(0, 1))
        logs.append(log.flatten(0, 1).T)
    out, lse = torch.empty_like(parts[0]), torch.empty_like(logs[0])
    merge.reference(torch.stack(parts), torch.stack(logs), torch.arange(count, device=out.device), out, lse)
    return out.transpose(0, 1).unsqueeze(0), lse.T.unsqueeze(0)
