"""Blocks kept for reuse hold what was computed, whatever the engine does next: idle steps and other requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import make_engine, run
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from ullage_engine import attention
from ullage_engine.engine import Engine

PROMPTS = [[at * 7 % 61 for at in range(first, first + 37)] for first in (0, 100, 200, 300)]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    made: Any = LlamaForCausalLM(config).eval()
    made.set_attn_implementation(attention.NAME)
    return made


@pytest.fixture(params=["torch", "native"])
def engine(request: pytest.FixtureRequest, model: Any) -> Engine:
    kernels = request.getfixturevalue("cpu_kernels") if request.param == "native" else "torch"
    return make_engine(model, "fp8", blocks=20, size=8, budget=24, kernels=kernels)


def cached(engine: Engine) -> dict[int, int]:
    """Generation of each block that is kept for reuse."""
    return {block: engine.pool.generation(block) for block, state in enumerate(engine.pool.states()) if state == "C"}


def test_steps_without_work_write_nothing(engine: Engine) -> None:
    store = engine._runner.store  # type: ignore[attr-defined]
    run(engine, PROMPTS[:2], 9)
    assert cached(engine)
    before = store.data.clone()
    for _ in range(5):
        assert engine.step() == []
    assert torch.equal(store.data, before)


def test_other_requests_leave_cached_blocks_alone(engine: Engine) -> None:
    store = engine._runner.store  # type: ignore[attr-defined]
    run(engine, PROMPTS[:2], 9)
    for prompt in (PROMPTS[0][:20] + PROMPTS[2], PROMPTS[3], PROMPTS[1]):  # a shared beginning, a stranger, a repeat
        held, before = cached(engine), store.data.clone()
        run(engine, [prompt], 12)
        still = [block for block, generation in cached(engine).items() if held.get(block) == generation]
        assert still
        assert torch.equal(store.data[still], before[still])
