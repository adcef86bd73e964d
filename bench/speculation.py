"""Tokens per second with and without speculation: on a text that repeats itself, on a free text, and under load.

    python bench/speculation.py [--repeats 3] [--output-tokens 128] [--draft-model SRC]

SmolLM2, greedy, one process. `copy`: a passage, and its first words again, which the model goes on with; `free`: chat
questions, answered one at a time; `loaded`: both kinds in turn, 16 at once, others waiting. Runs without drafts and
with them take turns, and the fastest of each counts, so that others on the machine disturb least; tokens a step and
acceptance depend on the machine only by what a row costs there. With `--draft-model` the same is done with its drafts
too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measure import machine
from model import load
from throughput import MODEL, model_and_text

from ullage_engine import models
from ullage_engine.cells import CellPool
from ullage_engine.config import EngineConfig, default_cache_dir
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.speculation.assemble import find_draft, make_speculator
from ullage_engine.store import BlockStore

PASSAGE = 192
"""Tokens of a passage to copy."""
BEGINNING = 24
"""Tokens of it that the prompt repeats."""
CONCURRENT = 16
QUEUED = 40
"""Requests of `loaded`."""
SINGLE = 2
"""Requests, one after the other, of `copy` and of `free`."""
BLOCK = 16
QUESTIONS = (
    "Explain photosynthesis to a child.",
    "Write a short story about a lighthouse keeper.",
    "What are the advantages and drawbacks of electric cars?",
    "Describe a walk through a forest in autumn.",
    "How does a bicycle stay upright?",
    "Give advice to someone who starts a new job.",
    "Why do people keep diaries?",
    "Compare tea and coffee.",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Prompts, and how many run at once; as one ends, the next begins."""

    prompts: list[list[int]]
    concurrent: int


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a scenario."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Maker = Callable[[int, str], Engine]
"""An engine for so many sequences at once, with a kind of speculation."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all scenarios with every kind of drafts."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    folder, text_ids = model_and_text()
    models.quiet_progress()
    loaded, kernels = load(folder, getattr(torch, options.dtype))
    report: dict[str, Any] = {"machine": machine(), "settings": vars(options)}
    make = maker(options, loaded, kernels)
    for kind in ("ngram", "draft") if options.draft_model else ("ngram",):
        found = {
            name: compare(make, kind, scenario, options)
            for name, scenario in scenarios(loaded.tokenizer, text_ids).items()
        }
        for name, (plain, drafted) in found.items():
            show(f"{kind}, {name}", plain, drafted)
        report |= summary(found) if kind == "ngram" else {kind: summary(found)}
    print(json.dumps(report))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--speculation-tokens", type=int, default=EngineConfig(model="m").speculation_tokens)
    parser.add_argument("--draft-model", help="of SmolLM2's vocabulary")
    parser.add_argument("--numerics", choices=("fast", "invariant"), default="fast")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def scenarios(tokenizer: Any, text_ids: list[int]) -> dict[str, Scenario]:
    passages = [text_ids[at : at + PASSAGE] for at in range(0, 1000 * QUEUED, 1000)]
    copying = [passage + passage[:BEGINNING] for passage in passages]
    asking = [ask(tokenizer, question) for question in QUESTIONS]
    mixed = [asking[i // 2 % len(asking)] if i % 2 else copying[i] for i in range(QUEUED)]
    return {
        "copy": Scenario(copying[:SINGLE], 1),
        "free": Scenario(asking[:SINGLE], 1),
        "loaded": Scenario(mixed, CONCURRENT),
    }


def ask(tokenizer: Any, question: str) -> list[int]:
    """Tokens of a conversation that begins with a question."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def maker(options: argparse.Namespace, loaded: models.LoadedModel, kernels: CpuKernels | None) -> Maker:
    """Makes engines around one model; the draft model is loaded once."""
    device = torch.device("cpu")
    config = EngineConfig(
        model=MODEL,
        speculation="draft" if options.draft_model else "ngram",
        draft_model=options.draft_model,
        speculation_tokens=options.speculation_tokens,
        cache_dir=default_cache_dir(),
    )
    invariant = options.numerics == "invariant"
    if invariant:
        from ullage_engine.numerics import make_invariant

        make_invariant(loaded.model)
    shape = models.shape_of(loaded.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, BLOCK)
    each = layout.blocks_for(PASSAGE + BEGINNING + options.output_tokens + options.speculation_tokens)
    found = find_draft(config, loaded.folder)
    drafting = None if found is None else load(found.folder, getattr(torch, options.dtype))

    def runner(model: Any, layout: CacheLayout, blocks: int, native: CpuKernels | None) -> ModelRunner:
        return ModelRunner(model, BlockStore(layout, blocks, device, None, native), device, invariant=invariant)

    def make(concurrent: int, kind: str) -> Engine:
        blocks = concurrent * each + 8
        target = runner(loaded.model, layout, blocks, kernels)
        draft = None
        if kind == "draft" and found is not None and drafting is not None:
            draft = runner(drafting[0].model, found.layout, blocks, drafting[1])
        speculating = EngineConfig(
            model=MODEL,
            speculation=kind,  # type: ignore[arg-type]
            draft_model=options.draft_model if kind == "draft" else None,
            speculation_tokens=options.speculation_tokens,
        )
        pool = BlockPool(blocks, BLOCK, PrefixIndex("bench", BLOCK))
        return Engine(
            identity=EngineIdentity(model=loaded.name, version="0"),
            runner=target,
            pool=pool,
            scheduler=Scheduler(
                pool,
                max_batch_tokens=512,
                max_sequences=concurrent,
                prefix_reuse=False,
                cells=CellPool(pool, layout.cell_classes),
            ),
            protection=Protection(first_tokens=0, recent_tokens=0),
            speculator=make_speculator(speculating, target, draft, vocabulary=loaded.config.vocab_size),
        )

    return make


def compare(make: Maker, kind: str, scenario: Scenario, options: argparse.Namespace) -> tuple[Run, Run]:
    """The fastest run without drafts and with them, taken in turn."""
    runs: dict[str, list[Run]] = {"off": [], kind: []}
    for _ in range(options.repeats):
        for one, done in runs.items():
            done.append(run(make(scenario.concurrent, one), scenario, options.output_tokens))
    plain, drafted = (min(done, key=lambda one: one.seconds) for done in runs.values())
    return plain, drafted


def run(engine: Engine, scenario: Scenario, count: int) -> Run:
    """Generate answers to all prompts; the clock starts when the first of them are computed."""
    for index, prompt in enumerate(scenario.prompts):
        sampling = SamplingParams(max_tokens=count, temperature=0)
        request = GenerationRequest(request_id=f"r{index}", prompt=tuple(prompt), sampling=sampling)
        engine.add(request, lambda output: None)
    while sum(sequence.generated > 0 for sequence in engine.scheduler.running) < scenario.concurrent:
        engine.step()
    steps, generated, began = engine.steps, engine.tally.generated_tokens, time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds = time.perf_counter() - began
    counters = engine.snapshot(None, draining=False).counters
    return Run(
        seconds,
        engine.tally.generated_tokens - generated,
        engine.steps - steps,
        counters.drafted_tokens,
        counters.accepted_tokens,
    )


def summary(found: dict[str, tuple[Run, Run]]) -> dict[str, Any]:
    ratios = {f"ratio_{name}": round(drafted.rate / plain.rate, 3) for name, (plain, drafted) in found.items()}
    return ratios | {
        "acceptance": {name: round(one.accepted / max(1, one.drafted), 3) for name, (_, one) in found.items()},
        "tokens_per_step": {name: round(one.tokens / one.steps, 2) for name, (_, one) in found.items()},
        "tokens_per_s": {name: [round(one.rate, 1) for one in both] for name, both in found.items()},
    }


def show(name: str, plain: Run, drafted: Run) -> None:
    print(
        f"{name:14} {plain.rate:7.1f} tokens/s without, {drafted.rate:7.1f} with: {drafted.rate / plain.rate:5.2f}; "
        f"{plain.tokens / plain.steps:5.2f} tokens a step, {drafted.tokens / drafted.steps:5.2f}; "
        f"{drafted.accepted} of {drafted.drafted} drafted tokens stood",
        flush=True,
    )


if __name__ == "__main__":
    main()
