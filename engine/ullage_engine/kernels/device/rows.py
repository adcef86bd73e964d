"""Rows of the cache and queries on their way into a dot: dequantised as far as they must be; logits out of it.

With one scale s_K a key, q . (s_K k) = s_K (q . k), and with s_V a value, p (s_V v) = (p s_V) v, so scales stay apart
from rows. Dots multiply float16 (of a bfloat16 cache bfloat16); to stay within float16's range queries are divided by
their greatest magnitude.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask. Offsets into the store are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ullage_engine.kernels.device.codec import decode_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_type(kind: str) -> tl.dtype:
    """What dots over a cache of this type multiply: float16 holds all codes, and rounds less than bfloat16."""
    return {"bf16": tl.bfloat16, "fp32": tl.float32}.get(kind, tl.float16)


@triton.jit
def load_rows(
    data_ptr,
    o_section,  # [TILE] int64 bytes to a section of each row's cell; the rows exist
    o_scales,  # [TILE] int64 bytes to the section's scales
    o_slot,  # [TILE] the row's place in its cell
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Rows [TILE, COLUMNS] of type DOT, and what each is still to be multiplied with, [TILE] float32."""
    ELEMENT_BYTES: tl.constexpr = 1 if KIND == "fp8" or KIND == "int8" else (2 if KIND == "bf16" else 4)
    o_column = tl.arange(0, COLUMNS)[None, :]
    p_row = data_ptr + tl.multiple_of(o_section + o_slot * (SIZE * ELEMENT_BYTES), 16)
    if KIND == "bf16":
        p_row = p_row.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "fp32":
        p_row = p_row.to(tl.pointer_type(tl.float32))
    elif KIND == "int8":
        p_row = p_row.to(tl.pointer_type(tl.int8))
    if COLUMNS == SIZE:
        rows = tl.load(p_row[:, None] + o_column)  # [TILE, COLUMNS]
    else:
        rows = tl.load(p_row[:, None] + o_column, mask=(o_column < SIZE) & (o_slot >= 0)[:, None], other=0)
    if KIND == "fp8" or KIND == "int8":
        p_scale = (data_ptr + o_scales).to(tl.pointer_type(tl.float32)) + o_slot * GROUPS  # [TILE]
        return _scaled(rows, p_scale, SIZE, COLUMNS, GROUPS, KIND, NATIVE, DOT)
    else:
        return rows.to(DOT), tl.full(o_slot.shape, 1.0, tl.float32)


@triton.jit
def _scaled(
    codes,  # [TILE, COLUMNS]
    p_scale,  # [TILE] of rows' first scales
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
):
    FACTOR: tl.constexpr = 256.0 if KIND == "fp8" and not NATIVE else 1.0
    if KIND == "fp8":
        codes = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if NATIVE else decode_e4m3(codes)
    if GROUPS == 1:
        return codes.to(DOT), tl.load(p_scale) * FACTOR
    else:
        # a row's scales are multiplied in, relative to its greatest
        EVEN: tl.constexpr = SIZE == COLUMNS and (GROUPS & (GROUPS - 1)) == 0
        o_group = tl.arange(0, GROUPS) if EVEN else tl.minimum(tl.arange(0, COLUMNS) // (SIZE // GROUPS), GROUPS - 1)
        scales = tl.load(p_scale[:, None] + o_group[None, :])  # [TILE, GROUPS], or a scale for every channel
        greatest = tl.max(scales, axis=1)
        relative = (scales / greatest[:, None]).to(DOT)
        if EVEN:
            grouped = tl.reshape(codes.to(DOT), (p_scale.shape[0], GROUPS, COLUMNS // GROUPS)) * relative[:, :, None]
            return tl.reshape(grouped, (p_scale.shape[0], COLUMNS)), greatest * FACTOR
        else:
            return codes.to(DOT) * relative, greatest * FACTOR


@triton.jit
def load_queries(
    p_query,  # [QUERIES] of each query's first element; the queries exist
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Queries [QUERIES, COLUMNS] of type DOT, and what logits are to be multiplied with for them, [QUERIES] float32."""
    o_column = tl.arange(0, COLUMNS)[None, :]
    query = tl.load(p_query[:, None] + o_column, mask=o_column < SIZE, other=0.0)  # [QUERIES, COLUMNS]
    if SCALED:
        query = query.to(tl.float32)
        greatest = tl.max(tl.abs(query), axis=1)
        greatest = tl.where(greatest > 0.0, greatest, 1.0)
        return (query / greatest[:, None]).to(DOT), greatest
    else:
        return query.to(DOT), tl.full((p_query.shape[0],), 1.0, tl.float32)


@triton.jit
def capped(logits, softcap, SOFTCAP: tl.constexpr):
    """Logits in units of log2(e); with SOFTCAP `softcap * tanh(logits / softcap)` before."""
    if SOFTCAP:
        logits = softcap - 2.0 * softcap / (1.0 + tl.exp2(logits * (2.0 * LOG2_E / softcap)))
    return logits * LOG2_E
