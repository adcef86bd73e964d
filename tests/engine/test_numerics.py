"""The invariant mode: a sequence's logits are the same to the bit, whatever else the engine does."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from small_engine import make_engine, submit
from test_fused import VARIANTS, tiny
from torch import nn

from ullage_engine.fused import fuse_layers
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.numerics import InvariantLinear, make_invariant
from ullage_engine.packing import PackedLinear, cpu_has_matrix_units, pack_linears

COUNT = 8


def prompts() -> list[list[int]]:
    random = Random(4)
    lengths = (1, 13, 16, 17, 40)
    shared = [random.randrange(256) for _ in range(24)]
    own = [[random.randrange(256) for _ in range(length)] for length in lengths]
    return [*own, [*shared, 1], [*shared, 2, 3]]


def logits(model: Any, seed: int | None, kind: str, kernels: Any) -> list[torch.Tensor]:
    """[COUNT, V] of each prompt, one at a time (None) or in a scene of the seed's."""
    random = Random(seed)
    alone = seed is None
    engine = make_engine(
        model,
        kind,
        blocks=300 if alone else random.choice((26, 60)),
        size=8,
        budget=512 if alone else random.choice((9, 24, 96)),
        sequences=1 if alone else random.randint(2, 9),
        reuse=not alone,
        kernels=kernels,
        invariant=True,
    )
    asked = prompts()
    rows: list[list[torch.Tensor]] = [[] for _ in asked]
    forward = engine._runner.forward

    def noting(chunks: list[Any]) -> torch.Tensor:
        result = forward(chunks)
        for chunk, row in zip([chunk for chunk in chunks if chunk.completes], result, strict=True):
            rows[int(chunk.sequence.request_id[1:])].append(row)
        return result

    engine._runner.forward = noting  # type: ignore[method-assign]
    order = random.sample(range(len(asked)), len(asked))
    while order or not engine.idle:
        if order and (engine.idle or random.random() < 0.6):
            index = order.pop()
            submit(engine, f"r{index}", asked[index], COUNT, frozenset())
        if not alone and engine.scheduler.running and random.random() < 0.05:
            engine.scheduler.preempt(random.choice(engine.scheduler.running))
        engine.step()
    return [torch.stack(found) for found in rows]


def check(model: Any, kind: str, kernels: Any, scenes: int = 2) -> None:
    wanted = logits(model, None, kind, kernels)
    for seed in range(scenes):
        for index, found in enumerate(logits(model, seed, kind, kernels)):
            assert torch.equal(found, wanted[index]), f"prompt {index} in scene {seed}"


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("llama", "fp32"), ("qwen2, one layer slides", "fp8"), ("qwen3, heads normalised", "fp8"), ("gemma2", "fp8")],
)
def test_logits_are_the_same_to_the_bit_with_torch_alone(variant: str, kind: str) -> None:
    model, _ = tiny(variant)
    make_invariant(model)
    check(model, kind, None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_same_to_the_bit_with_compiled_kernels(cpu_kernels: CpuKernels, variant: str) -> None:
    model, _ = tiny(variant)
    fuse_layers(model, cpu_kernels, lambda linear: linear)
    make_invariant(model)
    check(model, "fp8", cpu_kernels)


@pytest.mark.skipif(not cpu_has_matrix_units(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("native", [True, False])
def test_logits_are_the_same_to_the_bit_in_bfloat16(cpu_kernels: CpuKernels, native: bool) -> None:
    model, _ = tiny("llama")
    model.bfloat16()
    if native:
        fuse_layers(model, cpu_kernels, PackedLinear)
    pack_linears(model)
    make_invariant(model)
    check(model, "fp8", cpu_kernels if native else None)


def test_the_mode_is_needed() -> None:
    """Without it the same scenes differ, or the tests above would prove nothing."""
    model, _ = tiny("llama")
    with pytest.raises(AssertionError, match="in scene"):
        check(model, "fp32", None)


def test_every_layer_is_wrapped_once() -> None:
    model, _ = tiny("gemma2")
    layers = sum(type(child) is nn.Linear for child in model.modules())
    assert make_invariant(model) == layers
    assert make_invariant(model) == 0


class PlaceDependent(nn.Linear):
    """Rounds every other row of a batch differently."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = super().forward(values)
        result[1::2] *= 1 + 1e-6
        return result


@torch.inference_mode()
def test_rows_are_multiplied_one_by_one_where_their_place_shows() -> None:
    torch.manual_seed(1)
    inner = PlaceDependent(32, 48)
    linear = InvariantLinear(inner, inner.weight)
    assert linear.tile == 1
    values = torch.randn(2, 21, 32)
    wanted = torch.cat([inner(row[None]) for row in values.view(-1, 32)]).view(2, 21, 48)
    assert torch.equal(linear(values), wanted)
