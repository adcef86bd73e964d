"""Parts of attention put together; what it computes is said in `kernels.merge`.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ullage_engine.kernels.device.rows import LN_2, LOG2_E


@triton.jit
def merge(
    parts_ptr,  # float32 [parts, tokens, heads, SIZE]
    lses_ptr,  # float32 [parts, tokens, heads]
    out_ptr,  # [tokens, heads, SIZE]
    lse_ptr,  # float32 [tokens, heads], or None
    at_ptr,  # int64: of tokens to merge; of sequences, if there are rows
    counts_ptr,  # int64 [N], or None
    rows_ptr,  # int64 [N], with CELLS [N, HEADS]; None: all parts are there
    parts,
    window,
    longest,
    rows_stride: tl.int64,
    rows_head_stride: tl.int64,
    part_stride: tl.int64,
    part_token_stride: tl.int64,
    part_head_stride: tl.int64,
    lses_part_stride: tl.int64,
    lses_token_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    REPEAT: tl.constexpr,
    CELLS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program: one query head of one token, `PARTS` parts at a time."""
    o_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1)
    first = 0
    last = parts
    if rows_ptr is None:
        o_out = tl.load(at_ptr + o_token)
        o_token = o_out
    else:
        o_n = o_token // longest
        o_query = o_token % longest
        count = 1 if counts_ptr is None else tl.load(counts_ptr + o_n).to(tl.int32)
        if o_query >= count:
            return
        o_out = tl.load(at_ptr + o_n) + o_query
        rows = tl.load(rows_ptr + o_n * rows_stride + o_head // REPEAT * rows_head_stride).to(tl.int32)
        end = rows if CELLS else rows + count - 1
        if WINDOW and not CELLS:
            first = tl.maximum(0, rows - window) // SPLIT
        last = tl.maximum(first + 1, (end + SPLIT - 1) // SPLIT)
    o_column = tl.arange(0, COLUMNS)
    p_lses = lses_ptr + o_token * lses_token_stride + o_head
    p_parts = parts_ptr + o_token * part_token_stride + o_head * part_head_stride + o_column
    top = float("-inf")
    total = 0.0
    result = tl.zeros((COLUMNS,), tl.float32)
    for o_some in range(first, last, PARTS):
        o_part = (o_some + tl.arange(0, PARTS)).to(tl.int64)
        m_part = o_part < last
        logs = tl.load(p_lses + o_part * lses_part_stride, mask=m_part, other=float("-inf"))  # [PARTS]
        higher = tl.maximum(top, tl.max(logs, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp2((top - shift) * LOG2_E)
        weights = tl.exp2((logs - shift) * LOG2_E)
        mask = (weights > 0.0)[:, None] & (o_column < SIZE)[None, :]
        some = tl.load(p_parts[None, :] + o_part[:, None] * part_stride, mask=mask, other=0.0)  # [PARTS, COLUMNS]
        result = result * fading + tl.sum(some * weights[:, None], axis=0)
        total = total * fading + tl.sum(weights, axis=0)
        top = higher
    total = tl.where(total == 0.0, 1.0, total)
    result = result / total
    tl.store(out_ptr + o_out * out_token_stride + o_head * out_head_stride + o_column, result, mask=o_column < SIZE)
    if lse_ptr is not None:
        tl.store(lse_ptr + o_out * lse_token_stride + o_head, top + tl.log2(total) * LN_2)
