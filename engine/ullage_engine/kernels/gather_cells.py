"""Rows of cells into other cells: the survivors of an eviction into cells of their own, and cells out of sparse blocks.

A row is one token's K codes, K scales, V codes and V scales of one head in one layer. All four are copied as bytes, so
what was quantised once is never quantised again.
"""

from __future__ import annotations

from typing import Any

import torch

from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.checks import require, require_indices, target_of
from ullage_engine.kernels.targets import Target, side
from ullage_engine.kernels.view import LayerView

WARPS = 4


def reference(
    view: LayerView,
    sources: torch.Tensor,
    source_rows: torch.Tensor,
    targets: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Copy row `source_rows[i]` of the cell at `sources[i]` to row `target_rows[i]` of the cell at `targets[i]`.

    One call may serve all layers whose cells are of one class (`CacheLayout.cell_classes`); `view` is of any of them.
    No target row may be a source row of the same call, or a target twice: the order of copies is not defined.

    Args:
        sources, targets: [n] int64, bytes from the store's start to cells (`LayerView.cell_offsets`,
            `BlockStore.cell_offsets`), whole or of split blocks.
        source_rows, target_rows: [n] int64 in [0, block_tokens).
    """
    flat = view.data.view(-1)
    for section, width in view.sections():
        unit = _unit(width)
        words = flat.view(unit)
        steps = torch.arange(width // unit.itemsize, device=flat.device)
        read = (sources + section + source_rows * width) // unit.itemsize
        written = (targets + section + target_rows * width) // unit.itemsize
        words[written[:, None] + steps] = words[read[:, None] + steps]


def kernel(
    view: LayerView,
    sources: torch.Tensor,
    source_rows: torch.Tensor,
    targets: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """`reference` without a copy in between.

    Raises:
        ValueError: lists of unlike length, or of another type or device.
    """
    target = target_of(view.data)
    lists = {"sources": sources, "source_rows": source_rows, "targets": targets, "target_rows": target_rows}
    for name, items in lists.items():
        require_indices(name, items, view.data)
        require(len(items) == len(sources), f"{name} must be as many as sources, {len(sources)}", items)
    if not len(sources):
        return
    from ullage_engine.kernels.device.gather_cells import gather

    constants = _constants(view, target)
    grid = (-(-len(sources) // constants["ROWS"]),)
    gather[grid](view.data, *lists.values(), len(sources), **constants, num_warps=WARPS)


def builds(serving: Serving, target: Target) -> list[Build]:
    """One, of the cell's shape."""
    from ullage_engine.kernels.device.gather_cells import gather

    lists = dict.fromkeys(("sources_ptr", "source_rows_ptr", "targets_ptr", "target_rows_ptr"), "*i64:16")
    arguments = {"data_ptr": "*u8:16", **lists, "count": "i32"}
    return [Build("gather_cells", gather, arguments, _constants(serving.view, target), WARPS)]


def _constants(view: LayerView, target: Target) -> dict[str, Any]:
    code_bytes = view.head_size * view.kind.element_bytes
    scale_bytes = view.groups * 4 if view.kind.quantised else 0
    word = 4 if code_bytes % 4 == 0 else 1
    columns = side(code_bytes // word)
    return {
        "K_CODES": view.k_codes,
        "K_SCALES": view.k_scales,
        "V_CODES": view.v_codes,
        "V_SCALES": view.v_scales,
        "CODE_BYTES": code_bytes,
        "SCALE_BYTES": scale_bytes,
        "WORD": word,
        "ROWS": max(1, target.tile // columns),
        "CODE_COLUMNS": columns,
        "SCALE_COLUMNS": side(max(1, scale_bytes // word)),
    }


def _unit(width: int) -> torch.dtype:
    """The widest integer that makes up rows of `width` bytes; sections begin on multiples of `view.UNIT`."""
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % t.itemsize == 0)
