"""Launches Triton's attention: what decode, prefill and key scores have in common on the host.

Rows are read in splits of `SPLIT`, whatever the batch, and a second kernel puts the splits together: so a sequence's
result depends on its own rows alone, and the grid on the width of the table alone, which a captured graph needs.
"""

from __future__ import annotations

from typing import Any

import torch

from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, rows_of, target_of
from ullage_engine.kernels.tables import CellTables, Chunks, Tables, addresses, check_tables
from ullage_engine.kernels.targets import INTERPRETER, Target
from ullage_engine.kernels.tuning import Tile, columns_of, tile_of
from ullage_engine.kernels.view import LayerView

SPLIT = 512
"""Rows of a split. A multiple of every tile; a long context alone on a GPU gives work to all of it."""
SHORT = 16
"""Queries of a sequence up to which its rows are read in splits; more keep a GPU busy without."""
PARTS = 16
"""Splits that are put together at once."""
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TABLE_STRIDES = {f"{of}_{step}": "i64" for of in ("table", "rows", "starts") for step in ("stride", "head_stride")}
STRIDES = (
    "query_token_stride", "query_head_stride", "out_token_stride", "out_head_stride", "out_split_stride",
)  # fmt: skip


MERGING = Tile(1, 1, 4, 3)
"""Of `merge`, whose programs have no tiles."""


def register_limit(target: Target) -> int | None:
    """What ptxas may give a thread: without a limit it spills some registers for the sake of more thread blocks."""
    return 255 if target.backend == "cuda" else None


def options(tile: Tile, target: Target) -> dict[str, int]:
    """Of a launch."""
    limit = register_limit(target)
    limits = {"maxnreg": limit} if limit else {}  # which Triton does not know for AMD
    return {"num_warps": tile.warps, "num_stages": tile.stages, **limits}


def view_constants(view: LayerView, target: Target) -> dict[str, Any]:
    """What kernels are compiled for of a layer."""
    from ullage_engine.kernels.device.rows import dot_type

    return {
        "HEADS": view.kv_heads,
        "SIZE": view.head_size,
        "COLUMNS": columns_of(view.head_size),
        "GROUPS": view.groups if view.kind.quantised else 1,
        "BLOCK_TOKENS": view.block_tokens,
        "CELL_BYTES": view.cell_bytes,
        "K_CODES": view.k_codes,
        "K_SCALES": view.k_scales,
        "V_CODES": view.v_codes,
        "V_SCALES": view.v_scales,
        "KIND": view.kind.name,
        "NATIVE": target.native_e4m3,
        # the interpreter's products of anything narrower are wrong
        "DOT": dot_type("fp32" if target is INTERPRETER else view.kind.name),
    }


def attend(
    view: LayerView,
    tables: Tables,
    chunks: Chunks | None,
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """`paged_decode` (without chunks) or `paged_prefill`.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    target = target_of(view.data)
    query = rows_of(query)
    check_view(view)
    check_tables(view, tables, window)
    _check_queries(view, query, out, lse, sinks)
    count = len(tables.at)
    if not count:
        return
    longest = chunks.longest if chunks else 1
    repeat = query.shape[1] // view.kv_heads
    tile = tile_of(view, target, longest * repeat)
    splits = max(1, -(-tables.blocks * view.block_tokens // SPLIT)) if longest <= SHORT else 1
    parts, lses = out, lse
    if splits > 1:
        places = (splits, count * longest, *query.shape[1:])
        parts = torch.empty(places, dtype=torch.float32, device=out.device)
        lses = torch.empty(places[:-1], dtype=torch.float32, device=out.device)
    cells, ((table, rows, known), strides) = isinstance(tables, CellTables), addresses(tables, window)
    from ullage_engine.kernels.device.attention import attend
    from ullage_engine.kernels.device.merge import merge

    grid = (count * view.kv_heads, -(-longest * repeat // tile.queries), splits)
    attend[grid](
        view.data, query, parts, lses, tables.at, chunks.counts if chunks else None,
        table, rows, known if window else None, tables.positions if window else None, sinks,
        scaling, softcap or 0.0, window or 0, longest, *strides, view.block_bytes, view.layer_offset,
        query.stride(0), query.stride(1), parts.stride(-3), parts.stride(-2), parts.stride(0),
        0 if lses is None else lses.stride(-2), 0 if lses is None else lses.stride(0),
        **view_constants(view, target), REPEAT=repeat, CELLS=cells, WINDOW=bool(window), SOFTCAP=bool(softcap),
        SPLIT=SPLIT if splits > 1 else 0, QUERIES=tile.queries, TILE=tile.rows,
        **options(tile, target),
    )  # fmt: skip
    if lses is not None and parts is not out:
        merge[(count * longest, query.shape[1])](
            parts, lses, out, lse, tables.at, chunks.counts if chunks else None, rows, 0, window or 0, longest,
            *strides[2:4], *parts.stride()[:3], *lses.stride()[:2], *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            REPEAT=repeat, CELLS=cells, WINDOW=bool(window), SPLIT=SPLIT,
            SIZE=view.head_size, COLUMNS=columns_of(view.head_size), PARTS=PARTS, **options(MERGING, target),
        )  # fmt: skip


# -- checks ------------------------------------------------------------------------------------------------------------


def check_view(view: LayerView) -> None:
    """A head's row must be a whole number of sixteen bytes."""
    fits = view.data.is_contiguous() and view.head_size * view.kind.element_bytes % 16 == 0
    require(fits, f"the store must be contiguous, with rows of 16 bytes each, of head size {view.head_size}", view.data)


def _check_queries(
    view: LayerView, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None
) -> None:
    device = view.data.device
    fits = query.dim() == 3 and query.shape[2] == view.head_size and query.shape[1] % view.kv_heads == 0
    fits = fits and query.dtype in TYPES and query.device == device
    require(fits, f"query must be [T, a multiple of {view.kv_heads}, {view.head_size}] on {device}", query)
    fits = out.shape == query.shape and out.stride(2) == 1 and out.dtype in (query.dtype, torch.float32)
    require(fits and out.device == device, f"out must be like the query, {tuple(query.shape)}", out)
    shape = tuple(query.shape[:2])
    if lse is not None:
        fits = lse.shape == shape and lse.stride(1) == 1 and lse.dtype == torch.float32 and lse.device == device
        require(fits, f"lse must be {shape} of float32 on {device}", lse)
    if sinks is not None:
        fits = sinks.shape == shape[1:] and sinks.is_contiguous() and sinks.dtype == torch.float32
        require(fits and sinks.device == device, f"sinks must be {shape[1:]} of float32 on {device}", sinks)


# -- builds ------------------------------------------------------------------------------------------------------------


PLAIN, RICH, RICH_CELLS = (False, False), (False, True), (True, True)
"""Over cells; with window, soft cap and sinks. Whatever else is asked for takes no more than these."""


def builds(
    name: str, serving: Serving, target: Target, variants: tuple[tuple[bool, bool], ...], longest: int, split: bool
) -> list[Build]:
    """Attention of up to `longest` queries a sequence, in splits or all rows at once."""
    from ullage_engine.kernels.device.attention import attend

    view, tile = serving.view, tile_of(serving.view, target, longest * serving.queries)
    element = TYPES[serving.element]
    found = []
    for cells, rich in variants:
        arguments = {
            "data_ptr": "*u8:16", "query_ptr": f"*{element}:16", "at_ptr": "*i64:16", "table_ptr": "*i64:16",
            "out_ptr": "*fp32:16" if split else f"*{element}:16", "rows_ptr": "*i64:16",
            "scaling": "fp32", "softcap": "fp32", "window": "i32", "longest": "i32", **TABLE_STRIDES,
            "block_bytes": "i64:16", "layer_offset": "i64:16", **dict.fromkeys(STRIDES, "i64:16"),
            "lse_token_stride": "i64", "lse_split_stride": "i64",
        }  # fmt: skip
        optional = {
            "lse_ptr": "*fp32:16" if split else None,
            "counts_ptr": "*i64:16" if longest > 1 else None,
            "starts_ptr": ("*i32:16" if cells else "*i64:16") if rich else None,
            "positions_ptr": "*i64:16" if rich else None,
            "sinks_ptr": "*fp32:16" if rich else None,
        }
        arguments |= {key: kind for key, kind in optional.items() if kind}
        constants = {
            **view_constants(view, target), **{key: None for key, kind in optional.items() if not kind},
            "REPEAT": serving.queries, "CELLS": cells, "WINDOW": rich, "SOFTCAP": rich,
            "SPLIT": SPLIT if split else 0, "QUERIES": tile.queries, "TILE": tile.rows,
        }  # fmt: skip
        label = f"{name}/{'cells' if cells else 'blocks'}{'/window, soft cap, sinks' if rich else ''}"
        limit = register_limit(target)
        found.append(Build(label, attend, arguments, constants, tile.warps, tile.stages, limit))
    return found
