"""What of a model decides its memory: read from its `config.json`, from known models, or given by hand.

Parameters are counted from the shape where no weight files tell their size: embedding, attention, gated MLP, norms,
experts. Biases and norms of queries and keys are left out; they are below 0.1 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

KNOWN: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-2-7b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "mistral-7b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32768, "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Published shapes, so that a first look needs no file."""

NO_CACHE_LAYERS = frozenset({"linear_attention", "mamba", "conv", "recurrent", "moe_only"})
"""Layer types whose state does not grow with the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as its memory sees it."""

    name: str
    layers: int
    cache_layers: int
    """Layers that keep keys and values."""
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_size: int
    parameters: int
    file_bytes: int | None = None
    """Size of the weight files, where there are any."""
    latent: int | None = None
    """Width of the compressed keys and values of one layer (MLA); None: keys and values per head."""
    windowed: bool = False
    """Whether some layers attend to a window only."""

    @property
    def sharing(self) -> str:
        """How query heads share keys and values: MHA, GQA, MQA or MLA."""
        if self.latent is not None:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"


def read_model(source: str) -> ModelShape:
    """A model by a known name, its folder, or its `config.json`.

    Raises:
        InputError: there is none, or it says too little.
    """
    if source in KNOWN:
        return from_config(KNOWN[source], source)
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(KNOWN)
        raise InputError(
            f"MODEL: {file}: {error.strerror}; give a model's folder, its config.json, or one of {known}"
        ) from error
    except ValueError as error:
        raise InputError(f"MODEL: {file} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"MODEL: {file} is not a JSON object; give a model's config.json")
    name = str(config.get("_name_or_path") or file.resolve().parent.name)
    return from_config(config, name, weight_bytes(file.parent) if file.name == "config.json" else None)


def from_config(config: Mapping[str, Any], name: str, file_bytes: int | None = None) -> ModelShape:
    """A shape out of Hugging Face's keys; those of a language model inside another are found too.

    Raises:
        InputError: a key is missing or makes no sense.
    """
    text = config.get("text_config") or config.get("llm_config") or config
    layers = _count(text, name, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _count(text, name, "hidden_size", "n_embd", "d_model")
    heads = _count(text, name, "num_attention_heads", "n_head")
    kv_heads = _optional(text, "num_key_value_heads", "multi_query_kv_heads") or (
        1 if text.get("multi_query") else heads
    )
    if heads % kv_heads:
        raise InputError(f"MODEL: {name}: {heads} query heads cannot share {kv_heads} KV heads evenly")
    head_size = _optional(text, "head_dim") or hidden // heads
    intermediate = _optional(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    vocabulary = _count(text, name, "vocab_size")
    rank = _optional(text, "kv_lora_rank")
    kinds = text.get("layer_types") or ()
    return ModelShape(
        name=name,
        layers=layers,
        cache_layers=sum(kind not in NO_CACHE_LAYERS for kind in kinds) if kinds else layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        parameters=count_parameters(text, layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary),
        file_bytes=file_bytes,
        latent=None if rank is None else rank + (_optional(text, "qk_rope_head_dim") or 0),
        windowed="sliding_attention" in kinds or bool(text.get("sliding_window") and not kinds),
    )


def count_parameters(
    config: Mapping[str, Any],
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    intermediate: int,
    vocabulary: int,
) -> int:
    """Parameters of a decoder with gated MLPs."""
    attention = 2 * hidden * heads * head_size + 2 * hidden * kv_heads * head_size
    experts = _optional(config, "num_local_experts", "n_routed_experts", "num_experts")
    dense, sparse = 3 * hidden * intermediate, 0
    if experts:
        shared = (_optional(config, "n_shared_experts") or 0) * (_optional(config, "moe_intermediate_size") or 0)
        shared += _optional(config, "shared_expert_intermediate_size") or 0
        width = _optional(config, "moe_intermediate_size") or intermediate
        sparse = 3 * hidden * (experts * width + shared) + hidden * experts
    first_dense = (_optional(config, "first_k_dense_replace") or 0) if experts else layers
    embedding = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return (
        embedding + layers * (attention + 2 * hidden) + first_dense * dense + (layers - first_dense) * sparse + hidden
    )


def weight_bytes(folder: Path) -> int | None:
    """Size of the safetensors files in a model's folder; None where there are none."""
    try:
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    except OSError:
        return None
    return sum(sizes) or None


def _count(config: Mapping[str, Any], name: str, *keys: str) -> int:
    found = _optional(config, *keys)
    if found is None:
        raise InputError(f"MODEL: {name}: the config has no {keys[0]}; give a language model's config.json")
    return found


def _optional(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None or value is False:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"MODEL: config: {key} is {value!r}, not a whole number")
        if value:
            return value
    return None
