"""Fixtures of the engine's tests: the real small model, and an engine around a runner without one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two busy cores: more threads than one cost time here and change sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2(model_folder: Path) -> Any:
    """The model loaded in float32 with the paged attention function set."""
    from ullage_engine import models

    return models.load(model_folder, "smollm2-135m", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def cpu_library() -> Path:
    """The compiled CPU kernels, from the user's cache or made now."""
    from ullage_engine.config import default_cache_dir
    from ullage_engine.errors import KernelError
    from ullage_engine.kernels import cpu_build

    try:
        return cpu_build.library(default_cache_dir() / "kernels")
    except KernelError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no CPU kernels here: {error}")


@pytest.fixture(scope="session")
def cpu_kernels(cpu_library: Path) -> Any:
    from ullage_engine.kernels.cpu import CpuKernels

    return CpuKernels(cpu_library)


@pytest.fixture(scope="session")
def fake_engine() -> Callable[..., Any]:
    """Makes an engine around `FakeRunner`: (engine, runner)."""
    from ullage_engine.cells import CellPool
    from ullage_engine.engine import Engine
    from ullage_engine.eviction import Protection
    from ullage_engine.fake_runner import FakeRunner
    from ullage_engine.pool import BlockPool
    from ullage_engine.prefix import PrefixIndex, blake2b_128
    from ullage_engine.readings import EngineIdentity
    from ullage_engine.scheduler import Scheduler
    from ullage_engine.speculation.control import Costs
    from ullage_engine.speculation.speculator import Speculator

    def make(
        blocks: int = 16,
        block_tokens: int = 8,
        vocabulary: int = 5,
        budget: int = 16,
        sequences: int = 4,
        first: int = 8,
        recent: int = 8,
        reuse: bool = True,
        hasher: Any = blake2b_128,
        fail: Any = None,
        proposer: Any = None,
        grid: tuple[int, int] = (1, 1),
        classes: Any = None,
        retention: Any = None,
        device: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Any, Any]:
        runner = FakeRunner(blocks, block_tokens, vocabulary, fail, grid, device)
        pool = BlockPool(blocks, block_tokens, PrefixIndex("salt", block_tokens, hasher))
        scheduler = Scheduler(
            pool,
            max_batch_tokens=budget,
            max_sequences=sequences,
            prefix_reuse=reuse,
            cells=CellPool(pool, classes or [range(grid[0] * grid[1])]),
        )
        engine = Engine(
            identity=EngineIdentity(model="fake", version="0"),
            runner=runner,
            pool=pool,
            scheduler=scheduler,
            protection=Protection(first_tokens=first, recent_tokens=recent),
            speculator=Speculator(proposer, Costs(row=0.0), longest=4) if proposer else None,
            retention=retention,
            clock=clock,
        )
        return engine, runner

    return make


@pytest.fixture
def core() -> Iterator[Any]:
    """A scripted core, running."""
    from ullage_engine.fake_core import FakeCore

    core = FakeCore().start()
    yield core
    core.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny byte-level tokenizer."""
    from ullage_engine.fake_engine import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def open_engine(core: Any, tokenizer: Any) -> Callable[..., Any]:
    """Serves the scripted core on free ports: `async with open_engine(**server settings) as addresses`."""
    from ullage_engine.config import ServerConfig, TcpAddress
    from ullage_engine.fake_engine import FakeEngine, running

    def serve(**settings: Any) -> Any:
        local = TcpAddress("127.0.0.1", 0)
        config = ServerConfig(**{"public": local, "admin": local, "drain_seconds": 5.0} | settings)
        return running(FakeEngine(core, tokenizer), config)

    return serve
