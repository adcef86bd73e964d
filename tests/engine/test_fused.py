"""Layers with fewer operations against transformers' own: same model, same answers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from small_engine import make_engine, run

from ullage_engine import attention, packing
from ullage_engine.fused import fuse_layers
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.packing import PackedLinear, cpu_has_matrix_units, pack_linears

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform predictions: no two logits tie within rounding
}
SLIDING = ["full_attention", "sliding_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 2),
    "llama, a window that it ignores": ("Llama", {"sliding_window": 24}, 2),
    "llama with biases": ("Llama", {"attention_bias": True}, 2),
    "mistral, sliding window": ("Mistral", {"sliding_window": 24}, 2),
    "qwen2, one layer slides": ("Qwen2", {"sliding_window": 24, "use_sliding_window": True, "layer_types": SLIDING}, 2),
    "qwen3, heads normalised": ("Qwen3", {"head_dim": 64}, 2),
    "another activation": ("Llama", {"hidden_act": "gelu"}, 0),
    "heads of half a vector": ("Llama", {"num_attention_heads": 8}, 0),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}, 0),
}  # fmt: skip


def identity(linear: torch.nn.Linear) -> torch.nn.Module:
    return linear


def tiny(variant: str) -> tuple[Any, int]:
    """A small random model set to the paged attention, and how many of its layers can be fused."""
    import transformers

    family, options, fused = VARIANTS[variant]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, values in model.named_parameters():  # weights of norms and biases that differ from nothing
        if "norm" in name or "bias" in name:
            values.data.add_(torch.randn_like(values) * 0.2)
    transformers.AttentionInterface.register(attention.NAME, attention.paged_attention)
    model.set_attn_implementation(attention.NAME)
    return model, fused


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 256, (length,), generator=generator).tolist() for length in (1, 15, 16, 33, 50)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_answers_are_the_same(cpu_kernels: CpuKernels, variant: str, kind: str) -> None:
    model, count = tiny(variant)
    wanted = run(make_engine(model, kind, size=8, blocks=64, budget=20), prompts(), 16)
    assert fuse_layers(model, cpu_kernels, identity) == count
    fused = make_engine(model, kind, size=8, blocks=64, budget=20, kernels=cpu_kernels)
    assert run(fused, prompts(), 16) == wanted
    assert fuse_layers(model, cpu_kernels, identity) == 0


@torch.inference_mode()
@pytest.mark.parametrize("variant", [name for name, (_, _, fused) in VARIANTS.items() if fused])
@pytest.mark.skipif(not cpu_has_matrix_units(), reason="this CPU has no bfloat16 products")
def test_bfloat16_layers_stay_near_float32(cpu_kernels: CpuKernels, variant: str) -> None:
    """Fused and packed in bfloat16 is about as far from float32 as transformers' own bfloat16 is.

    The median over prompts is compared: rounding now and then tips a small random model over, in either.
    """
    model, _ = tiny(variant)

    def logits(engine: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        forward = engine._runner.forward

        def noting(chunks: Any) -> torch.Tensor:
            seen.append(forward(chunks))
            return seen[-1]

        engine._runner.forward = noting
        run(engine, prompts(), 1)
        return torch.cat(seen)

    exact = logits(make_engine(model, "fp32", budget=256))
    model.bfloat16()
    plain = logits(make_engine(model, "fp32", budget=256))
    fuse_layers(model, cpu_kernels, PackedLinear)
    fused = logits(make_engine(model, "fp32", budget=256, kernels=cpu_kernels))
    assert not torch.equal(plain, exact)
    far = [(these - exact).norm(dim=1).median() for these in (fused, plain)]
    assert far[0] < 1.5 * far[1]


def test_memory_of_the_old_layers_is_given_back(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    before = sum(values.numel() for values in model.parameters())
    fuse_layers(model, cpu_kernels, identity)
    kept = {id(values): values.numel() for values in model.parameters()}
    assert sum(kept.values()) == before


def test_old_weights_go_as_they_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model must not take twice its memory while its layers are laid out anew."""
    model, _ = tiny("gemma2")
    old = [weakref.ref(child) for child in model.modules() if type(child) is torch.nn.Linear]
    alive: list[int] = []

    class Packed(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            alive.append(sum(reference() is not None for reference in old))

    monkeypatch.setattr(packing, "PackedLinear", Packed)
    assert pack_linears(model) == len(old)
    assert alive == list(range(len(old), 0, -1))


@pytest.mark.parametrize("part", ["weight", "linear"])
def test_layers_of_unlike_types_are_left_alone(cpu_kernels: CpuKernels, part: str) -> None:
    """Norms kept in float32, and linear layers that hold codes instead of weights."""
    model, _ = tiny("llama")
    layer = model.get_decoder().layers[0]
    if part == "weight":
        layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.bfloat16()
    else:
        layer.self_attn.o_proj = torch.nn.Identity()
    assert fuse_layers(model, cpu_kernels, identity) == 1
    assert model.get_decoder().layers[0] is layer
