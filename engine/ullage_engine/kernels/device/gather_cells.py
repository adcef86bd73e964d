"""Rows of cells into other cells; what it computes is said in `kernels.gather_cells`.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask. Offsets into the store are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def gather(
    data_ptr,  # uint8, the store
    sources_ptr,  # int64 [count], as the next three
    source_rows_ptr,
    targets_ptr,
    target_rows_ptr,
    count,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    CODE_COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """One program: `ROWS` rows, as words of `WORD` bytes."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    m_row = o_row < count
    # cells begin on multiples of 16 bytes, so their rows can be moved in wide words
    o_source = tl.multiple_of(tl.load(sources_ptr + o_row, mask=m_row, other=0), [16])
    o_target = tl.multiple_of(tl.load(targets_ptr + o_row, mask=m_row, other=0), [16])
    source_row = tl.load(source_rows_ptr + o_row, mask=m_row, other=0)
    target_row = tl.load(target_rows_ptr + o_row, mask=m_row, other=0)
    p_source, p_target = data_ptr + o_source, data_ptr + o_target
    o_from, o_to = source_row * CODE_BYTES, target_row * CODE_BYTES
    _move(p_source + K_CODES + o_from, p_target + K_CODES + o_to, m_row, CODE_BYTES, WORD, CODE_COLUMNS)
    _move(p_source + V_CODES + o_from, p_target + V_CODES + o_to, m_row, CODE_BYTES, WORD, CODE_COLUMNS)
    if SCALE_BYTES > 0:
        o_from, o_to = source_row * SCALE_BYTES, target_row * SCALE_BYTES
        _move(p_source + K_SCALES + o_from, p_target + K_SCALES + o_to, m_row, SCALE_BYTES, WORD, SCALE_COLUMNS)
        _move(p_source + V_SCALES + o_from, p_target + V_SCALES + o_to, m_row, SCALE_BYTES, WORD, SCALE_COLUMNS)


@triton.jit
def _move(p_source, p_target, m_row, BYTES: tl.constexpr, WORD: tl.constexpr, COLUMNS: tl.constexpr):
    """`BYTES` at each of the [ROWS] uint8 pointers."""
    if WORD == 4:
        p_source, p_target = p_source.to(tl.pointer_type(tl.int32)), p_target.to(tl.pointer_type(tl.int32))
    o_column = tl.arange(0, COLUMNS)[None, :]
    mask = m_row[:, None] & (o_column < BYTES // WORD)
    words = tl.load(p_source[:, None] + o_column, mask=mask)  # [ROWS, COLUMNS]
    tl.store(p_target[:, None] + o_column, words, mask=mask)
