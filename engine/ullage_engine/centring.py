"""Mean keys of a model, to be subtracted before keys are quantised.

Some models (the Qwen2.5 family) add a large constant to a few key channels. A float8 code keeps a relative error, so
such a channel alone drowns what distinguishes the keys. Softmax ignores a vector common to all keys of a head, so it
may be left out of the cache. It is measured once, on a fixed sample of the vocabulary, at the positions it is used at
(after RoPE): channels that rotate slowly, where such constants matter, keep their mean.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn import functional

NAME = "ullage_key_means"
SAMPLE_TOKENS = 256


def key_means(model: Any) -> torch.Tensor:
    """Mean key of each head, [layers, kv_heads, head_size] float32; leaves the model's attention as it was."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _observe)
    before = model.config._attn_implementation
    means: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, SAMPLE_TOKENS), generator=generator)
    model.set_attn_implementation(NAME)
    try:
        with torch.inference_mode():
            model(tokens.to(model.device), use_cache=False, logits_to_keep=1, ullage_means=means)
    finally:
        model.set_attn_implementation(before)
    return torch.stack([means[layer] for layer in sorted(means)])


def fingerprint(centre: torch.Tensor) -> str:
    """Short id of a set of means, for the salt of the prefix index: blocks centred otherwise are other blocks."""
    return hashlib.blake2b(centre.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _observe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ullage_means: dict[int, torch.Tensor],
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Plain causal attention that notes the mean key; arguments as in `attention.paged_attention`."""
    ullage_means[int(module.layer_idx)] = key[0].float().mean(1)  # type: ignore[arg-type]
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None
