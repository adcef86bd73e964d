"""Rows of cells copied into other cells."""

from __future__ import annotations

import pytest
import torch

from ullage_engine.layout import CacheLayout
from ullage_engine.quant import CACHE_TYPES
from ullage_engine.store import BlockStore


def filled(layout: CacheLayout, blocks: int) -> BlockStore:
    """A store of distinct rows."""
    store = BlockStore(layout, blocks)
    generator = torch.Generator().manual_seed(0)
    tokens = blocks * layout.block_tokens
    for layer in range(layout.layers):
        rows = torch.randn(2, tokens, layout.kv_heads, layout.head_size, generator=generator)
        store.write(layer, torch.arange(tokens), *rows)
    return store


@pytest.mark.parametrize("head_size", [48, 5])
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_survivors_of_dense_blocks_come_in_order_and_nothing_else_changes(kind: str, head_size: int) -> None:
    layout = CacheLayout(3, 2, head_size, 8, kind, layer_types={1: "bf16"})
    store = filled(layout, 6)
    survivors = {0: [0, 3, 9, 10, 23], 1: [1, 22]}  # by head, of a sequence in blocks 4, 0, 5
    table = torch.tensor([[4, 0, 5]])
    fresh = {0: [1 * 6 + 4], 1: [1 * 6 + 5]}  # layer 2's cells of block 1
    dense = store.read(2, table, torch.float32)
    expected = store.data.clone()
    at = store.views[2].cell_offsets(table)[0]  # [H, B]
    for head, rows in survivors.items():
        kept = torch.tensor(rows)
        targets = store.cell_offsets(torch.tensor(fresh[head])).expand(len(rows))
        store.gather_cells(2, at[head][kept // 8], kept % 8, targets, torch.arange(len(rows)))
        got = store.read_cells(2, torch.tensor([[fresh[head]]]), torch.float32)
        for ours, wanted in zip(got, dense, strict=True):
            assert torch.equal(ours[0, 0, : len(rows)], wanted[0, head, rows])
    changed = (store.data != expected).nonzero()
    assert set(changed[:, 0].tolist()) == {1}
    assert changed[:, 1].min() >= layout.cell_offset(2, 0)
