"""Rows of cells copied into other cells."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels import gather_cells
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import CACHE_TYPES
from ullage_engine.store import BlockStore


@pytest.mark.parametrize("head_size", [48, 5])
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_survivors_of_dense_blocks_come_in_order_and_nothing_else_changes(kind: str, head_size: int) -> None:
    layout = CacheLayout(3, 2, head_size, 8, kind, layer_types={1: "bf16"})
    store = cases.filled(BlockStore(layout, 6))
    survivors = {0: [0, 3, 9, 10, 23], 1: [1, 22]}  # by head, of a sequence in blocks 4, 0, 5
    table = torch.tensor([[4, 0, 5]])
    fresh = {0: [1 * 6 + 4], 1: [1 * 6 + 5]}  # layer 2's cells of block 1
    dense = store.read(2, table, torch.float32)
    before = store.data.clone()
    at = store.views[2].cell_offsets(table)[0]  # [H, B]
    for head, rows in survivors.items():
        kept = torch.tensor(rows)
        targets = store.cell_offsets(torch.tensor(fresh[head])).expand(len(rows)).contiguous()
        store.gather_cells(2, at[head][kept // 8], kept % 8, targets, torch.arange(len(rows)))
        got = store.read_cells(2, torch.tensor([[fresh[head]]]), torch.float32)
        for ours, wanted in zip(got, dense, strict=True):
            assert torch.equal(ours[0, 0, : len(rows)], wanted[0, head, rows])
    changed = (store.data != before).nonzero()
    assert set(changed[:, 0].tolist()) == {1}
    assert changed[:, 1].min() >= layout.cell_offset(2, 0)


def moves(layout: CacheLayout, blocks: int, count: int, seed: int) -> tuple[int, list[torch.Tensor]]:
    """A layer, and so many moves from rows of one half of the blocks' cells of its class to the other half's."""
    generator = torch.Generator().manual_seed(seed)
    layer = layout.layers - 1
    places = torch.tensor(next(c for c in layout.cell_classes if layer * layout.kv_heads in c))
    store = BlockStore(layout, 1)

    def rows(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(first, last)[:, None] * layout.cells_per_block + places
        every = torch.randperm(ids.numel() * layout.block_tokens, generator=generator)[:count]
        return store.cell_offsets(ids.flatten()[every // layout.block_tokens]), every % layout.block_tokens

    return layer, [*rows(0, blocks // 2), *rows(blocks // 2, blocks)]


@settings(max_examples=20)
@given(layout=cases.layouts(), count=st.sampled_from(cases.LENGTHS[:-1]) | st.just(0), seed=st.integers(0, 99))
def test_the_kernel_moves_the_bytes_that_the_reference_moves(layout: CacheLayout, count: int, seed: int) -> None:
    ours = cases.filled(cases.poisoned(layout, 8))
    wanted = cases.cpu_copy(ours)
    layer, lists = moves(layout, 8, count, seed)
    ours.gather_cells(layer, *(items.to(cases.DEVICE) for items in lists))
    gather_cells.reference(wanted.views[layer], *lists)
    assert torch.equal(ours.data.cpu(), wanted.data)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_thousands_of_rows_in_one_call(kind: str) -> None:
    layout = CacheLayout(4, 8, 64, 16, kind)
    ours = cases.filled(cases.poisoned(layout, 20))
    wanted = cases.cpu_copy(ours)
    layer, lists = moves(layout, 20, cases.LENGTHS[-1], 5)
    ours.gather_cells(layer, *(items.to(cases.DEVICE) for items in lists))
    gather_cells.reference(wanted.views[layer], *lists)
    assert torch.equal(ours.data.cpu(), wanted.data)
    moved = wanted.data != cases.filled(cases.poisoned(layout, 20)).data.cpu()
    assert moved.sum() > cases.LENGTHS[-1]


def test_rows_of_odd_bytes_are_moved_too() -> None:
    layout = CacheLayout(1, 2, 5, 8, "fp8")
    ours = cases.filled(cases.poisoned(layout, 4))
    wanted = cases.cpu_copy(ours)
    layer, lists = moves(layout, 4, 16, 0)
    ours.gather_cells(layer, *(items.to(cases.DEVICE) for items in lists))
    gather_cells.reference(wanted.views[layer], *lists)
    assert torch.equal(ours.data.cpu(), wanted.data)


def test_lists_that_do_not_fit_are_refused() -> None:
    layout = CacheLayout(1, 1, 16, 8, "fp8")
    store = cases.poisoned(layout, 2)
    rows = torch.zeros(2, dtype=torch.int64, device=cases.DEVICE)
    with pytest.raises(ValueError, match="target_rows must be as many as sources, 2"):
        gather_cells.kernel(store.views[0], rows, rows, rows, rows[:1])
    with pytest.raises(ValueError, match="source_rows must be a contiguous list of int64"):
        gather_cells.kernel(store.views[0], rows, rows.int(), rows, rows)
