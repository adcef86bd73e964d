"""Answers of a real model over real copies between memory tiers are those of an engine with all the memory it wants."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from ullage_engine import attention
from ullage_engine.cells import CellPool
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.layout import CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams, TokenOutput
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore
from ullage_engine.tiers.disk import BlockFolder
from ullage_engine.tiers.manager import TierManager
from ullage_engine.tiers.movers import HostCopies
from ullage_engine.tiers.packing import CellPacking
from ullage_engine.tiers.residency import TieredResidency
from ullage_engine.tiers.transfer import ThreadTransfers

SIZE = 8
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,  # far from uniform predictions: no two logits tie within rounding
    )
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    made: Any = LlamaForCausalLM(config).eval()
    made.set_attn_implementation(attention.NAME)
    return made


def make(
    model: Any, kind: str, blocks: int, host: int = 0, folder: Path | None = None
) -> tuple[Engine, TieredResidency | None]:
    """An engine; one layer's type differs, so that blocks are made of cells of two sizes."""
    other = {1: "bf16"} if kind != "bf16" else {1: "int8"}
    layout = CacheLayout(3, 3, 8, SIZE, kind, layer_types=other)  # type: ignore[arg-type]
    store = BlockStore(layout, blocks)
    pool = BlockPool(blocks, SIZE, PrefixIndex(kind, SIZE))
    cells, runner = CellPool(pool, layout.cell_classes), ModelRunner(model, store, torch.device("cpu"))
    tiers = None
    if host:
        memory: Any = np.zeros((host, layout.block_bytes), np.uint8)
        manager = TierManager(host, 200 if folder else 0, pool.lost)
        movers, closed = HostCopies(store.data, memory, verify=True).movers(), lambda: None
        if folder is not None:
            files = BlockFolder(folder, 200, kind, memory)
            manager.restore(files.restore(pool.index))
            movers, closed = movers | files.movers(), files.close
        transfers = ThreadTransfers(movers, closed=closed)
        tiers = TieredResidency(pool, manager, transfers, time.monotonic, CellPacking(pool, cells, runner))
    scheduler = Scheduler(pool, max_batch_tokens=64, max_sequences=6, prefix_reuse=True, cells=cells, residency=tiers)
    engine = Engine(
        identity=EngineIdentity(model="tiny", version="0"),
        runner=runner,
        pool=pool,
        scheduler=scheduler,
        protection=Protection(first_tokens=1 << 20, recent_tokens=0),
        tiers=tiers,
    )
    return engine, tiers


def answers(engine: Engine, prompts: list[list[int]], count: int, budget: KvBudget | None = None) -> list[list[int]]:
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    sampling = SamplingParams(max_tokens=count, temperature=0)
    for i, prompt in enumerate(prompts):
        request = GenerationRequest(request_id=f"r{i}", prompt=tuple(prompt), sampling=sampling, kv_budget=budget)
        engine.add(request, outputs[i].append)
    end = time.monotonic() + WAIT_S
    while not engine.idle:
        engine.step()
        assert time.monotonic() < end, "stuck"
    engine.check_integrity()
    return [[o.token for o in output if o.token is not None] for output in outputs]


def settle(engine: Engine, tiers: TieredResidency) -> None:
    """Wait until nothing moves."""
    ended = threading.Event()
    engine.listen(ended.set)
    engine.tend()  # what ended before anybody listened
    while tiers.busy:
        assert ended.wait(WAIT_S)
        ended.clear()
        engine.tend()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, 97, (4, 40), generator=generator).tolist()
    own = torch.randint(0, 97, (10, 21), generator=generator).tolist()
    return [shared[i % 4] + own[i] for i in range(10)]


@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16", "fp32"])
def test_generate_reset_generate(model: Any, kind: str) -> None:
    """Codes and scales come back as they were: the second answers come from below alone."""
    wanted = answers(make(model, kind, 400)[0], prompts(), 12)
    engine, tiers = make(model, kind, 400, host=400)
    assert tiers is not None
    assert answers(engine, prompts(), 12) == wanted
    settle(engine, tiers)
    report = engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    assert report.demoted == report.blocks_freed > 40
    assert engine.pool.free == engine.pool.total
    assert answers(engine, prompts(), 12) == wanted
    assert tiers.manager.tally["host"].loaded == 4 * 5 + 10 * 2, "of four prefixes and ten prompts of their own"
    engine.close()


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_a_pool_of_a_tenth_with_preemptions(model: Any, kind: str) -> None:
    wanted = answers(make(model, kind, 400)[0], prompts(), 24)
    engine, tiers = make(model, kind, 16, host=300)
    assert tiers is not None
    for _ in range(3):
        assert answers(engine, prompts(), 24) == wanted
    assert engine.scheduler.tally.preemptions > 0
    assert tiers.manager.tally["host"].hit_tokens > 0
    assert tiers.manager.tally["host"].failed == 0
    engine.close()


def test_a_restart_in_between(model: Any, tmp_path: Path) -> None:
    wanted = answers(make(model, "fp8", 400)[0], prompts(), 6)
    first, _ = make(model, "fp8", 60, host=100, folder=tmp_path)
    assert answers(first, prompts(), 6) == wanted
    first.close()
    second, tiers = make(model, "fp8", 60, host=100, folder=tmp_path)
    assert tiers is not None
    assert answers(second, prompts(), 6) == wanted
    assert tiers.manager.tally["disk"].hit_tokens > 0
    second.close()
