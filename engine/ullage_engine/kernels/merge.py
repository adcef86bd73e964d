"""Attention over several parts of a sequence's rows, put together by their log-sum-exps.

softmax over a union is the mean of the parts' results weighted by exp(lse) of each (Milakov and Gimelshein,
arXiv:1805.02867). A sink counts in one part only: its lse then carries it into the whole.
"""

from __future__ import annotations

import torch

from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, require_indices, target_of
from ullage_engine.kernels.launch import MERGING, PARTS, SPLIT, TYPES, options, register_limit
from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.tuning import columns_of


def reference(
    parts: torch.Tensor, lses: torch.Tensor, at: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Merge some tokens' parts into `out`, and their log-sum-exp into `lse`.

    Args:
        parts: [P, T, Hq, D] float32.
        lses: [P, T, Hq] float32, natural log; -inf: the part saw nothing, and its result counts for nothing.
        at: [N] int64 tokens to merge; others are neither read nor written.
        out: [T, Hq, D].
        lse: [T, Hq] float32, or None.
    """
    logs = lses[:, at]
    top = logs.amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (logs - top).exp()
    total = weights.sum(0)
    chosen = parts[:, at].masked_fill((weights == 0).unsqueeze(-1), 0.0)
    merged = (chosen * weights.unsqueeze(-1)).sum(0) / total.clamp_min(1e-38).unsqueeze(-1)
    out[at] = merged.to(out.dtype)
    if lse is not None:
        lse[at] = top + total.log()


def kernel(
    parts: torch.Tensor, lses: torch.Tensor, at: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """`reference` in one pass.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    target = target_of(parts)
    _check(parts, lses, at, out, lse)
    if not len(at):
        return
    from ullage_engine.kernels.device.merge import merge

    merge[(len(at), parts.shape[2])](
        parts, lses, out, lse, at, None, None, parts.shape[0], 0, 1, 0, 0,
        *parts.stride()[:3], *lses.stride()[:2], out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        REPEAT=1, CELLS=False, WINDOW=False, SPLIT=0,
        SIZE=parts.shape[3], COLUMNS=columns_of(parts.shape[3]), PARTS=PARTS, **options(MERGING, target),
    )  # fmt: skip


def builds(serving: Serving, target: Target) -> list[Build]:
    """Splits of decode, and blocks with cells."""
    from ullage_engine.kernels.device.merge import merge

    view, element = serving.view, TYPES[serving.element]
    strides = ("part_stride", "part_token_stride", "part_head_stride", "out_token_stride", "out_head_stride")
    arguments = {
        "parts_ptr": "*fp32:16", "lses_ptr": "*fp32:16", "out_ptr": f"*{element}:16", "at_ptr": "*i64:16",
        "parts": "i32", "window": "i32", "longest": "i32", **dict.fromkeys(strides, "i64:16"),
        "rows_stride": "i64", "rows_head_stride": "i64",
        "lses_part_stride": "i64", "lses_token_stride": "i64", "lse_token_stride": "i64",
    }  # fmt: skip
    shape = {"SIZE": view.head_size, "COLUMNS": columns_of(view.head_size), "PARTS": PARTS, "lse_ptr": None}
    parts = {"REPEAT": 1, "CELLS": False, "WINDOW": False, "SPLIT": 0, "counts_ptr": None, "rows_ptr": None}
    splits = {**parts, "REPEAT": serving.queries, "WINDOW": True, "SPLIT": SPLIT}
    del splits["rows_ptr"]
    how = (MERGING.warps, MERGING.stages, register_limit(target))
    return [
        Build("merge", merge, arguments, {**shape, **parts}, *how),
        Build("merge/splits", merge, {**arguments, "rows_ptr": "*i64:16"}, {**shape, **splits}, *how),
    ]


def _check(
    parts: torch.Tensor, lses: torch.Tensor, at: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    fits = parts.dim() == 4 and parts.stride(3) == 1 and parts.dtype == torch.float32
    require(fits, "parts must be [P, T, Hq, D] of float32, with D contiguous", parts)
    shape, device = tuple(parts.shape), parts.device
    require_indices("at", at, parts)
    for name, given, wanted in (("lses", lses, shape[:3]), ("lse", lse, shape[1:3])):
        if given is not None:
            fits = given.shape == wanted and given.stride(-1) == 1 and given.dtype == torch.float32
            require(fits and given.device == device, f"{name} must be {wanted} of float32 on {device}", given)
    fits = out.shape == shape[1:] and out.stride(2) == 1 and out.dtype in TYPES and out.device == device
    require(fits, f"out must be {shape[1:]} on {device}", out)
