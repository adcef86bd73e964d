"""How long others wait while a sequence is cut to its budget: the longest steps of a conversation beside it.

    python bench/eviction_stalls.py [--contexts 1024 4096] [--budget 0.2] [--policy reconstruct] [--dtype float32]

One sequence decodes all the time, another one arrives, is computed, read again and cut. Steps are told apart by what
else they hold; the peer is the longest step of the other's own prefill, which everybody accepts. Both ways of cutting
are measured: spread over steps, and in one step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from measure import machine
from model import load
from throughput import model_and_text

from ullage_engine import budgets, models
from ullage_engine.build import retention
from ullage_engine.cells import CellPool
from ullage_engine.config import EngineConfig
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore

PHASES = ("alone", "prefill", "reading", "cutting", "cut")
WAYS = {"spread": budgets.FITTED_ROWS, "in one step": 1 << 60}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each context both ways."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    folder, text_ids = model_and_text()
    models.quiet_progress()
    loaded, kernels = load(folder, getattr(torch, options.dtype))
    found: dict[str, Any] = {}
    print(f"{'context':>8} {'cut':<12}" + "".join(f"{phase + ', ms (steps)':>22}" for phase in PHASES))
    for context in options.contexts:
        for way, rows in WAYS.items():
            budgets.FITTED_ROWS = rows
            steps = measure(build(loaded, context, options, kernels), text_ids, context, options)
            found.setdefault(str(context), {})[way] = longest = {name: max(steps[name]) for name in PHASES}
            cells = (f"{longest[name] * 1e3:.0f} ({len(steps[name])})" for name in PHASES)
            print(f"{context:>8} {way:<12}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    report = {
        "machine": machine(),
        "settings": vars(options),
        "longest_step_s": {c: {w: _rounded(p) for w, p in ways.items()} for c, ways in found.items()},
        "over_prefill": {c: {w: _over_prefill(p) for w, p in ways.items()} for c, ways in found.items()},
    }
    print(json.dumps(report))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--policy", default="reconstruct")
    parser.add_argument("--kv-type", default="fp8")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def build(loaded: models.LoadedModel, context: int, options: argparse.Namespace, kernels: CpuKernels | None) -> Engine:
    """An engine with room for both sequences, survivors and reader."""
    shape = models.shape_of(loaded.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 16, options.kv_type)
    blocks = layout.blocks_for(2 * context + 4096)
    pool = BlockPool(blocks, 16, PrefixIndex("stalls", 16))
    config = EngineConfig(model="-", eviction_policy=options.policy)
    return Engine(
        identity=EngineIdentity(model=loaded.name, version="0"),
        runner=ModelRunner(loaded.model, BlockStore(layout, blocks, "cpu", None, kernels), torch.device("cpu")),
        pool=pool,
        scheduler=Scheduler(
            pool,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=4,
            prefix_reuse=False,
            cells=CellPool(pool, layout.cell_classes),
        ),
        protection=Protection(first_tokens=config.protected_tokens, recent_tokens=config.recent_tokens),
        retention=retention(config, loaded),
    )


def measure(engine: Engine, text_ids: list[int], context: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step by phase; `cut` are steps that choose what stays."""
    add(engine, "other", text_ids[-64:], 3000, None)
    steps: dict[str, list[float]] = defaultdict(list)
    for _ in range(12):
        steps["alone"].append(timed(engine))
    add(engine, "cut", text_ids[:context], 3000, KvBudget.of(options.budget))
    cut = next(sequence for sequence in engine.scheduler.live() if sequence.request_id == "cut")
    while cut.cells is None:
        held, cutting = cut.held, engine.cutting
        seconds = timed(engine)
        began = engine.cutting and not cutting
        steps["cut" if began else "cutting" if cutting else "reading" if held else "prefill"].append(seconds)
    return steps


def timed(engine: Engine) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def add(engine: Engine, name: str, prompt: list[int], count: int, budget: KvBudget | None) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=0)
    request = GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, kv_budget=budget)
    engine.add(request, lambda _: None)


def _rounded(phases: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 4) for name, seconds in phases.items()}


def _over_prefill(phases: dict[str, float]) -> float:
    """Longest wait for the cut, in longest steps of prefill."""
    return round(max(phases["cutting"], phases["cut"]) / phases["prefill"], 3)


if __name__ == "__main__":
    main()
