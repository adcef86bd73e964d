"""The quality benchmark's cache: greedy answers are greedy, budgets free what they say, nothing leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eviction_cache import EvictionCache, Settings
from eviction_quality import cost_of
from transformers import LlamaConfig, LlamaForCausalLM

from ullage_engine import models
from ullage_engine.attention import NAME, paged_attention
from ullage_engine.policies import NAMES

CONTEXT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(150)]
PROMPT, ANSWER = [5, 9], [11, 12, 13, 14, 15, 16]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AttentionInterface

    torch.manual_seed(0)
    AttentionInterface.register(NAME, paged_attention)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def cache_of(model: Any, policies: tuple[str, ...], keeps: tuple[float, ...]) -> EvictionCache:
    settings = Settings(policies=policies, keeps=keeps, chunk=64, observed=16, kv_type="fp32")
    return EvictionCache(models.LoadedModel(model, None, "tiny", Path()), settings, 200, None)


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    model.set_attn_implementation("sdpa")
    said: list[int] = []
    for _ in range(count):
        said.append(int(model(torch.tensor([[*tokens, *said]])).logits[0, -1].argmax()))
    return said


@torch.inference_mode()
def test_drafting_the_answer_changes_nothing_that_is_said(model: Any) -> None:
    wanted = greedy(model, [*CONTEXT, *PROMPT], 6)
    cache = cache_of(model, (), ())
    base = cache.prefill(CONTEXT, [1])
    variants = cache.variants(base)
    sequences = [variant.sequence for variant in variants]
    for draft in (ANSWER, wanted, [*wanted[:3], *ANSWER[3:]]):
        assert cache.answers(sequences, PROMPT, draft) == [wanted]


@torch.inference_mode()
def test_budgets_free_blocks_and_give_everything_back(model: Any) -> None:
    cache = cache_of(model, NAMES, (1.0, 0.5))
    base = cache.prefill(CONTEXT, [1, 2])
    variants = cache.variants(base)
    said = cache.answers([variant.sequence for variant in variants], PROMPT, ANSWER)
    for variant, answer in zip(variants, said, strict=True):
        assert (variant.freed > 0) == (variant.keep < 1.0), variant.policy
        assert variant.keep < 1.0 or answer == said[0], "all of a context is no less than all of it"
        entries = variant.sequence.kept_tokens
        assert entries <= variant.keep * len(CONTEXT) + 1e-6
    assert len({variant.policy for variant in variants}) == 1 + len(NAMES)
    cache.release([base.sequence, *(variant.sequence for variant in variants)])
    assert cache.pool.free == cache.pool.total


@torch.inference_mode()
def test_a_question_that_was_seen_is_part_of_the_context(model: Any) -> None:
    cache = cache_of(model, ("window", "reconstruct"), (0.6,))
    base = cache.prefill(CONTEXT, [1, 2])
    asked = cache.asked(base, PROMPT)
    assert asked.sequence.computed == len(CONTEXT) + len(PROMPT) - 1
    assert asked.observed[0].positions[-1] == len(CONTEXT) + len(PROMPT) - 2
    variants = cache.variants(asked)
    said = cache.answers([variant.sequence for variant in variants], PROMPT[-1:], ANSWER)
    assert said[0] == greedy(model, [*CONTEXT, *PROMPT], 6)


@torch.inference_mode()
def test_chances_are_those_of_the_text(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([[*CONTEXT, *PROMPT, *ANSWER[:-1]]])).logits[0, -len(ANSWER) :].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(ANSWER)[:, None])[:, 0]
    cache = cache_of(model, (), ())
    variants = cache.variants(cache.prefill(CONTEXT, [1]))
    got = cache.chances(variants[0].sequence, PROMPT, ANSWER)
    assert torch.allclose(got, wanted, rtol=1e-3)


@torch.inference_mode()
def test_costs_are_of_what_was_dropped(model: Any) -> None:
    cache = cache_of(model, NAMES, (0.5,))
    base = cache.prefill(CONTEXT, [1, 2])
    cache.decode(base.sequence, 3)
    assert base.sequence.computed == len(CONTEXT)
    variants = cache.variants(base)
    for variant in variants[1:]:
        kept = variant.sequence.kept_tokens
        assert cache.costs.dropped[str(variant.policy)] == pytest.approx((len(CONTEXT) - kept) * cache.heads, abs=1)
    told = cost_of(cache)
    assert set(told["per_evicted_token"]) == set(NAMES)
    one = told["per_evicted_token"]["reconstruct"]
    step = cache.costs.decode_s / cache.costs.decode_tokens
    assert one["share_of_decode_step"] == pytest.approx((one["score_us"] + one["cut_us"]) / 1e6 / step, rel=0.05)
    assert cache.costs.decode_tokens == 3
