"""Speculation on small random models: answers to the byte with it and without, and drafts by a second model."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_engine import engine_around, make_engine
from test_fused import tiny

from ullage_engine.engine import Engine
from ullage_engine.errors import ConfigError, ModelError
from ullage_engine.fused import fuse_layers
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.models import shape_of
from ullage_engine.numerics import make_invariant
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.runner import ModelRunner
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.assemble import check_vocabulary, make_speculator
from ullage_engine.speculation.base import Draft, Proposer
from ullage_engine.speculation.control import Costs
from ullage_engine.speculation.draft import DraftModelProposer
from ullage_engine.speculation.ngram import NgramProposer
from ullage_engine.speculation.speculator import Speculator
from ullage_engine.store import BlockStore

VOCABULARY = 256
COUNT = 16
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.3, "seed": 7},
    {"temperature": 1.0, "seed": 3, "top_p": 0.7, "logprobs": 1},
)


class Guesses:
    """Half of what will come, from a list, and half nonsense: drafts of every fate."""

    def __init__(self, answers: Mapping[str, list[int]], seed: int) -> None:
        self._answers = answers
        self._random = Random(seed)

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        return {sequence: Draft(tuple(self._guess(sequence, count))) for sequence, count in wanted.items()}

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        coming = self._answers[sequence.request_id][sequence.generated :][:count]
        return [token if self._random.random() < 0.8 else self._random.randrange(VOCABULARY) for token in coming]

    def forget(self, sequence: Sequence) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def prompts() -> list[list[int]]:
    random = Random(9)
    shared = [random.randrange(VOCABULARY) for _ in range(20)]
    own = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (3, 14, 15, 29)]
    return [*own, [*shared, 1], [*shared, 2, 3]]


def speculator(proposer: Proposer, longest: int = 4) -> Speculator:
    return Speculator(proposer, Costs(row=0.0), longest=longest)


def generate(engine: Engine, seed: int | None) -> dict[str, list[TokenOutput]]:
    """Answers to all prompts under all samplings; one after the other (None) or in a scene of the seed's."""
    random = Random(seed)
    outputs: dict[str, list[TokenOutput]] = {}
    coming = [
        GenerationRequest(
            request_id=f"{i}/{j}", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=COUNT, **options)
        )
        for i, prompt in enumerate(prompts())
        for j, options in enumerate(SAMPLINGS)
    ]
    if seed is not None:
        random.shuffle(coming)
    while coming or not engine.idle:
        while coming and (engine.idle or (seed is not None and random.random() < 0.6)):
            request = coming.pop()
            outputs[request.request_id] = []
            engine.add(request, outputs[request.request_id].append)
        if seed is not None and engine.scheduler.running and random.random() < 0.05:
            engine.scheduler.preempt(random.choice(engine.scheduler.running))
        engine.step()
        engine.check_integrity()
    assert engine.pool.active == 0
    return outputs


def told(outputs: Mapping[str, list[TokenOutput]]) -> dict[str, list[dict[str, Any]]]:
    """All that receivers were told but for what was found in the prefix cache."""
    return {name: [asdict(o) | {"cached_tokens": 0} for o in received] for name, received in outputs.items()}


def engine_for(model: Any, seed: int | None, proposer: Proposer | None, kernels: Any = None) -> Engine:
    random = Random(seed)
    alone = seed is None
    return make_engine(
        model,
        "fp8",
        blocks=60 if alone else random.choice((24, 60)),
        size=8,
        budget=96 if alone else random.choice((10, 40)),
        sequences=1 if alone else random.randint(2, 10),
        invariant=True,
        kernels=kernels,
        speculator=None if proposer is None else speculator(proposer),
    )


@pytest.mark.parametrize("native", [True, False])
def test_answers_are_the_same_to_the_byte_with_and_without(cpu_kernels: CpuKernels, native: bool) -> None:
    """Tokens, log probabilities and reasons, greedy and seeded, alone without drafts and in scenes with them."""
    model, _ = tiny("llama")
    kernels = cpu_kernels if native else None
    if native:
        fuse_layers(model, cpu_kernels, lambda linear: linear)
    make_invariant(model)
    plain = generate(engine_for(model, None, None, kernels), None)
    answers = {name: [o.token for o in outputs if o.token is not None] for name, outputs in plain.items()}
    for seed in range(3 if native else 1):
        for proposer in (None, NgramProposer(), Guesses(answers, seed)):
            engine = engine_for(model, seed, proposer, kernels)
            assert told(generate(engine, seed)) == told(plain), (seed, proposer)
            counters = engine.snapshot(None, draining=False).counters
            if isinstance(proposer, Guesses):
                assert 0 < counters.accepted_tokens < counters.drafted_tokens


# -- a second model --------------------------------------------------------------------------------------------------


def draft_proposer(model: Any, blocks: int = 80, budget: int = 96, width: int = VOCABULARY) -> DraftModelProposer:
    shape = shape_of(model.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 8, "fp32")
    pool = BlockPool(blocks, 8, PrefixIndex("draft", 8))
    runner = ModelRunner(model, BlockStore(layout, blocks), torch.device("cpu"), invariant=True)
    return DraftModelProposer(runner, pool, vocabulary=width, budget=budget)


@pytest.fixture(scope="module")
def target() -> Any:
    model, _ = tiny("llama")
    make_invariant(model)
    return model


@pytest.fixture(scope="module")
def other() -> Any:
    model, _ = tiny("qwen3, heads normalised")
    make_invariant(model)
    return model


def run(engine: Engine, sampling: SamplingParams, asked: list[list[int]]) -> list[list[int]]:
    outputs: list[list[TokenOutput]] = [[] for _ in asked]
    for i, prompt in enumerate(asked):
        request = GenerationRequest(request_id=f"r{i}", prompt=tuple(prompt), sampling=sampling)
        engine.add(request, outputs[i].append)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.pool.active == 0
    return [[o.token for o in received if o.token is not None] for received in outputs]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "top_p": 0.9}], ids=str
)
def test_the_target_as_its_own_draft_is_always_right(target: Any, options: dict[str, Any]) -> None:
    proposer = draft_proposer(target)
    engine = make_engine(target, blocks=80, size=8, invariant=True, speculator=speculator(proposer))
    sampling = SamplingParams(max_tokens=COUNT, **options)
    run(engine, sampling, prompts())
    counters = engine.snapshot(None, draining=False).counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0
    assert engine.steps < COUNT
    assert proposer._pool.active == 0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=str)
def test_another_model_drafts_and_answers_stay_the_targets(target: Any, other: Any, options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=COUNT, **options)
    wanted = run(make_engine(target, blocks=80, size=8, invariant=True), sampling, prompts())
    engine = make_engine(target, blocks=80, size=8, invariant=True, speculator=speculator(draft_proposer(other)))
    assert run(engine, sampling, prompts()) == wanted
    counters = engine.snapshot(None, draining=False).counters
    assert counters.accepted_tokens < counters.drafted_tokens


def test_drafts_of_all_sequences_share_their_passes(target: Any) -> None:
    proposer = draft_proposer(target, budget=400)
    passes: list[int] = []
    forward = proposer._runner.forward

    def counted(chunks: list[Any]) -> torch.Tensor:
        passes.append(len(chunks))
        return forward(chunks)

    proposer._runner.forward = counted  # type: ignore[method-assign]
    engine = make_engine(target, blocks=80, size=8, budget=400, invariant=True, speculator=speculator(proposer))
    run(engine, SamplingParams(max_tokens=1 + 5 * 3, temperature=0), prompts())
    assert passes == [len(prompts())] * 4 * 3


def test_a_draft_that_does_not_fit_its_cache_or_budget_is_left_out(target: Any) -> None:
    wanted = run(
        make_engine(target, blocks=80, size=8, invariant=True),
        SamplingParams(max_tokens=COUNT, temperature=0),
        prompts(),
    )
    for proposer in (draft_proposer(target, blocks=6), draft_proposer(target, budget=5)):
        engine = make_engine(target, blocks=80, size=8, invariant=True, speculator=speculator(proposer))
        assert run(engine, SamplingParams(max_tokens=COUNT, temperature=0), prompts()) == wanted
        assert engine.snapshot(None, draining=False).counters.accepted_tokens > 0


@pytest.mark.parametrize("width", [200, 300])
def test_padded_vocabularies_are_cut_or_filled(target: Any, width: int) -> None:
    proposer = draft_proposer(target, width=width)
    logits = proposer._fitted(torch.zeros(2, VOCABULARY))
    assert logits.shape == (2, width)
    assert bool((logits[:, VOCABULARY:] == float("-inf")).all())


def test_drafts_roll_back_with_the_sequence(target: Any) -> None:
    """Tokens that the draft model computed and the target did not take are computed anew, not left as they were."""
    request = GenerationRequest(request_id="r", prompt=(5, 6), sampling=SamplingParams(max_tokens=99, temperature=0))
    sequence = Sequence(request, lambda output: None, 0, [5, 6, 7], 8, computed=2)
    proposer, fresh = draft_proposer(target), draft_proposer(target)
    random = Random(2)
    for turn in range(12):
        draft = proposer.propose({sequence: 4})[sequence].tokens
        assert draft == fresh.propose({sequence: 4})[sequence].tokens
        fresh.forget(sequence)
        proposer.check_integrity()
        taken = list(draft[: random.randint(0, 4)])
        sequence.tokens.extend([*taken, random.randrange(VOCABULARY)])
        sequence.computed = len(sequence.tokens) - 1
        assert len(proposer._shadows[sequence].state.table) <= -(-(len(sequence.tokens) + 4) // 8), turn
    proposer.forget(sequence)
    assert proposer._pool.active == 0


# -- vocabularies and settings ---------------------------------------------------------------------------------------


def test_other_vocabularies_are_refused() -> None:
    words = {"a": 0, "b": 1, "c": 2}
    check_vocabulary(words, dict(words))
    with pytest.raises(ModelError, match=r"--draft-model: its vocabulary of 3 tokens .* in 2 tokens \('b' is 1 there"):
        check_vocabulary(words, {"a": 0, "b": 2, "c": 1})
    with pytest.raises(ModelError, match=r"of 4 tokens differs from the model's 3 in 1 tokens \('d' is None there"):
        check_vocabulary(words, words | {"d": 3})


def save(folder: Path, words: str) -> str:
    """A model of one layer with a vocabulary of `words`, as a Hugging Face folder."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<s>", *words])}
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(vocabulary),
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    make: Any = PreTrainedTokenizerFast  # untyped
    make(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<s>")), eos_token="<s>").save_pretrained(folder)
    return str(folder)


def answer(core: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy, of a running engine."""
    outputs: queue.Queue[TokenOutput] = queue.Queue()
    sampling = SamplingParams(max_tokens=count, temperature=0)
    core.submit(GenerationRequest(request_id="r", prompt=prompt, sampling=sampling), outputs.put)
    tokens: list[int] = []
    while True:
        output = outputs.get(timeout=60)
        assert output.error is None
        tokens.extend([] if output.token is None else [output.token])
        if output.finish_reason is not None:
            return tokens


def test_engines_are_built_to_speculate_and_answer(tmp_path: Path) -> None:
    from ullage_engine.build import build_engine
    from ullage_engine.config import EngineConfig

    model = save(tmp_path / "target", "abcdefgh")
    blocks, answers = {}, {}
    for kind in ("off", "ngram", "draft"):
        draft = model if kind == "draft" else None
        config = EngineConfig(
            model=model,
            kv_memory=1 << 20,
            dtype="float32",
            threads=1,
            numerics="invariant",
            speculation=kind,  # type: ignore[arg-type]
            draft_model=draft,
            max_sequences=8,
        )
        engine = build_engine(config)
        try:
            answers[kind] = answer(engine.core, (1, 2, 3), 50)
            blocks[kind] = engine.core.snapshot().blocks.total
        finally:
            engine.close()
    assert answers["ngram"] == answers["draft"] == answers["off"]
    assert blocks["draft"] == blocks["ngram"] // 2, "the draft's cache is part of the memory given"


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_what_the_settings_ask_for_drafts(target: Any, kind: str) -> None:
    from ullage_engine.config import EngineConfig

    draft = "d" if kind == "draft" else None
    config = EngineConfig(model="m", block_size=8, speculation=kind, draft_model=draft)  # type: ignore[arg-type]

    def runner() -> ModelRunner:
        shape = shape_of(target.config)
        layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 8, "fp8")
        return ModelRunner(target, BlockStore(layout, 60), torch.device("cpu"), invariant=True)

    durations, ends = itertools.cycle([1.0] * 4 + [0.1] * (kind == "draft")), itertools.cycle([False, True])
    now = 0.0

    def clock() -> float:
        """A second for a step of the target, a tenth for one of the draft."""
        nonlocal now
        now += next(durations) if next(ends) else 0.0
        return now

    drafting = runner() if kind == "draft" else None
    made = make_speculator(config, runner(), drafting, vocabulary=VOCABULARY, clock=clock)
    engine = engine_around(runner(), speculator=made)
    sampling = SamplingParams(max_tokens=60, temperature=0)
    assert run(engine, sampling, prompts()) == run(engine_around(runner()), sampling, prompts())
    counters = engine.snapshot(None, draining=False).counters
    assert counters.accepted_tokens > 0
    assert kind == "ngram" or counters.accepted_tokens == counters.drafted_tokens


def test_a_draft_model_of_another_vocabulary_ends_the_start(tmp_path: Path) -> None:
    from ullage_engine.build import build_engine
    from ullage_engine.config import EngineConfig

    model, draft = save(tmp_path / "target", "abcdefgh"), save(tmp_path / "draft", "hgfedcba")
    with pytest.raises(ModelError, match="--draft-model: its vocabulary of 9 tokens differs"):
        build_engine(EngineConfig(model=model, kv_memory=1 << 20, speculation="draft", draft_model=draft))
    with pytest.raises(ModelError, match="--draft-model: '/nowhere' does not exist"):
        build_engine(EngineConfig(model=model, kv_memory=1 << 20, speculation="draft", draft_model="/nowhere"))
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"architectures": ["Mamba"]}))
    with pytest.raises(ModelError, match="--draft-model: architecture Mamba"):
        build_engine(EngineConfig(model=model, kv_memory=1 << 20, speculation="draft", draft_model=draft))


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": "draft"},
        {"draft_model": "x"},
        {"speculation": "ngram", "draft_model": "x"},
        {"speculation": "medusa"},
        {"speculation_tokens": 0},
        {"numerics": "exact"},
    ],
    ids=str,
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    from ullage_engine.config import EngineConfig

    with pytest.raises(ConfigError, match="cannot work"):
        EngineConfig(model="m", **settings)


# -- beside eviction -------------------------------------------------------------------------------------------------


class Late(Guesses):
    """Nothing before so many tokens have been generated."""

    AFTER = 8

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        return super().propose({one: count for one, count in wanted.items() if one.generated >= self.AFTER})


def keep_a_third(rows: Any) -> torch.Tensor:
    """Other rows in each head, so that what is left lies in cells of each head's own."""
    chosen = torch.rand(rows.candidates.shape, generator=torch.Generator().manual_seed(4)) < 0.33
    return chosen & rows.candidates


def evicted_answers(model: Any, kernels: Any, answers: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], int]:
    """Answers of two requests that lose the same rows after `Late.AFTER` tokens, and how many drafted tokens stood."""
    speculating = speculator(Late(answers, 3)) if answers else None
    engine = make_engine(
        model, "fp8", size=8, first=8, recent=16, invariant=True, kernels=kernels, speculator=speculating
    )
    outputs: dict[str, list[TokenOutput]] = {}
    for name, length in (("a", 75), ("b", 40)):
        prompt = tuple(Random(name).randrange(VOCABULARY) for _ in range(length))
        outputs[name] = []
        sampling = SamplingParams(max_tokens=40, temperature=0)
        engine.add(GenerationRequest(request_id=name, prompt=prompt, sampling=sampling), outputs[name].append)
        while sum(output.token is not None for output in outputs[name]) < Late.AFTER:
            engine.step()
        [sequence] = engine.scheduler.running
        engine.reclaimer._evictor.cut(sequence, 1e6, keep_a_third)
        assert sequence.cells is not None
        while not engine.idle:
            engine.step()
            engine.check_integrity()
    found = {name: [o.token for o in received if o.token is not None] for name, received in outputs.items()}
    return found, engine.snapshot(None, draining=False).counters.accepted_tokens


@pytest.mark.parametrize("native", [True, False])
def test_evicted_sequences_answer_the_same_with_drafts(cpu_kernels: CpuKernels, native: bool) -> None:
    model, _ = tiny("llama")
    kernels = cpu_kernels if native else None
    if native:
        fuse_layers(model, cpu_kernels, lambda linear: linear)
    make_invariant(model)
    plain, _ = evicted_answers(model, kernels, {})
    drafted, stood = evicted_answers(model, kernels, plain)
    assert drafted == plain
    assert stood > 10
