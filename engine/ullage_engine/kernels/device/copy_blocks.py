"""Whole blocks from pool to pool; what it computes is said in `kernels.copy_blocks`.

Prefixes: `o_` index or offset, `p_` pointer. Offsets into pools are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(
    source_ptr,  # uint8 [blocks, units * 16], as the next
    target_ptr,
    sources_ptr,  # int64 [copies], as the next
    targets_ptr,
    source_stride: tl.int64,
    target_stride: tl.int64,
    units: tl.int64,
    COLUMNS: tl.constexpr,
):
    """One program: `COLUMNS` words of four bytes of one block."""
    o_source = tl.load(sources_ptr + tl.program_id(0)) * source_stride
    o_target = tl.load(targets_ptr + tl.program_id(0)) * target_stride
    p_source = (source_ptr + o_source).to(tl.pointer_type(tl.int32))
    p_target = (target_ptr + o_target).to(tl.pointer_type(tl.int32))
    o_word = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    mask = o_word < units * 4  # a bound of whole units, so that loads are of 16 bytes
    tl.store(p_target + o_word, tl.load(p_source + o_word, mask=mask), mask=mask)
