"""Cells of split blocks: their books, their addresses, and per-head reading."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ullage_engine.cells import CellPool
from ullage_engine.errors import PoolExhausted
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.store import BlockStore

MIXED = CacheLayout(layers=3, kv_heads=2, head_size=16, block_tokens=8, kv_type="fp8", layer_types={1: "bf16"})


def make(blocks: int = 6, layout: CacheLayout = MIXED) -> tuple[BlockPool, CellPool]:
    pool = BlockPool(blocks, layout.block_tokens, PrefixIndex("salt", layout.block_tokens))
    return pool, CellPool(pool, layout.cell_classes)


def test_classes_follow_the_cache_types() -> None:
    assert MIXED.cell_classes == ((0, 1, 4, 5), (2, 3))
    assert CacheLayout(2, 2, 16).cell_classes == ((0, 1, 2, 3),)


def test_cells_come_from_partly_used_blocks_first() -> None:
    pool, cells = make()
    first = cells.allocate([1, 0])
    assert (pool.active, cells.usage().used) == (1, 1)
    more = cells.allocate([3, 2])
    assert pool.active == 1
    assert cells.usage().waste == 0.0
    assert cells.release(first[0] + more[0]) == 0
    assert cells.release(more[1]) == 1
    assert pool.free == pool.total


def test_exhaustion_changes_nothing() -> None:
    pool, cells = make(2)
    with pytest.raises(PoolExhausted, match="3 blocks to split wanted, 2 available"):
        cells.allocate([9, 1])
    assert pool.free == 2
    assert cells.usage().blocks == 0


def test_unequal_counts_are_packed_into_few_blocks() -> None:
    pool, cells = make(8, CacheLayout(layers=2, kv_heads=2, head_size=16))
    cells.allocate([4 + 1 + 1 + 2])  # four heads with 4, 1, 1 and 2 cells: 2 blocks instead of the 4 of a dense table
    assert pool.active == 2


def test_addresses_tile_the_store() -> None:
    sizes = [MIXED.cells[place // 2].size for place in range(6)]
    offsets = BlockStore(MIXED, 2).cell_offsets(torch.arange(12)).tolist()
    at = 0
    for cell in range(12):
        assert offsets[cell] == at
        at += sizes[cell % 6]
    assert at == 2 * MIXED.block_bytes


@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize("native", [False, True])
def test_per_head_reading_equals_dense_reading_of_the_same_cells(
    cpu_kernels: CpuKernels, kind: str, size: int, native: bool
) -> None:
    layout = CacheLayout(3, 2, 32, size, kind, layer_types={1: "bf16"})
    store = BlockStore(layout, 5, "cpu", None, cpu_kernels if native else "torch")
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(5 * size)
    for layer in range(3):
        store.write(layer, slots, *torch.randn(2, 5 * size, 2, 32, generator=generator))
    blocks = torch.tensor([[3, 0], [4, 1]])
    for layer in range(3):
        dense = store.read(layer, blocks, torch.float32)
        cells = torch.stack([blocks * layout.cells_per_block + layer * 2 + head for head in range(2)], dim=1)
        for ours, wanted in zip(store.read_cells(layer, cells, torch.float32), dense, strict=True):
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize("native", [False, True])
def test_heads_may_keep_different_cells_of_any_place_of_their_class(cpu_kernels: CpuKernels, native: bool) -> None:
    layout = CacheLayout(2, 2, 16, 8, "fp8")
    store = BlockStore(layout, 3, "cpu", None, cpu_kernels if native else "torch")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 24, 2, 16, generator=generator)
    store.write(0, torch.arange(24), *rows)
    # head 0 of layer 1 is given the cells that layer 0 filled: places are interchangeable within a class
    cells = torch.tensor([[[0, 8], [4 + 1, 0 + 1]]])
    keys, _ = store.read_cells(1, cells, torch.float32)
    dense, _ = store.read(0, torch.tensor([[0, 1, 2]]), torch.float32)
    assert torch.equal(keys[0, 0], dense[0, 0, [*range(8), *range(16, 24)]])
    assert torch.equal(keys[0, 1], dense[0, 1, [*range(8, 16), *range(8)]])


def test_copied_block_is_equal_to_the_last_byte() -> None:
    store = BlockStore(MIXED, 4)
    store.data.random_(0, 255)
    store.copy_blocks([0, 1], [3, 2])
    assert torch.equal(store.data[3], store.data[0])
    assert torch.equal(store.data[2], store.data[1])


class CellMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cells = make(5)
        self.held: list[list[int]] = []
        self.dense: list[int] = []

    @rule(target=tables, counts=st.tuples(st.integers(0, 9), st.integers(0, 5)))
    def allocate(self, counts: tuple[int, int]) -> object:
        if self.cells.needed_blocks(counts) > self.pool.available:
            return multiple()
        table = [cell for part in self.cells.allocate(counts) for cell in part]
        assert len(table) == sum(counts)
        self.held.append(table)
        return table

    @rule(table=consumes(tables), share=st.integers(0, 9))
    def release(self, table: list[int], share: int) -> None:
        self.held = [other for other in self.held if other is not table]
        kept = table[: min(share, len(table))]
        self.cells.release(table[len(kept) :])
        if kept:
            self.held.append(kept)

    @rule(budget=st.integers(0, 5))
    def mend(self, budget: int) -> None:
        """As many blocks as counts by class allow become whole, by moves within classes into free cells."""
        used, spare = self.cells.used_by_class(), self.cells.spare_blocks()
        classes = [set(places) for places in self.cells.classes]
        needed = max(-(-count // len(places)) for count, places in zip(used, classes, strict=True))
        assert spare == self.cells.usage().blocks - needed
        moves = self.cells.mending()
        assert len(moves) == spare
        for one in moves[:budget]:
            place = {cell: cell % self.cells.cells_per_block for pair in one.items() for cell in pair}
            assert all(any({place[a], place[b]} <= places for places in classes) for a, b in one.items())
            free = self.pool.free
            assert self.cells.move(one) == 1
            assert self.pool.free == free + 1
            for table in self.held:
                table[:] = [one.get(cell, cell) for cell in table]
        assert self.cells.spare_blocks() == max(0, spare - budget)

    @rule()
    def dense_sequence_takes_a_block(self) -> None:
        if self.pool.available:
            self.dense += self.pool.allocate(1)

    @invariant()
    def books_agree(self) -> None:
        self.cells.check_integrity(self.held)
        self.pool.check_integrity([self.dense, self.cells.blocks])

    def teardown(self) -> None:
        for table in self.held:
            self.cells.release(table)
        self.pool.release(self.dense)
        assert self.pool.free == self.pool.total


CellMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestCellMachine = CellMachine.TestCase
