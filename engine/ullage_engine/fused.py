"""Decoder layers of the common shape, with fewer and larger operations, for the CPU.

Of a step's time on a CPU most goes to many small operations, not to matrix products. A layer of the Llama family is
here: query, key and value as one product, gate and up as another, and what lies between them in one pass each by
`kernels.cpu`. The weights are the model's own; other architectures keep transformers' layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ullage_engine.attention import Batch, Rule, attend_packed
from ullage_engine.kernels.cpu import LANES, CpuKernels

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
"""transformers' layers that compute what `FusedLayer` does."""
Pack = Callable[[nn.Linear], nn.Module]


class FusedLayer(nn.Module):
    """One decoder layer: norm, attention, norm, gated SiLU, with residuals; inference only."""

    def __init__(self, layer: Any, kernels: CpuKernels, pack: Pack) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._layer = int(attention.layer_idx)
        self._head_size: int = attention.head_dim
        self._query_heads = attention.q_proj.out_features // self._head_size
        self._rule = Rule(scaling=attention.scaling, window=_window_of(attention))
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self._query_norm, self._key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._qkv = pack(_joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self._out = pack(attention.o_proj)
        self._gate_up = pack(_joined(mlp.gate_proj, mlp.up_proj))
        self._down = pack(mlp.down_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        ullage_batch: Batch,
        **_: object,
    ) -> torch.Tensor:
        """The layer's output [1, T, hidden]; `hidden_states` is overwritten."""
        hidden = hidden_states[0]
        normed = self._norm(self._before_attention, hidden)
        attended = self._out(self._attend(normed, position_embeddings, ullage_batch))
        normed = self._norm(self._before_mlp, attended, hidden)
        hidden += self._down(self._kernels.silu_mul(self._gate_up(normed)))
        return hidden_states

    def _norm(self, norm: Any, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.rms_norm(values, norm.weight, norm.variance_epsilon, residual)

    def _attend(self, normed: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        packed = self._qkv(normed).view(normed.shape[0], -1, self._head_size)  # [T, Hq + 2 Hkv, D]
        kv_heads = (packed.shape[1] - self._query_heads) // 2
        query, key, value = packed.split((self._query_heads, kv_heads, kv_heads), dim=1)
        for heads, norm in ((query, self._query_norm), (key, self._key_norm)):
            if norm is not None:
                heads.copy_(norm(heads))
        self._kernels.rotate(packed[:, : self._query_heads + kv_heads], rope[0][0], rope[1][0])
        out = attend_packed(self._layer, query, key, value, batch, self._rule)
        return out.view(normed.shape[0], -1)


def fuse_layers(model: Any, kernels: CpuKernels, pack: Pack) -> int:
    """Replace the layers that `FusedLayer` can stand for; returns how many.

    Args:
        pack: makes a linear layer of joined weights fast on this machine; may return it as it is.
    """
    layers = model.get_decoder().layers
    fused = 0
    for index, layer in enumerate(layers):
        if type(layer).__name__ in LAYERS and _fits(layer):
            layers[index] = FusedLayer(layer, kernels, pack)
            fused += 1
    return fused


def _fits(layer: Any) -> bool:
    """Whether sizes are whole vectors, weights are plain and of one type, and the activation is SiLU."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj)
    if any(type(linear) is not nn.Linear for linear in (*linears, mlp.down_proj)):
        return False
    if (
        len({linears[0].weight.dtype, layer.input_layernorm.weight.dtype, layer.post_attention_layernorm.weight.dtype})
        > 1
    ):
        return False
    sizes = (attention.head_dim // 2, mlp.gate_proj.out_features, layer.input_layernorm.weight.numel())
    return type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation") and all(size % LANES == 0 for size in sizes)


def _window_of(attention: Any) -> int | None:
    """Qwen's attention has its layer's own, Mistral's takes the model's; Llama's has none, whatever its config says."""
    configured = attention.config.sliding_window if type(attention).__name__ == "MistralAttention" else None
    window: int | None = getattr(attention, "sliding_window", configured)
    return window


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer whose output is the layers' outputs side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined
