"""What `ullage plan` works out by formula is what the engine's own layout and sizing give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ullage_cli.plan.shape import KNOWN, from_config
from ullage_cli.plan.sums import CACHES, Blocks, Cache, activation_bytes, block_bytes, token_bytes
from ullage_engine import sizing
from ullage_engine.layout import BLOCK_SIZES, CacheLayout
from ullage_engine.quant import CACHE_TYPES, KvType

TYPES: dict[KvType, Cache] = {"bf16": CACHES[0], "fp8": CACHES[1], "int8": CACHES[2]}


def config(layers: int, kv_heads: int, shared_by: int, head_size: int) -> dict[str, int]:
    heads = kv_heads * shared_by
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "hidden_size": heads * head_size,
        "intermediate_size": 4 * heads * head_size,
        "vocab_size": 1000,
    }


@given(
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 40),
    shared_by=st.integers(1, 16),
    head_size=st.sampled_from([8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 256]),
    block=st.sampled_from(BLOCK_SIZES),
    kind=st.sampled_from(sorted(TYPES)),
    group=st.sampled_from([None, 8]),
)
def test_bytes_equal_those_of_the_engines_layout(
    layers: int, kv_heads: int, shared_by: int, head_size: int, block: int, kind: KvType, group: int | None
) -> None:
    shape = from_config(config(layers, kv_heads, shared_by, head_size), "model")
    layout = CacheLayout(layers, kv_heads, head_size, block, kind, group=group)
    blocks = Blocks(tokens=block, scale_group=group)
    assert block_bytes(shape, TYPES[kind], blocks) == layout.block_bytes
    assert token_bytes(shape, TYPES[kind], blocks) == layout.bytes_per_token


def test_element_sizes_are_the_engines() -> None:
    for kind, cache in TYPES.items():
        assert cache.element_bytes == CACHE_TYPES[kind].element_bytes
        assert cache.scaled is CACHE_TYPES[kind].quantised


def test_activations_equal_the_engines_estimate() -> None:
    shape = from_config(KNOWN["llama-3-8b"], "llama-3-8b")
    step, row = activation_bytes(shape, 512)
    told = sizing.activation_bytes(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        tokens=512,
        sequences=64,
    )
    assert step + 64 * row == told
