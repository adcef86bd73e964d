"""An engine of any size around a model in this process, and requests to it, for tests of its answers."""

from __future__ import annotations

from typing import Any

import torch

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


def make_engine(
    model: Any, kind: str = "fp32", blocks: int = 128, size: int = 16, budget: int = 96, **options: Any
) -> Engine:
    shape = shape_of(model.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, size, kind)
    store = BlockStore(layout, blocks, "cpu", None, options.get("kernels"))
    runner = ModelRunner(model, store, torch.device("cpu"), invariant=options.pop("invariant", False))
    return engine_around(runner, budget, **options)


def engine_around(runner: ModelRunner, budget: int = 96, **options: Any) -> Engine:
    size = runner.store.layout.block_tokens
    pool = BlockPool(runner.store.data.shape[0], size, PrefixIndex("test", size))
    scheduler = Scheduler(
        pool,
        max_batch_tokens=budget,
        max_sequences=options.get("sequences", 8),
        prefix_reuse=options.get("reuse", True),
        cells=CellPool(pool, runner.store.layout.cell_classes),
    )
    return Engine(
        identity=EngineIdentity(model="test", version="0"),
        runner=runner,
        pool=pool,
        scheduler=scheduler,
        protection=Protection(first_tokens=options.get("first", 16), recent_tokens=options.get("recent", 16)),
        speculator=options.get("speculator"),
        retention=options.get("retention"),
    )


def submit(engine: Engine, name: str, prompt: list[int], count: int, stop: frozenset[int]) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    sampling = SamplingParams(max_tokens=count, temperature=0, stop_token_ids=stop)
    engine.add(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling), outputs.append)
    return outputs


def run(engine: Engine, prompts: list[list[int]], count: int, stop: frozenset[int] = frozenset()) -> list[list[int]]:
    outputs = [submit(engine, f"r{i}", prompt, count, stop) for i, prompt in enumerate(prompts)]
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    assert engine.pool.active == 0
    return [[o.token for o in output if o.token is not None] for output in outputs]
