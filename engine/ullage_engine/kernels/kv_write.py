"""Quantise on write: keys and values of some tokens into their slots of one layer."""

from __future__ import annotations

import torch

from ullage_engine.kernels.view import LayerView
from ullage_engine.quant import quantise


def reference(
    view: LayerView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None
) -> None:
    """Store rows in the cache's type, scales beside codes.

    Args:
        slots: [T] int64, `block * block_tokens + offset`, all different.
        keys, values: [T, kv_heads, head_size], keys after RoPE.
        centre: [kv_heads, head_size] float32 taken from the keys first; None: nothing is.
    """
    block, offset = slots // view.block_tokens, slots % view.block_tokens
    keys = keys if centre is None else keys - centre
    for rows, at, scales_at in ((keys, view.k_codes, view.k_scales), (values, view.v_codes, view.v_scales)):
        codes, scales = quantise(rows, view.kind, view.group)
        target = view.codes(at)
        target[block, :, offset] = codes.view(target.dtype)
        if scales is not None:
            view.scales(scales_at)[block, :, offset] = scales
