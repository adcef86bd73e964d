"""Attention of one query token a sequence over its cached rows, with dequantisation in the same pass."""

from __future__ import annotations

import torch

from ullage_engine.kernels import launch
from ullage_engine.kernels.attend import attend, attend_values, finite
from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.tables import BlockTables, Tables
from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.view import LayerView

GROUP_TOKENS = 16_384
"""Cached rows that the reference gathers at once, padding included: bounds its workspace."""


def reference(
    view: LayerView,
    tables: Tables,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend, into the places `tables.at` of `out` and `lse`; other places are left alone.

    Args:
        query: [T, Hq, D] of the packed tokens, Hq a multiple of the view's KV heads.
        out: [T, Hq, D] of the query's dtype or float32.
        lse: [T, Hq] float32 for the natural log of the sum of exp(logits), sinks included; None: not wanted.
            A sequence without rows gets out 0 and lse -inf (its sink's logit, if there is one).
        window: keys at this distance or farther are not seen; None or 0: no limit.
        softcap: logits are squashed to `softcap * tanh(logits / softcap)`; None or 0: not.
        sinks: [Hq] float32 logits of a key per head that has no value; None: there is none.
    """
    size = view.block_tokens
    for part in alike(tables, size):
        least = int(part.rows.min())
        existing, visible = part.existing(size, 1), part.visible(size, 1, window)
        keys, values = (finite(section, existing, least) for section in part.read(view))
        queries = query[part.at].unsqueeze(2)
        plain = lse is None and least > 0 and not softcap and sinks is None and isinstance(part, BlockTables)
        if plain and (not view.kind.quantised or view.groups > 1):
            dtype = query.dtype
            result = attend_values(queries, keys.values(dtype), values.values(dtype), visible, scaling)
        else:
            result, logs = attend(queries, keys, values, visible, scaling=scaling, softcap=softcap, sinks=sinks)
            if lse is not None:
                lse[part.at] = logs.squeeze(2).float()
        out[part.at] = result.squeeze(2).to(out.dtype)


def kernel(
    view: LayerView,
    tables: Tables,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """`reference`, with each row read once and its bytes dequantised on the way; positions of block tables ascend.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    launch.attend(view, tables, None, query, out, lse, scaling=scaling, window=window, softcap=softcap, sinks=sinks)


def builds(serving: Serving, target: Target) -> list[Build]:
    """Attention in splits."""
    variants = (launch.PLAIN, launch.RICH, launch.RICH_CELLS)
    return launch.builds("paged_decode", serving, target, variants, longest=1, split=True)


def alike(tables: Tables, block_tokens: int) -> list[Tables]:
    """The sequences in groups whose width is below twice anyone's own, and whose workspace is bounded."""
    rows = tables.rows if tables.rows.dim() == 1 else tables.rows.amax(1)
    widths = [max(1, -(-count // block_tokens)) for count in rows.tolist()]
    buckets: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        buckets.setdefault((width - 1).bit_length(), []).append(index)
    groups: list[Tables] = []
    for members in buckets.values():
        widest = max(widths[index] for index in members)
        limit = max(1, GROUP_TOKENS // (block_tokens * widest))
        for first in range(0, len(members), limit):
            chosen = members[first : first + limit]
            whole = len(chosen) == len(widths)
            which = slice(None) if whole else torch.tensor(chosen, device=rows.device)
            groups.append(tables.pick(which, slice(widest)))
    return groups
