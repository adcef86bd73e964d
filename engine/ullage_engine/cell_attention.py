"""What attention kernels are told of the cells of evicted sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ullage_engine.cell_table import CellTable
from ullage_engine.kernels.tables import BlockTables, CellTables
from ullage_engine.store import BlockStore


def tables_of(store: BlockStore, held: Sequence[CellTable], dense: BlockTables) -> tuple[CellTables, ...]:
    """The cells of N sequences, for each layer in turn; `dense` says where each one's queries are."""
    layout, device = store.layout, dense.at.device
    grid = torch.arange(layout.cells_per_block).view(layout.layers, layout.kv_heads, 1)
    # where there is no cell, the first block's is a valid address of the right class
    ids = _stacked([torch.where(table.cells >= 0, table.cells, grid) for table in held], grid)
    offsets, rows = store.cell_offsets(ids.to(device)), torch.stack([table.rows for table in held]).to(device)
    positions = _stacked([table.positions for table in held], grid.to(torch.int32)).to(device)
    widths = [max(1, *(table.width(layer) for table in held)) for layer in range(layout.layers)]
    return tuple(
        CellTables(
            dense.at,
            offsets[:, layer, :, :width],
            rows[:, layer],
            dense.positions,
            positions[:, layer, :, : width * layout.block_tokens],
        )
        for layer, width in enumerate(widths)
    )


def _stacked(tables: list[torch.Tensor], fill: torch.Tensor) -> torch.Tensor:
    """[N, L, H, greatest width] of tensors [L, H, width], filled up from `fill` [L, H, 1]."""
    width = max(table.shape[-1] for table in tables)
    return torch.stack([torch.cat([table, fill.expand(-1, -1, width - table.shape[-1])], -1) for table in tables])
