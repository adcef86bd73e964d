"""Rows of cells into other cells: the survivors of an eviction into cells of their own, and cells out of sparse blocks.

A row is one token's K codes, K scales, V codes and V scales of one head in one layer. All four are copied as bytes, so
what was quantised once is never quantised again.
"""

from __future__ import annotations

import torch

from ullage_engine.kernels.view import LayerView


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


def _unit(width: int) -> torch.dtype:
    """The widest integer that makes up rows of `width` bytes; sections begin on multiples of `view.UNIT`."""
    return next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % t.itemsize == 0)
