"""Fifty prompts of mixed lengths give transformers' own greedy answers, whatever the engine does meanwhile.

Each scene draws batch composition, arrival times, chunk and block size, prefix reuse, pool size, forced preemptions
and evictions of cached blocks from its seed. An answer is proved against transformers by one ordinary forward pass
over prompt and answer: at every generated position the token must be that pass's argmax, which by induction is what
greedy generation gives. ULLAGE_TEST_SCENES sets the number of scenes on the tiny model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from ullage_engine import attention
from ullage_engine.cells import CellPool
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.layout import CacheLayout
from ullage_engine.models import shape_of
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore

SCENES = int(os.environ.get("ULLAGE_TEST_SCENES", "16"))
PROMPTS = 50
LONGEST = 300
Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a server may do to the same requests."""

    seed: int
    block_tokens: int
    budget: int
    sequences: int
    reuse: bool
    blocks: int
    preempt: float
    """Chance before each step that a running sequence is preempted by force."""
    evict: float
    """Chance before each step that all cached blocks are dropped."""

    @classmethod
    def draw(cls, seed: int) -> Scene:
        random = Random(seed)
        size = random.choice((8, 16, 32))
        sequences = random.randint(1, 24)
        least = -(-(LONGEST + 32) // size)
        return cls(
            seed=seed,
            block_tokens=size,
            budget=max(sequences, random.choice((8, 17, 64, 200, 512))),
            sequences=sequences,
            reuse=random.random() < 0.75,
            blocks=least + random.choice((1, least // 2, 8 * least)),
            preempt=random.choice((0.0, 0.02, 0.1)),
            evict=random.choice((0.0, 0.05)),
        )


@dataclass(slots=True)
class Play:
    """How a scene went."""

    answers: Answers
    preemptions: int
    hits: int
    steps: int


def play(model: Any, prompts: list[list[int]], scene: Scene, *, count: int, kind: str = "fp32") -> Play:
    """All prompts, in an order and at times of the scene's own."""
    random = Random(scene.seed + 1)
    engine = build(model, scene, kind)
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    coming = random.sample(range(len(prompts)), len(prompts))
    sampling = SamplingParams(max_tokens=count, temperature=0)
    while coming or not engine.idle:
        while coming and (engine.idle or random.random() < 0.5):
            index = coming.pop()
            request = GenerationRequest(request_id=f"r{index}", prompt=tuple(prompts[index]), sampling=sampling)
            engine.add(request, outputs[index].append)
        interfere(engine, scene, random)
        engine.step()
    engine.check_integrity()
    assert engine.pool.active == 0
    tally = engine.scheduler.tally
    answers = [[o.token for o in received if o.token is not None] for received in outputs]
    return Play(answers, tally.preemptions, tally.prefix_hit_tokens, engine.steps)


def interfere(engine: Engine, scene: Scene, random: Random) -> None:
    if engine.scheduler.running and random.random() < scene.preempt:
        engine.scheduler.preempt(random.choice(engine.scheduler.running))
    if random.random() < scene.evict:
        engine.evict(ratio=1.0, bytes_=None, dry_run=False)


def build(model: Any, scene: Scene, kind: str) -> Engine:
    shape = shape_of(model.config)
    layout: Any = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, scene.block_tokens, kind)  # type: ignore[arg-type]
    pool = BlockPool(scene.blocks, scene.block_tokens, PrefixIndex("mixed", scene.block_tokens))
    return Engine(
        identity=EngineIdentity(model="mixed", version="0"),
        runner=ModelRunner(model, BlockStore(layout, scene.blocks), torch.device("cpu")),
        pool=pool,
        scheduler=Scheduler(
            pool,
            max_batch_tokens=scene.budget,
            max_sequences=scene.sequences,
            prefix_reuse=scene.reuse,
            cells=CellPool(pool, layout.cell_classes),
        ),
        # eviction may take what nobody holds, never a live sequence's rows: those would change its answer
        protection=Protection(first_tokens=1 << 20, recent_tokens=0),
    )


def mixed_prompts(words: list[int], random: Random) -> list[list[int]]:
    """Lengths 1 to LONGEST, the edges of blocks among them; each third shares its beginning with others."""
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, LONGEST]
    lengths += [int(LONGEST ** random.uniform(0.3, 0.95)) for _ in range(PROMPTS - len(lengths))]
    shared = words[:70]
    prompts = []
    for index, length in enumerate(lengths):
        start = random.randrange(len(words) - LONGEST)
        own = words[start : start + length]
        prompts.append((shared + own)[:length] if index % 3 == 0 else own)
    return prompts


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Transformers' attention in place of the paged one."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


@torch.inference_mode()
def margins(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """By how much each answered token's logit is below the greatest, in one ordinary pass: 0.0 where it is greedy."""
    ids = torch.tensor([prompt + answer[:-1]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return logits.amax(-1) - chosen


def worst(model: Any, prompts: list[list[int]], answers: Answers) -> float:
    with own_attention(model):
        found = [margins(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return float(torch.cat(found).max())


def tiny(dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
        initializer_range=0.2,  # far from uniform predictions: no two logits tie within rounding
    )
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model: Any = LlamaForCausalLM(config).eval().to(dtype)
    model.set_attn_implementation(attention.NAME)
    return model


@pytest.fixture(scope="module")
def tiny_llama() -> Any:
    return tiny(torch.float32)


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    random = Random(2)
    return mixed_prompts([random.randrange(512) for _ in range(4000)], random)


@pytest.fixture(scope="module")
def tiny_answers(tiny_llama: Any, tiny_prompts: list[list[int]]) -> Answers:
    """Answers of one plain scene, proved greedy."""
    scene = Scene(0, 16, 512, 1, False, 64, 0.0, 0.0)
    answers = play(tiny_llama, tiny_prompts, scene, count=10).answers
    assert [len(answer) for answer in answers] == [10] * PROMPTS
    assert worst(tiny_llama, tiny_prompts, answers) == 0.0
    return answers


@pytest.mark.parametrize("seed", range(SCENES))
def test_any_scene_gives_transformers_greedy_answers(
    tiny_llama: Any, tiny_prompts: list[list[int]], tiny_answers: Answers, seed: int
) -> None:
    scene = Scene.draw(seed)
    assert play(tiny_llama, tiny_prompts, scene, count=10).answers == tiny_answers, scene


def test_the_scenes_reach_what_they_are_for(tiny_llama: Any, tiny_prompts: list[list[int]]) -> None:
    scenes = [Scene.draw(seed) for seed in range(16)]
    assert {scene.block_tokens for scene in scenes} == {8, 16, 32}
    assert {scene.reuse for scene in scenes} == {True, False}
    forced = Scene(1, 8, 17, 6, True, 44, 0.1, 0.05)
    found = play(tiny_llama, tiny_prompts, forced, count=10)
    assert found.preemptions > 10
    assert found.hits > 100
    assert min(map(len, tiny_prompts)) == 1
    assert max(map(len, tiny_prompts)) == LONGEST


@pytest.mark.parametrize("seed", range(3))
def test_bf16_model_and_cache_choose_within_rounding_of_transformers(tiny_prompts: list[list[int]], seed: int) -> None:
    """In bfloat16 sums depend on the shape of the batch, in transformers as here, so near ties may fall either way.

    What holds: a BF16 cache adds no error of its own (the model's keys and values are bfloat16 already), so every
    token chosen is the greatest of transformers' logits up to rounding: logits are below 8, where neighbouring
    bfloat16 numbers are 2**-5 apart, and each of the two compared may be off by one.
    """
    model = tiny(torch.bfloat16)
    found = play(model, tiny_prompts, Scene.draw(seed), count=10, kind="bf16")
    with own_attention(model):
        every = torch.cat([margins(model, *pair) for pair in zip(tiny_prompts, found.answers, strict=True)])
    assert float(every.max()) <= 2 * 2**-5
    assert float((every == 0).float().mean()) >= 0.99


@pytest.mark.model
def test_the_real_model_answers_fifty_mixed_prompts_as_transformers_does(smollm2: Any) -> None:
    from pydoc_data.topics import topics

    words = smollm2.tokenizer("\n".join(topics[name] for name in sorted(topics)[:6])).input_ids
    prompts = mixed_prompts(words, Random(3))
    scenes = (
        Scene(1, 16, 512, 50, True, 400, 0.0, 0.0),
        Scene(2, 8, 64, 12, True, 80, 0.03, 0.05),
    )
    first, second = (play(smollm2.model, prompts, scene, count=6) for scene in scenes)
    assert worst(smollm2.model, prompts, first.answers) == 0.0
    assert second.answers == first.answers
    assert first.hits > 0
    assert second.preemptions > 0
