"""Geometry of blocks and what survives a trip through them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.errors import ConfigError
from ullage_engine.layout import ALIGN, BLOCK_SIZES, CacheLayout
from ullage_engine.quant import CACHE_TYPES, dequantise, quantise
from ullage_engine.store import BlockStore

TYPES = tuple(CACHE_TYPES)


def test_published_formula_of_bytes_per_token() -> None:
    # 2 (K and V) x layers x KV heads x head size x bytes, plus a float32 scale per (token, head, group)
    llama3 = CacheLayout(layers=32, kv_heads=8, head_size=128, kv_type="bf16")
    assert llama3.bytes_per_token == 2 * 32 * 8 * 128 * 2
    smollm2 = CacheLayout(layers=30, kv_heads=3, head_size=64, kv_type="fp8")
    assert smollm2.bytes_per_token == 2 * 30 * 3 * (64 + 4) == 12_240


def test_grouped_queries_in_fp8_save_seven_eighths() -> None:
    half, one = CacheLayout(32, 32, 128, kv_type="bf16"), CacheLayout(32, 8, 128, kv_type="fp8")
    scales = 2 * 32 * 8 * 4
    assert 1 - (one.bytes_per_token - scales) / half.bytes_per_token == 0.875


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_cells_tile_the_block_without_gap_or_overlap(kind: str, size: int) -> None:
    layout = CacheLayout(3, 2, 40, size, kind, group=8, layer_types={1: "bf16"})
    at = 0
    for layer, cell in enumerate(layout.cells):
        for head in range(2):
            assert layout.cell_offset(layer, head) == at
            assert at % ALIGN == 0
            at += cell.size
    assert at == layout.block_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_tokens": 12}, "block size 12"),
        ({"group": 48}, "scale group 48"),
        ({"layer_types": {7: "bf16"}}, r"layers \[7\]"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheLayout(**{"layers": 2, "kv_heads": 1, "head_size": 64, **change})


def test_no_rows_are_no_trouble() -> None:
    store = BlockStore(CacheLayout(1, 2, 16, 8, "fp8"), 1)
    nothing = torch.empty(0, dtype=torch.int64)
    store.write(0, nothing, torch.empty(0, 2, 16), torch.empty(0, 2, 16))
    assert not store.data.any()
    for values in store.read(0, nothing.view(0, 1), torch.float32):
        assert values.shape == (0, 2, 8, 16)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(TYPES),
    size=st.sampled_from(BLOCK_SIZES),
    heads=st.integers(1, 3),
    width=st.sampled_from([16, 40, 64]),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_rows_come_back_from_their_slots(kind: str, size: int, heads: int, width: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = CacheLayout(2, heads, width, size, kind, layer_types={0: "bf16"})
    store = BlockStore(layout, 16)
    store.data.random_(0, 119, generator=generator)  # stale bytes, none of them a NaN code
    count = layout.blocks_for(tokens)
    blocks = torch.randperm(16, generator=generator)[:count]
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:tokens]
    keys, values = torch.randn(2, tokens, heads, width, generator=generator) * torch.tensor([1.0, 30.0]).view(
        2, 1, 1, 1
    )
    before = store.data.clone()
    store.write(1, slots, keys, values)
    got_keys, got_values = store.read(1, blocks[None], torch.float32)
    for rows, got in ((keys, got_keys), (values, got_values)):
        codes, scales = quantise(rows, CACHE_TYPES[kind], layout.group_size)
        assert torch.equal(got[0, :, :tokens].transpose(0, 1), dequantise(codes, scales, torch.float32))
    others = [block for block in range(16) if block not in blocks.tolist()]
    assert torch.equal(store.data[others], before[others]), "a block that was not addressed changed"
    first_layer = layout.layer_offsets[1]
    assert torch.equal(store.data[:, :first_layer], before[:, :first_layer]), "another layer changed"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_quantising_keeps_the_peak_and_bounds_the_error(kind: str) -> None:
    cache = CACHE_TYPES[kind]
    values = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(1)) * 50
    codes, scales = quantise(values, cache, 32)
    assert scales is not None and scales.shape == (100, 2, 2)
    back = dequantise(codes, scales, torch.float32)
    peak = values.view(100, 2, 2, 32).abs().amax(-1)
    assert torch.allclose(back.view(100, 2, 2, 32).abs().amax(-1), peak, rtol=1e-6)
    # e4m3 keeps 3 mantissa bits: half a unit in the last place is 2^-4 of the value; int8 rounds to half a step
    bound = values.abs() / 16 + 1e-3 if kind == "fp8" else (scales / 2 + 1e-6).repeat_interleave(32, -1)
    assert ((back - values).abs() <= bound).all()


def test_fp8_codes_are_torchs_own_and_never_overflow() -> None:
    values = torch.tensor([[448.0, -448.0, 500.0, 1e-30] * 4])
    codes, scales = quantise(values, CACHE_TYPES["fp8"], 16)
    assert scales is not None
    assert torch.equal(
        codes.view(torch.uint8), (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert torch.isfinite(dequantise(codes, scales, torch.float32)).all()


def test_every_fp8_number_decodes_as_torch_does() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).view(1, -1)
    assert torch.equal(dequantise(numbers, torch.ones(1, 1), torch.float32), numbers.float())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_models_nan_is_not_turned_into_a_number(kind: str) -> None:
    values = torch.ones(1, 1, 64)
    values[..., 5] = float("nan")
    codes, scales = quantise(values, CACHE_TYPES[kind], 32)
    back = dequantise(codes, scales, torch.float32)
    assert back[..., :32].isnan().all()
    assert torch.isfinite(back[..., 32:]).all()


def test_all_zero_rows_stay_zero() -> None:
    for kind in ("fp8", "int8"):
        codes, scales = quantise(torch.zeros(3, 1, 64), CACHE_TYPES[kind], 64)
        assert not dequantise(codes, scales, torch.float32).any()


def test_one_strong_channel_leaves_the_others_their_range() -> None:
    values = torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(2))
    values[..., 3] += 300
    codes, scales = quantise(values, CACHE_TYPES["fp8"], 64)
    rest = [channel for channel in range(64) if channel != 3]
    noise = (dequantise(codes, scales, torch.float32) - values)[..., rest].pow(2).mean()
    assert 10 * torch.log10(values[..., rest].pow(2).mean() / noise) > 25  # decibels; scaling to 1 instead gives 5
