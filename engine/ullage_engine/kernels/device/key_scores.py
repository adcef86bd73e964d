"""Scores of cached keys; what it computes is said in `kernels.key_scores`.

Prefixes: `o_` index or offset, `p_` pointer, `m_` mask. Offsets into the store are bytes, 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ullage_engine.kernels.device.rows import LN_2, LOG2_E, capped, load_queries, load_rows


@triton.jit
def score(
    data_ptr,  # uint8, the store
    queries_ptr,  # [N, queries, HEADS * REPEAT, SIZE]
    query_positions_ptr,  # int64 [N, queries]
    lse_ptr,  # float32 [N, queries, HEADS * REPEAT]
    scores_ptr,  # float32 [N, HEADS, width * BLOCK_TOKENS]
    table_ptr,  # int64 [N, width] blocks, with CELLS [N, HEADS, width] bytes to cells
    rows_ptr,  # int64 [N], with CELLS [N, HEADS]
    starts_ptr,  # int64 [N, width] positions of blocks' first rows, with CELLS int32 of all rows, or None
    scaling,
    softcap,
    window,
    width,
    queries,
    table_stride: tl.int64,
    table_head_stride: tl.int64,
    rows_stride: tl.int64,
    rows_head_stride: tl.int64,
    starts_stride: tl.int64,
    starts_head_stride: tl.int64,
    block_bytes: tl.int64,
    layer_offset: tl.int64,
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
    MODE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: the scores of `TILE` rows of one KV head, its query heads one after the other."""
    o_n = (tl.program_id(0) // HEADS).to(tl.int64)
    o_h = tl.program_id(0) % HEADS
    o_place = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    rows = tl.load(rows_ptr + o_n * rows_stride + o_h * rows_head_stride).to(tl.int32)
    SCALED: tl.constexpr = KIND == "fp8" or KIND == "int8"
    scores = tl.zeros((TILE,), tl.float32)
    if tl.program_id(1) * TILE < rows:
        o_row = tl.minimum(o_place, rows - 1)  # beyond the end the last row stands in
        o_slot = o_row % BLOCK_TOKENS
        o_cell = tl.load(table_ptr + o_n * table_stride + o_h * table_head_stride + o_row // BLOCK_TOKENS)
        if not CELLS:
            o_cell = o_cell * block_bytes + layer_offset + o_h * CELL_BYTES
        keys, key_scales = load_rows(
            data_ptr, o_cell + K_CODES, o_cell + K_SCALES, o_slot, SIZE, COLUMNS, GROUPS, KIND, NATIVE, DOT
        )
        if WINDOW and CELLS:
            o_known = tl.load(starts_ptr + o_n * starts_stride + o_h * starts_head_stride + o_row).to(tl.int64)
        elif not CELLS:
            o_known = tl.load(starts_ptr + o_n * starts_stride + o_row // BLOCK_TOKENS) + o_slot
        for o_head in range(o_h * REPEAT, o_h * REPEAT + REPEAT):
            for o_some in range(0, queries, QUERIES):
                o_query = o_some + tl.arange(0, QUERIES)  # [QUERIES]
                m_query = o_query < queries
                o_query = o_n * queries + tl.minimum(o_query, queries - 1)
                o_position = tl.load(query_positions_ptr + o_query)
                m_query = m_query & (o_position >= 0)
                o_query = o_query * (HEADS * REPEAT) + o_head
                lse = tl.load(lse_ptr + o_query) * LOG2_E
                m_query = m_query & (lse > float("-inf"))
                query, factor = load_queries(queries_ptr + o_query * SIZE, SIZE, COLUMNS, SCALED, DOT)
                # [QUERIES, COLUMNS] x [COLUMNS, TILE]
                logits = tl.dot(query, tl.trans(keys), out_dtype=tl.float32, input_precision="ieee")
                logits = capped(logits * (factor * scaling)[:, None] * key_scales[None, :], softcap, SOFTCAP)
                m_seen = m_query[:, None]
                if not CELLS:
                    m_seen = m_seen & (o_known[None, :] <= o_position[:, None])
                if WINDOW:
                    m_seen = m_seen & (o_position[:, None] - o_known[None, :] < window)
                logs = tl.where(m_seen, logits - lse[:, None], float("-inf"))
                chances = tl.exp2(logs)  # [QUERIES, TILE]
                if MODE == "square":
                    scores += tl.sum(chances * chances, axis=0)
                elif MODE == "sum":
                    scores += tl.sum(chances, axis=0)
                else:
                    scores += tl.sum(chances * tl.where(m_seen, logs, 0.0), axis=0) * -LN_2
    scores = tl.where(o_place < rows, scores / REPEAT, 0.0)
    p_scores = scores_ptr + tl.program_id(0).to(tl.int64) * width * BLOCK_TOKENS
    tl.store(p_scores + o_place, scores, mask=o_place < width * BLOCK_TOKENS)
