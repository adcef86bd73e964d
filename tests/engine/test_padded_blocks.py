"""Blocks that lie farther apart than they are long: every operation gives what it gives over tight ones.

Strides that are no multiple of a block's or a cell's size show whoever takes a block for as long as its stride, or a
store for an array of cells; the pool is filled above 90 %, since errors add up with the number of the block.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kernel_cases as cases
import pytest
import torch

from ullage_engine.kernels.tables import BlockTables, CellTables
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

BLOCKS = 24


def available() -> int:
    """Bytes that can be had without swapping."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a store for each backend."""
    if request.param == "native":
        return {"kernels": request.getfixturevalue("cpu_kernels")}
    return {"kernels": request.param, "device": cases.DEVICE if request.param == "triton" else "cpu"}


def pair(layout: CacheLayout, padding: int, backend: dict[str, Any]) -> list[BlockStore]:
    """The same rows in a tight and in a padded store."""
    strides = (None, layout.block_bytes + padding)
    stores = [BlockStore(layout, BLOCKS, block_stride=stride, **backend) for stride in strides]
    for store in stores:
        store.data.fill_(cases.POISON)
        cases.filled(store, 0.95)
    return stores


def blocks_of(store: BlockStore) -> torch.Tensor:
    """The blocks' own bytes; what lies between is still poison."""
    size = store.layout.block_bytes
    assert bool((store.data[:, size:] == cases.POISON).all())
    return store.data[:, :size]


@pytest.mark.parametrize("padding", [16, 48, 4096])
@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16"])
def test_padding_changes_nothing(backend: dict[str, Any], kind: str, padding: int) -> None:
    layout = CacheLayout(2, 3, 64, 16, kind, group=32, layer_types={} if padding == 16 else {0: "bf16"})
    tight, padded = pair(layout, padding, backend)
    at = tight.data.device
    assert torch.equal(blocks_of(tight), blocks_of(padded))
    for store in (tight, padded):
        store.copy_blocks([21, 3], [23, 22])
    places = torch.tensor([3, 4, 5], device=at)  # of layer 1's heads
    ids = torch.tensor([20, 1, 19, 2], device=at)[:, None] * layout.cells_per_block + places
    fresh = torch.tensor([0, 8, 7, 9], device=at)[:, None] * layout.cells_per_block + places
    rows = torch.arange(16, device=at).repeat(ids.numel())
    for store in (tight, padded):
        sources, targets = (store.cell_offsets(cells).flatten().repeat_interleave(16) for cells in (ids, fresh))
        store.gather_cells(1, sources, rows, targets, rows)
    assert torch.equal(blocks_of(tight), blocks_of(padded))
    table = torch.tensor([[23, 0, 8, 22, 11], [7, 9, 21, 1, 5]], device=at)
    assert_equal(tight, padded, "read", 1, table, torch.float32)
    heads = torch.stack([ids[:2, h] for h in range(3)])[None]
    assert_equal(tight, padded, "read_cells", 1, heads, torch.float32)
    assert torch.equal(attended(tight, table), attended(padded, table))
    assert torch.equal(attended_cells(tight, heads), attended_cells(padded, heads))


@pytest.mark.skipif(available() < 8 << 30, reason="less than 8 GiB of memory are available")
def test_offsets_beyond_what_32_bits_hold() -> None:
    """Three blocks over 3 GiB."""
    layout = CacheLayout(2, 2, 16, 8, "fp8")
    near = BlockStore(layout, 3, cases.DEVICE, kernels="triton")
    far = BlockStore(layout, 3, cases.DEVICE, kernels="triton", block_stride=(1 << 30) + 16)
    rows = torch.randn(2, 4, 2, 16, generator=torch.Generator().manual_seed(0)).to(cases.DEVICE)
    place = torch.tensor([1, 3], device=cases.DEVICE)
    for store in (near, far):
        store.write(1, torch.tensor([23, 8, 16, 1], device=cases.DEVICE), *rows)
        cells = store.cell_offsets(torch.tensor([2 * 4 + 2, 1 * 4 + 2], device=cases.DEVICE))
        store.gather_cells(1, cells, place * 0, cells.flip(0), place)
    size = layout.block_bytes
    assert torch.equal(near.data, far.data[:, :size])
    table = torch.tensor([[2, 0, 1]], device=cases.DEVICE)
    assert_equal(near, far, "read", 1, table, torch.float32)
    one, two = (torch.tensor([block], device=cases.DEVICE) for block in (1, 2))
    far.operations.copy_blocks(far.data[:, :size], far.data[:, :size], two, one)
    assert torch.equal(far.data[1, :size], near.data[2])


def assert_equal(tight: BlockStore, padded: BlockStore, operation: str, *arguments: Any) -> None:
    for ours, wanted in zip(getattr(padded, operation)(*arguments), getattr(tight, operation)(*arguments), strict=True):
        assert torch.equal(ours, wanted)
        assert not ours.isnan().any()


def attended(store: BlockStore, table: torch.Tensor) -> torch.Tensor:
    """One query a sequence over its blocks."""
    at = table.device
    count = len(table)
    starts = torch.arange(table.shape[1], device=at).expand_as(table).contiguous() * 16
    rows = torch.tensor([77, 61], device=at)
    tables = BlockTables(torch.arange(count, device=at), table, starts, rows, rows - 1)
    return _decoded(store, tables, count)


def attended_cells(store: BlockStore, cells: torch.Tensor) -> torch.Tensor:
    """One query over cells of each head's own."""
    at = cells.device
    rows = torch.tensor([[32, 17, 20]], device=at)
    place = torch.zeros(1, dtype=torch.int64, device=at)
    return _decoded(store, CellTables(place, store.cell_offsets(cells), rows, place + 999), 1)


def _decoded(store: BlockStore, tables: BlockTables | CellTables, count: int) -> torch.Tensor:
    query = torch.randn(count, 6, 64, generator=torch.Generator().manual_seed(4)).to(store.data.device)
    out = torch.full_like(query, torch.nan)
    store.operations.paged_decode(store.views[1], tables, query, out, None, scaling=0.125)
    assert not out.isnan().any()
    return out
