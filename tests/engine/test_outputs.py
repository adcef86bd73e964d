"""Answers through the paged cache against transformers' own, on the real model and on small ones of other families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import make_engine, run, submit

from ullage_engine import attention
from ullage_engine.models import SUPPORTED

SYSTEM = "You answer in one short paragraph and never repeat the question."
QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a haiku about rain.",
    "List three uses of a paper clip.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 6?",
    "Name a famous painter and one of their works.",
    "How do I boil an egg?",
    "Give me a synonym of 'happy'.",
    "Who wrote Hamlet?",
    "What causes tides?",
    "Suggest a name for a cat.",
    "What is a prime number?",
    "Describe the taste of lemon.",
    "How far is the moon?",
    "Tell me a joke about computers.",
    "What does HTTP stand for?",
    "Write one sentence in the style of a pirate.",
    "What is the opposite of cold?",
)


@pytest.fixture(scope="module")
def prompts(smollm2: Any) -> list[list[int]]:
    texts = [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in QUESTIONS
    ]
    return [smollm2.tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def reference(smollm2: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers' own attention, one prompt at a time."""
    smollm2.model.set_attn_implementation("sdpa")
    try:
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = smollm2.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, num_beams=1
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers
    finally:
        smollm2.model.set_attn_implementation(attention.NAME)


@pytest.mark.model
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 8, "budget": 17, "sequences": 3},
        {"size": 32, "budget": 512, "sequences": 20, "reuse": False},
        {"blocks": 14, "budget": 40},  # too small for what is admitted: preemption and recomputation
    ],
    ids=["default", "small chunks", "one batch", "preempted"],
)
def test_greedy_answers_equal_transformers(
    smollm2: Any, prompts: list[list[int]], reference: list[list[int]], options: dict[str, Any]
) -> None:
    engine = make_engine(smollm2.model, **options)
    answers = run(engine, prompts, 24, frozenset({smollm2.tokenizer.eos_token_id}))
    assert answers == reference
    if options.get("blocks") == 14:
        assert engine.scheduler.tally.preemptions > 0
    if options.get("reuse", True):
        assert engine.scheduler.tally.prefix_hit_tokens > 0


@pytest.mark.model
@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16"])
def test_warm_answers_equal_cold_ones(smollm2: Any, prompts: list[list[int]], kind: str) -> None:
    engine = make_engine(smollm2.model, kind)
    cold = run(engine, prompts[:3], 12)
    hits = engine.scheduler.tally.prefix_hit_tokens
    warm = run(engine, prompts[:3], 12)
    assert engine.scheduler.tally.prefix_hit_tokens > hits
    assert warm == cold


@pytest.mark.model
def test_evicted_sequence_goes_on_at_its_true_positions(smollm2: Any, prompts: list[list[int]]) -> None:
    engine = make_engine(smollm2.model, reuse=False)
    outputs = submit(engine, "long", (prompts[0] + prompts[1] + prompts[2])[:120], 40, frozenset())
    while len(outputs) < 8:
        engine.step()
    report = engine.evict(ratio=1.0, bytes_=None, dry_run=False)
    assert report.blocks_freed >= 4
    sequence = engine.scheduler.running[0]
    while not engine.idle:
        assert sequence.computed == len(sequence.tokens) - 1
        engine.step()
    assert len(outputs) == 40
    engine.check_integrity()


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 20},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "Olmo2ForCausalLM": {},
}


def test_every_supported_family_is_tried() -> None:
    assert set(FAMILIES) == set(SUPPORTED)


def tiny(family: str) -> Any:
    import transformers

    cls: Any = getattr(transformers, family)
    config = cls.config_class(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        **FAMILIES[family],
    )
    torch.manual_seed(7)
    return cls(config).eval()


@pytest.mark.parametrize("family", SUPPORTED)
def test_families_equal_transformers(family: str) -> None:
    from transformers import AttentionInterface

    model = tiny(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 128, (length,), generator=generator).tolist() for length in (1, 15, 16, 33, 50)]
    model.set_attn_implementation("eager")
    wanted = [_greedy(model, prompt, 12) for prompt in prompts]
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model.set_attn_implementation(attention.NAME)
    assert run(make_engine(model, size=8, blocks=64, budget=20), prompts, 12) == wanted


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole context computed anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
