"""Quantise on write; what it computes is said in `kernels.kv_write`.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask. Offsets into the store are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ullage_engine.kernels.device.codec import encode, magnitude_bits


@triton.jit(do_not_specialize=["tokens"])
def write(
    data_ptr,  # uint8, the store
    slots_ptr,  # int64 [tokens]
    keys_ptr,  # [tokens, HEADS, GROUPS * GROUP]
    values_ptr,
    centre_ptr,  # float32 [HEADS, GROUPS * GROUP], or None
    tokens,
    block_bytes: tl.int64,
    layer_offset: tl.int64,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CELL_BYTES: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: `ROWS` rows of one scale group each, of keys and then of values."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_token = o_row // (HEADS * GROUPS)
    o_head = o_row // GROUPS % HEADS
    o_group = o_row % GROUPS
    slot = tl.load(slots_ptr + o_token, mask=o_token < tokens, other=-1)  # [ROWS]
    m_row = slot >= 0
    # [ROWS] of the cell, and of the row's place among the cell's groups of channels
    o_cell = slot // BLOCK_TOKENS * block_bytes + layer_offset + o_head.to(tl.int64) * CELL_BYTES
    o_place = slot % BLOCK_TOKENS * GROUPS + o_group
    o_key = o_token.to(tl.int64) * key_token_stride + o_head.to(tl.int64) * key_head_stride + o_group * GROUP
    o_value = o_token.to(tl.int64) * value_token_stride + o_head.to(tl.int64) * value_head_stride + o_group * GROUP
    o_centre = (o_head * GROUPS + o_group) * GROUP
    p_cell = data_ptr + o_cell
    _write_rows(
        p_cell + K_CODES, p_cell + K_SCALES, o_place, keys_ptr + o_key,
        None if centre_ptr is None else centre_ptr + o_centre, m_row, GROUP, KIND, NATIVE, COLUMNS,
    )  # fmt: skip
    _write_rows(
        p_cell + V_CODES, p_cell + V_SCALES, o_place, values_ptr + o_value,
        None, m_row, GROUP, KIND, NATIVE, COLUMNS,
    )  # fmt: skip


@triton.jit
def _write_rows(
    p_codes,  # [ROWS] uint8, of the cell's codes
    p_scales,  # [ROWS] uint8, of the cell's scales
    o_place,  # [ROWS]
    p_rows,  # [ROWS] of the rows' first elements
    p_centre,  # [ROWS] float32 of what is taken from them, or None
    m_row,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    o_column = tl.arange(0, COLUMNS)[None, :]
    mask = m_row[:, None] & (o_column < GROUP)
    rows = tl.load(p_rows[:, None] + o_column, mask=mask, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
    if p_centre is not None:
        rows -= tl.load(p_centre[:, None] + o_column, mask=mask, other=0.0)
    if KIND == "fp8" or KIND == "int8":
        LIMIT: tl.constexpr = 448.0 if KIND == "fp8" else 127.0
        EPS_BITS: tl.constexpr = 0x2B8CBCCC  # `quant.EPS` as float32
        # the maximum of bits keeps NaN, which that of floats would lose
        greatest = tl.maximum(tl.max(magnitude_bits(rows), axis=1), EPS_BITS)  # [ROWS]
        scales = tl.div_rn(greatest.to(tl.float32, bitcast=True), LIMIT)
        tl.store(p_scales.to(tl.pointer_type(tl.float32)) + o_place, scales, mask=m_row)
        rows = tl.div_rn(rows, scales[:, None] + tl.zeros_like(rows))
    codes = encode(rows, KIND, NATIVE)
    ELEMENT_BYTES: tl.constexpr = codes.dtype.primitive_bitwidth // 8
    p_place = (p_codes + o_place * (GROUP * ELEMENT_BYTES)).to(tl.pointer_type(codes.dtype))
    tl.store(p_place[:, None] + o_column, codes, mask=mask)
