"""Attention on stored codes, and linear layers laid out for the CPU, against the plain way of computing them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ullage_engine.attention import GROUP_TOKENS, attend, attend_codes, make_batch
from ullage_engine.kernels.view import Section
from ullage_engine.layout import CacheLayout
from ullage_engine.packing import PackedLinear, cpu_has_matrix_units, pack_linears
from ullage_engine.quant import CACHE_TYPES, dequantise, quantise
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["fp8", "int8"]),
    count=st.integers(1, 5),
    heads=st.sampled_from([1, 2, 3]),
    repeat=st.sampled_from([1, 3, 4]),
    rows=st.sampled_from([1, 15, 16, 17, 100]),
    softcap=st.sampled_from([None, 20.0]),
    seed=st.integers(0, 99),
)
def test_codes_give_what_dequantised_values_give(
    kind: str, count: int, heads: int, repeat: int, rows: int, softcap: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(count, heads * repeat, 1, 32, generator=generator)
    # K and V differ in scale, so that a swap of the two would show
    keys = torch.randn(count, heads, rows, 32, generator=generator) * 0.5
    values = torch.randn(count, heads, rows, 32, generator=generator) * 20
    lengths = torch.randint(1, rows + 1, (count,), generator=generator)
    mask = (torch.arange(rows) < lengths[:, None]).view(count, 1, 1, rows)
    sections = [Section(*quantise(part, CACHE_TYPES[kind], 32)) for part in (keys, values)]
    plain = [dequantise(section.codes, section.scales, torch.float32) for section in sections]
    wanted = attend(query, *plain, mask, 0.3, softcap)
    got = attend_codes(query, *sections, mask, 0.3, softcap)
    # float32 sums in another order: 1e-5 of the greatest value
    assert torch.allclose(got, wanted, atol=1e-5 * 80)


def test_rows_beyond_the_mask_do_not_matter_whatever_they_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 1, 16, generator=generator)
    rows = torch.randn(2, 1, 2, 9, 16, generator=generator)
    mask = (torch.arange(9) < 4).view(1, 1, 1, 9)
    one = [Section(*quantise(part, CACHE_TYPES["fp8"], 16)) for part in rows]
    rows[:, :, :, 4:] = 1e6
    other = [Section(*quantise(part, CACHE_TYPES["fp8"], 16)) for part in rows]
    assert torch.equal(attend_codes(query, *one, mask, 0.2, None), attend_codes(query, *other, mask, 0.2, None))


@pytest.mark.skipif(not cpu_has_matrix_units(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("rows", [1, 7, 32, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_the_plain_one(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).bfloat16()
    values = torch.randn(1, rows, 96).bfloat16()
    with torch.inference_mode():
        wanted = nn.functional.linear(values.float(), linear.weight.float(), None if not bias else linear.bias.float())
        got = PackedLinear(linear)(values)
    assert got.dtype == torch.bfloat16
    assert got.shape == wanted.shape
    # bfloat16 keeps 8 bits: half a unit in the last place of a sum of float32 products
    assert torch.allclose(got.float(), wanted, rtol=1 / 128, atol=1e-2)


@pytest.mark.skipif(not cpu_has_matrix_units(), reason="this CPU has no bfloat16 products")
def test_every_linear_of_a_model_is_packed_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())).bfloat16()
    assert pack_linears(model) == 2
    assert pack_linears(model) == 0
    assert not [module for module in model.modules() if type(module) is nn.Linear]


def test_decoding_sequences_are_grouped_by_context_and_bounded() -> None:
    layout = CacheLayout(1, 1, 16, 16)
    store = BlockStore(layout, 1)
    lengths = [1, 15, 16, 17, 100, 130, 4000, *[1000] * 40]
    chunks = []
    for i, length in enumerate(lengths):
        request = GenerationRequest(request_id=str(i), prompt=(1,), sampling=SamplingParams(max_tokens=1))
        sequence = Sequence(request, lambda output: None, i, [0] * (length + 1), 16)
        sequence.append_blocks([0] * layout.blocks_for(length + 1))
        sequence.computed = length
        chunks.append(Chunk(sequence, 1))
    groups = make_batch(store, chunks, torch.device("cpu")).groups
    assert sorted(int(row) for group in groups for row in group.rows) == list(range(len(lengths)))
    for group in groups:
        own = [layout.blocks_for(lengths[int(row)] + 1) for row in group.rows]
        assert group.tables.shape[1] < 2 * min(own) or group.tables.shape[1] == 1
        assert group.tables.numel() * 16 <= GROUP_TOKENS or len(own) == 1
