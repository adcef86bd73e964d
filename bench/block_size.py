"""Waste, throughput and hit ratio of block sizes 8, 16 and 32 on one fixed mix of lengths, as a table and a picture.

    python bench/block_size.py [--requests 48] [--repeats 2] [--picture FILE.svg]

SmolLM2, requests of mixed lengths (`workload.mixed_lengths`), each behind one of three system prompts whose lengths are
no multiple of any block size, arriving while others run. The cache has the same number of token slots for every size.
Arrivals are counted in steps, so waste and hit ratio repeat exactly; throughput is the median of the repeats, which
take turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bars import Panel, svg
from measure import machine
from model import load
from throughput import model_and_text
from workload import mixed_lengths

from ullage_engine import models
from ullage_engine.cells import CellPool
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import BLOCK_SIZES, CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore

SYSTEM_PROMPTS = (45, 101, 171)
"""Tokens."""
LONGEST = 220
STEPS_A_SECOND = 6.0
"""By which the mix's gaps become steps."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the mix."""

    arrives: int
    """Step."""
    prompt: list[int]
    answer_tokens: int


@dataclass(slots=True)
class Run:
    """One pass of the mix over one block size."""

    seconds: float = 0.0
    generated: int = 0
    waste: list[float] = field(default_factory=list)
    """Of each step: share of the active blocks' slots that hold nothing."""
    hit_ratio: float = 0.0
    preemptions: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the mix over every size, print the table, draw the picture."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    models.quiet_progress()
    folder, text_ids = model_and_text()
    loaded, kernels = load(folder, getattr(torch, options.dtype))
    requests = mix(text_ids, options.requests)
    runs: dict[int, list[Run]] = {size: [] for size in BLOCK_SIZES}
    for _ in range(options.repeats):
        for size, found in runs.items():
            found.append(play(build(loaded, kernels, size, options), requests))
    table = {size: figures(found) for size, found in runs.items()}
    print(f"{'block':>5}{'waste':>9}{'tok/s':>9}{'hit ratio':>11}{'preempted':>11}")
    for size, row in table.items():
        print(
            f"{size:5}{100 * row['waste']:7.1f} %{row['tokens_per_s']:9.1f}{row['hit_ratio']:11.3f}"
            f"{row['preemptions']:11}"
        )
    options.picture.write_text(picture(table))
    settings = {name: value for name, value in vars(options).items() if name != "picture"}
    print(json.dumps({"machine": machine(), "settings": settings, "block_sizes": table}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--cache-tokens", type=int, default=4096)
    parser.add_argument("--kv-type", default="fp8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--picture", type=Path, default=Path("block_size.svg"))
    return parser.parse_args(arguments)


def mix(text_ids: Sequence[int], count: int) -> list[Request]:
    """The fixed mix, with real text in it."""
    systems = [list(text_ids[50_000 + 1000 * i :][:length]) for i, length in enumerate(SYSTEM_PROMPTS)]
    requests, step = [], 0.0
    for index, (prompt, answer, gap) in enumerate(mixed_lengths(count, longest=LONGEST)):
        step += gap * STEPS_A_SECOND
        own = list(text_ids[index * 600 :][:prompt])
        requests.append(Request(int(step), systems[index % len(systems)] + own, answer))
    return requests


def build(loaded: models.LoadedModel, kernels: CpuKernels | None, size: int, options: argparse.Namespace) -> Engine:
    """An engine whose cache holds `--cache-tokens` tokens in blocks of `size`."""
    shape = models.shape_of(loaded.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, size, options.kv_type)
    blocks = options.cache_tokens // size
    pool = BlockPool(blocks, size, PrefixIndex("bench", size))
    return Engine(
        identity=EngineIdentity(model=loaded.name, version="0"),
        runner=ModelRunner(loaded.model, BlockStore(layout, blocks, "cpu", None, kernels), torch.device("cpu")),
        pool=pool,
        scheduler=Scheduler(
            pool,
            max_batch_tokens=256,
            max_sequences=options.sequences,
            prefix_reuse=True,
            cells=CellPool(pool, layout.cell_classes),
        ),
        protection=Protection(first_tokens=0, recent_tokens=0),
    )


def play(engine: Engine, requests: Sequence[Request]) -> Run:
    """All requests at their steps, to the last token."""
    run, coming, step = Run(), list(requests), 0
    began = time.perf_counter()
    while coming or not engine.idle:
        while coming and (coming[0].arrives <= step or engine.idle):
            submit(engine, f"r{len(coming)}", coming.pop(0))
        engine.step()
        step += 1
        usage = engine.pool.usage()
        if usage.active:
            run.waste.append(1 - usage.slots_filled / (usage.active * engine.pool.block_tokens))
    run.seconds = time.perf_counter() - began
    counters = engine.snapshot(None, draining=False).counters
    run.generated = counters.generated_tokens
    run.hit_ratio = counters.prefix_hit_tokens / counters.prefix_query_tokens
    run.preemptions = counters.preemptions
    return run


def submit(engine: Engine, name: str, request: Request) -> None:
    sampling = SamplingParams(max_tokens=request.answer_tokens, temperature=0)
    engine.add(GenerationRequest(request_id=name, prompt=tuple(request.prompt), sampling=sampling), lambda _: None)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Means of what repeats exactly, the median of what does not."""
    return {
        "waste": round(statistics.fmean(runs[0].waste), 4),
        "tokens_per_s": round(statistics.median(run.generated / run.seconds for run in runs), 2),
        "hit_ratio": round(runs[0].hit_ratio, 4),
        "preemptions": runs[0].preemptions,
    }


def picture(table: dict[int, dict[str, Any]]) -> str:
    """The table's three figures as bars."""
    panels = [
        Panel(title, unit, [(str(size), factor * row[key]) for size, row in table.items()])
        for title, unit, key, factor in (
            ("wasted slots", "%", "waste", 100.0),
            ("throughput", "tokens/s", "tokens_per_s", 1.0),
            ("prefix hit ratio", "%", "hit_ratio", 100.0),
        )
    ]
    return svg("KV blocks of 8, 16 and 32 tokens, SmolLM2-135M", panels)


if __name__ == "__main__":
    main()
