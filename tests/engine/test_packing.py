"""Linear layers laid out for the CPU, against the plain way of computing them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ullage_engine.packing import PackedLinear, cpu_has_matrix_units, pack_linears


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
