"""An engine without a model over scripted memory tiers, for tests of what moves between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ullage_engine.budgets import Retention
from ullage_engine.cells import CellPool
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.fake_device import FakeDevice
from ullage_engine.fake_runner import FakeRunner, expected_tokens
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex, blake2b_128
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.scheduler import Scheduler
from ullage_engine.speculation.control import Costs
from ullage_engine.speculation.ngram import NgramProposer
from ullage_engine.speculation.speculator import Speculator
from ullage_engine.tiers.disk import BlockFolder
from ullage_engine.tiers.manager import Bounds, TierManager
from ullage_engine.tiers.packing import CellPacking
from ullage_engine.tiers.residency import TieredResidency
from ullage_engine.tiers.scripted import Script, ScriptedTransfers
from ullage_engine.tiers.transfer import Copy

VOCABULARY = 5


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class AfterDevice(ScriptedTransfers):
    """Scripted copies that begin once the device has done what it was given before."""

    def __init__(self, device: FakeDevice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._device = device

    def submit(self, copies: Sequence[Copy]) -> None:
        self._device.mark().wait()
        super().submit(copies)


@dataclass
class Tiered:
    """An engine and all its parts."""

    engine: Engine
    runner: FakeRunner
    residency: TieredResidency
    transfers: ScriptedTransfers
    clock: Clock
    folder: BlockFolder | None
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)

    def submit(self, name: str, prompt: list[int], count: int, **options: Any) -> list[TokenOutput]:
        sampling = SamplingParams(max_tokens=count, temperature=0)
        request = GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling, **options)
        self.requests[name], self.outputs[name] = request, []
        self.engine.add(request, self.outputs[name].append)
        return self.outputs[name]

    def finish(self, limit: int = 3000) -> None:
        """Step until nothing is live."""
        for _ in range(limit):
            if self.engine.idle:
                return
            self.engine.step()
        raise AssertionError(f"not idle after {limit} steps")

    def settle(self, limit: int = 3000) -> None:
        """Let all copies end, those that hang too."""
        for _ in range(limit):
            self.transfers.release()
            self.engine.tend()
            if not self.transfers.running:
                return
        raise AssertionError(f"copies are under way after {limit} turns")

    def ask(self, prompt: list[int], count: int = 1) -> list[int | None]:
        """The answer to one request, alone; copies have ended then."""
        outputs = self.submit(f"q{len(self.requests)}", prompt, count)
        self.finish()
        self.settle()
        return [output.token for output in outputs]


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, VOCABULARY)


def make_tiered(
    *,
    blocks: int = 12,
    size: int = 4,
    host: int = 32,
    disk: int = 0,
    folder: Path | None = None,
    script: Script = Script(progress=1.0),  # noqa: B008 - frozen
    seed: int = 0,
    budget: int = 24,
    sequences: int = 4,
    reuse: bool = True,
    hasher: Callable[[bytes], bytes] = blake2b_128,
    bounds: Bounds | None = None,
    fingerprint: str = "test",
    grid: tuple[int, int] = (1, 1),
    classes: Sequence[Sequence[int]] = ((0,),),
    retention: Retention | None = None,
    proposer: NgramProposer | None = None,
    copies: Callable[[torch.Tensor, Any], Any] | None = None,
    device: FakeDevice | None = None,
    **protection: int,
) -> Tiered:
    """Everything in memory but the disk tier; time passes as the test says.

    Args:
        copies: makes another transfer engine than the scripted one, over the pool's bytes and the host tier's.
        device: decode steps are launched on it; a copy begins after what it was given before, as on a lane.
    """
    runner = FakeRunner(blocks, size, VOCABULARY, cell_grid=grid, device=device)
    index = PrefixIndex("salt", size, hasher)
    pool = BlockPool(blocks, size, index)
    memory: Any = np.zeros((host, runner.block_bytes), np.uint8)
    manager = TierManager(host, disk, pool.lost, bounds or Bounds())
    files = BlockFolder(folder, disk, fingerprint, memory) if folder is not None else None
    if files is not None:
        manager.restore(files.restore(index))
    clock = Clock()
    movers = files.movers() if files is not None else None
    transfers: Any = (ScriptedTransfers if device is None else partial(AfterDevice, device))(
        runner.data, memory, script, seed, movers, clock.sleep
    )
    if copies is not None:
        transfers = copies(runner.data, memory)
    cells = CellPool(pool, classes)
    residency = TieredResidency(pool, manager, transfers, clock, CellPacking(pool, cells, runner))
    scheduler = Scheduler(
        pool,
        max_batch_tokens=budget,
        max_sequences=sequences,
        prefix_reuse=reuse,
        cells=cells,
        residency=residency,
    )
    engine = Engine(
        identity=EngineIdentity(model="fake", version="0"),
        runner=runner,
        pool=pool,
        scheduler=scheduler,
        protection=Protection(first_tokens=protection.get("first", 4), recent_tokens=protection.get("recent", 4)),
        tiers=residency,
        retention=retention,
        speculator=Speculator(proposer, Costs(row=0.0), longest=4) if proposer else None,
        clock=clock,
    )
    return Tiered(engine, runner, residency, transfers, clock, files)
