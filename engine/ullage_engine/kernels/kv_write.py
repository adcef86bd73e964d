"""Quantise on write: keys and values of some tokens into their slots of one layer."""

from __future__ import annotations

from typing import Any

import torch

from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, require_indices, rows_of, target_of
from ullage_engine.kernels.targets import Target, side
from ullage_engine.kernels.view import LayerView
from ullage_engine.quant import quantise

THREAD = 8
"""Elements of keys, and as many of values, that one thread writes: sixteen bytes of bfloat16. With twice as many, ptxas
spills around the divisions on some targets."""
INPUTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def reference(
    view: LayerView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None
) -> None:
    """Store rows in the cache's type, scales beside codes.

    Args:
        slots: [T] int64, `block * block_tokens + offset`, all different; the rows of negative ones are not stored,
            so that a batch can be padded.
        keys, values: [T, kv_heads, head_size], keys after RoPE.
        centre: [kv_heads, head_size] float32 taken from the keys first; None: nothing is.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        slots, keys, values = slots[kept], keys[kept], values[kept]
    block, offset = slots // view.block_tokens, slots % view.block_tokens
    keys = keys if centre is None else keys - centre
    for rows, at, scales_at in ((keys, view.k_codes, view.k_scales), (values, view.v_codes, view.v_scales)):
        codes, scales = quantise(rows, view.kind, view.group)
        target = view.codes(at)
        target[block, :, offset] = codes.view(target.dtype)
        if scales is not None:
            view.scales(scales_at)[block, :, offset] = scales


def kernel(
    view: LayerView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None
) -> None:
    """`reference` in one pass over the rows; bytes are the same.

    Raises:
        ValueError: shapes, types or devices that do not fit, or too many rows for one call.
    """
    target = target_of(view.data)
    keys, values = rows_of(keys), rows_of(values)
    _check(view, slots, keys, values, centre)
    constants = _constants(view, target)
    rows = slots.numel() * constants["HEADS"] * constants["GROUPS"]
    if not rows:
        return
    from ullage_engine.kernels.device.kv_write import write

    write[(-(-rows // constants["ROWS"]),)](
        view.data, slots, keys, values, centre, slots.numel(), view.block_bytes, view.layer_offset,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), **constants, num_warps=_warps(target),
    )  # fmt: skip


def builds(serving: Serving, target: Target) -> list[Build]:
    """With and without a centre."""
    from ullage_engine.kernels.device.kv_write import write

    element = INPUTS[serving.element]
    strides = {f"{of}_{step}_stride": "i64:16" for of in ("key", "value") for step in ("token", "head")}
    arguments = {
        "data_ptr": "*u8:16", "slots_ptr": "*i64:16", "keys_ptr": f"*{element}:16", "values_ptr": f"*{element}:16",
        "tokens": "i32", "block_bytes": "i64:16", "layer_offset": "i64:16", **strides,
    }  # fmt: skip
    constants = _constants(serving.view, target)
    return [
        Build("kv_write", write, arguments, {**constants, "centre_ptr": None}, _warps(target)),
        Build("kv_write/centred", write, {**arguments, "centre_ptr": "*fp32:16"}, constants, _warps(target)),
    ]


def _warps(target: Target) -> int:
    return min(8, target.tile // (THREAD * target.warp_size))


def _constants(view: LayerView, target: Target) -> dict[str, Any]:
    # without scales nothing sets a group of channels apart, and a row is a whole head
    group = view.group if view.kind.quantised else view.head_size
    columns = side(group)
    return {
        "HEADS": view.kv_heads,
        "GROUPS": view.head_size // group,
        "GROUP": group,
        "BLOCK_TOKENS": view.block_tokens,
        "CELL_BYTES": view.cell_bytes,
        "K_CODES": view.k_codes,
        "K_SCALES": view.k_scales,
        "V_CODES": view.v_codes,
        "V_SCALES": view.v_scales,
        "KIND": view.kind.name,
        "NATIVE": target.native_e4m3,
        "ROWS": max(1, target.tile // columns),
        "COLUMNS": columns,
    }


def _check(
    view: LayerView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None
) -> None:
    device, heads = view.data.device, (view.kv_heads, view.head_size)
    require_indices("slots", slots, view.data)
    shape = (slots.numel(), *heads)
    for name, rows in (("keys", keys), ("values", values)):
        fits = rows.shape == shape and rows.dtype in INPUTS and rows.device == device
        require(fits, f"{name} must be {shape} of float32, bfloat16 or float16 on {device}", rows)
    most = (2**31 - 2**16) // (view.kv_heads * view.groups)  # rows are counted in 32 bits, and whole tiles of them
    require(slots.numel() <= most, f"slots must be {most} at most", slots)
    if centre is not None:
        fits = centre.shape == heads and centre.dtype == torch.float32 and centre.device == device
        require(fits and centre.is_contiguous(), f"centre must be contiguous, {heads} of float32 on {device}", centre)
