"""Attention over cached rows; what it computes is said in `kernels.paged_decode` and `kernels.paged_prefill`.

Online softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135) over tiles of rows that are read
through a table. Sums are float32; a tile's V scales are divided by the tile's greatest, so that weights stay within
float16's range.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask. Offsets into the store are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ullage_engine.kernels.device.rows import LN_2, LOG2_E, capped, load_queries, load_rows


@triton.jit
def attend(
    data_ptr,  # uint8, the store
    query_ptr,  # [tokens, HEADS * REPEAT, SIZE]
    out_ptr,  # [.., HEADS * REPEAT, SIZE], its first dimension a token's, or with SPLIT one of sequence and query
    lse_ptr,  # float32 likewise without the last dimension, or None
    at_ptr,  # int64 [N]
    counts_ptr,  # int64 [N], or None: one query each
    table_ptr,  # int64 [N, width] blocks, with CELLS [N, HEADS, width] bytes to cells
    rows_ptr,  # int64 [N], with CELLS [N, HEADS]
    starts_ptr,  # int64 [N, width] positions of blocks' first rows, with CELLS int32 of all rows; None without a window
    positions_ptr,  # int64 [N] of first queries; None without a window
    sinks_ptr,  # float32 [HEADS * REPEAT], or None
    scaling,
    softcap,
    window,
    longest,
    table_stride: tl.int64,
    table_head_stride: tl.int64,  # 0 of a block table, as the other two
    rows_stride: tl.int64,
    rows_head_stride: tl.int64,
    starts_stride: tl.int64,
    starts_head_stride: tl.int64,
    block_bytes: tl.int64,
    layer_offset: tl.int64,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    out_split_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_split_stride: tl.int64,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CELL_BYTES: tl.constexpr,
    K_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
    REPEAT: tl.constexpr,
    CELLS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: `QUERIES` queries of one KV head (its query heads are queries too) over `SPLIT` rows, or all (0).

    The first split that a sequence needs runs even without rows, and counts the sinks.
    """
    SCALED: tl.constexpr = KIND == "fp8" or KIND == "int8"
    o_n = (tl.program_id(0) // HEADS).to(tl.int64)
    o_h = tl.program_id(0) % HEADS
    count = 1 if counts_ptr is None else tl.load(counts_ptr + o_n).to(tl.int32)
    o_first = tl.program_id(1) * QUERIES // REPEAT
    if o_first >= count:
        return
    o_packed = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    m_query = o_packed < count * REPEAT
    o_query = tl.minimum(o_packed // REPEAT, count - 1)  # [QUERIES]
    o_head = o_h * REPEAT + o_packed % REPEAT

    rows = tl.load(rows_ptr + o_n * rows_stride + o_h * rows_head_stride).to(tl.int32)
    # all programs of a split see the same end, so that `merge` knows which splits there are
    o_last = count - 1 if SPLIT else tl.minimum(count - 1, (tl.program_id(1) * QUERIES + QUERIES - 1) // REPEAT)
    end = rows if CELLS else rows + o_last
    begin = 0
    if WINDOW and not CELLS:
        # positions grow at least as rows do, so a row this far back is out of the window
        begin = tl.maximum(0, rows + (0 if SPLIT else o_first) - window)
    split = 0
    first = 0
    if SPLIT:
        split = tl.program_id(2)
        first = begin // SPLIT
        if split < first or (split > first and split * SPLIT >= end):
            return
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, split * SPLIT + SPLIT)
    begin = begin // TILE * TILE

    at = tl.load(at_ptr + o_n)
    o_token = at + o_query
    p_query = query_ptr + o_token * query_token_stride + o_head * query_head_stride
    query, factor = load_queries(p_query, SIZE, COLUMNS, SCALED, DOT)  # [QUERIES, COLUMNS], [QUERIES]
    factor = factor * scaling
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + o_head) * LOG2_E
        top = tl.where(split == first, sinks, top)
        total = tl.where(split == first, 1.0, total)
    result = tl.zeros((QUERIES, COLUMNS), tl.float32)
    if WINDOW:
        o_position = tl.load(positions_ptr + o_n) + o_query  # [QUERIES]

    p_table = table_ptr + o_n * table_stride + o_h * table_head_stride
    if WINDOW:
        p_starts = starts_ptr + o_n * starts_stride + o_h * starts_head_stride
    for o_tile in range(begin, end, TILE):
        # beyond the end the last row stands in: it exists, and no mask is needed to load it
        o_place = o_tile + tl.arange(0, TILE)  # [TILE]
        o_row = tl.minimum(o_place, end - 1)
        o_slot = o_row % BLOCK_TOKENS
        o_cell = tl.load(p_table + o_row // BLOCK_TOKENS)
        if not CELLS:
            o_cell = o_cell * block_bytes + layer_offset + o_h * CELL_BYTES
        keys, key_scales = load_rows(
            data_ptr, o_cell + K_CODES, o_cell + K_SCALES, o_slot, SIZE, COLUMNS, GROUPS, KIND, NATIVE, DOT
        )
        # [QUERIES, COLUMNS] x [COLUMNS, TILE]
        logits = tl.dot(query, tl.trans(keys), out_dtype=tl.float32, input_precision="ieee")
        logits = capped(logits * factor[:, None] * key_scales[None, :], softcap, SOFTCAP)
        m_seen = o_place[None, :] < (end if CELLS else tl.minimum(end, rows + o_query)[:, None])
        if WINDOW:
            if CELLS:
                o_known = tl.load(p_starts + o_row).to(tl.int64)
            else:
                o_known = tl.load(p_starts + o_row // BLOCK_TOKENS) + o_slot
            m_seen = m_seen & (o_position[:, None] - o_known[None, :] < window)
        logits = tl.where(m_seen, logits, float("-inf"))  # [QUERIES, TILE]

        higher = tl.maximum(top, tl.max(logits, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp2(top - shift)
        weights = tl.exp2(logits - shift[:, None])
        total = total * fading + tl.sum(weights, axis=1)
        top = higher
        values, value_scales = load_rows(
            data_ptr, o_cell + V_CODES, o_cell + V_SCALES, o_slot, SIZE, COLUMNS, GROUPS, KIND, NATIVE, DOT
        )
        result = result * fading[:, None]
        if SCALED:
            greatest = tl.max(value_scales, axis=0)
            weights = weights * (value_scales / greatest)[None, :]
            # [QUERIES, TILE] x [TILE, COLUMNS]
            result += tl.dot(weights.to(DOT), values, out_dtype=tl.float32, input_precision="ieee") * greatest
        else:
            result = tl.dot(weights.to(DOT), values, result, input_precision="ieee")

    o_out = o_n * longest + o_query if SPLIT else o_token
    total = tl.where(total == 0.0, 1.0, total)  # of a query that saw nothing: its `top` is -inf
    result = result / total[:, None]
    o_column = tl.arange(0, COLUMNS)[None, :]
    p_out = out_ptr + split * out_split_stride + o_out * out_token_stride + o_head * out_head_stride
    tl.store(p_out[:, None] + o_column, result, mask=m_query[:, None] & (o_column < SIZE))
    if lse_ptr is not None:
        p_lse = lse_ptr + split * lse_split_stride + o_out * lse_token_stride + o_head
        tl.store(p_lse, (top + tl.log2(total)) * LN_2, mask=m_query)
