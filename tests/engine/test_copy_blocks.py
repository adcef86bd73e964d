"""Whole blocks copied within a pool and from pool to pool."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels import copy_blocks
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore


def pool(blocks: int, size: int, stride: int, seed: int) -> torch.Tensor:
    """Random bytes; blocks of `size` bytes, `stride` apart."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (blocks, stride), dtype=torch.uint8, generator=generator).to(cases.DEVICE)
    return data[:, :size]


@settings(max_examples=20)
@given(
    units=st.integers(1, 40) | st.just(20_000),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    count=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_blocks_arrive_and_their_neighbours_and_the_bytes_between_stay(
    units: int, padding: tuple[int, int], count: int, seed: int
) -> None:
    size = units * 16
    source = pool(7, size, size + padding[0] * 16, seed)
    target = pool(9, size, size + padding[1] * 16, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(7, (count,), generator=generator)  # a block may be copied twice
    targets = torch.randperm(9, generator=generator)[:count]
    base = target._base if target._base is not None else target
    wanted = base.cpu().clone()
    wanted[targets, :size] = source.cpu()[sources]
    copy_blocks.kernel(source, target, sources.to(cases.DEVICE), targets.to(cases.DEVICE))
    assert torch.equal(base.cpu(), wanted)


def test_a_block_copied_released_and_taken_again_in_one_step() -> None:
    store = cases.poisoned(CacheLayout(2, 2, 16, 8, "fp8"), 4)
    store.data.copy_(pool(4, store.data.shape[1], store.data.shape[1], 0))
    before = store.data.clone()
    store.copy_blocks([0, 1, 2], [1, 2, 3])
    assert torch.equal(store.data, before[[0, 0, 1, 2]])
    store.copy_blocks([], [])
    assert torch.equal(store.data, before[[0, 0, 1, 2]])


def test_pools_that_do_not_fit_are_refused() -> None:
    source, target = pool(2, 32, 32, 0), pool(2, 32, 32, 1)
    one = torch.zeros(1, dtype=torch.int64, device=cases.DEVICE)
    with pytest.raises(ValueError, match=r"target must be \[blocks, 32\] of uint8"):
        copy_blocks.kernel(source, target[:, :16], one, one)
    with pytest.raises(ValueError, match="source must have contiguous blocks on multiples of 16 bytes"):
        copy_blocks.kernel(pool(2, 32, 40, 0), target, one, one)
    with pytest.raises(ValueError, match="source must have contiguous blocks on multiples of 16 bytes"):
        copy_blocks.kernel(pool(2, 64, 64, 0)[:, 8:40], target, one, one)
    with pytest.raises(ValueError, match="targets must be as many as sources, 1"):
        copy_blocks.kernel(source, target, one, torch.zeros(2, dtype=torch.int64, device=cases.DEVICE))
    with pytest.raises(ValueError, match="sources must be a contiguous list of int64"):
        copy_blocks.kernel(source, target, one.int(), one)


@pytest.mark.skipif(cases.DEVICE.type != "cuda", reason="pinned memory is a GPU's")
def test_staging_in_pinned_memory_and_back() -> None:
    device = pool(4, 4096, 4096, 0)
    staging = torch.zeros((3, 4096), dtype=torch.uint8).pin_memory()
    on, off = torch.tensor([3, 1], device=cases.DEVICE), torch.tensor([0, 2])
    copy_blocks.kernel(device, staging, on, off)
    torch.cuda.synchronize()
    assert torch.equal(staging[[0, 2]], device[[3, 1]].cpu())
    assert not staging[1].any()
    copy_blocks.kernel(staging, device, off, on - 1)
    assert torch.equal(device[[2, 0]].cpu(), staging[[0, 2]])
    with pytest.raises(ValueError, match=r"target must be on cuda.*or in pinned host memory"):
        copy_blocks.kernel(device, torch.zeros((3, 4096), dtype=torch.uint8), on, off)


def test_the_reference_moves_between_stores_of_unlike_stride() -> None:
    layout = CacheLayout(1, 2, 16, 8, "bf16")
    tight, padded = BlockStore(layout, 3), BlockStore(layout, 3, block_stride=layout.block_bytes + 48)
    cases.filled(tight)
    size = layout.block_bytes
    copy_blocks.reference(tight.data, padded.data[:, :size], torch.tensor([0, 2]), torch.tensor([2, 0]))
    assert torch.equal(padded.data[[2, 0], :size], tight.data[[0, 2]])
