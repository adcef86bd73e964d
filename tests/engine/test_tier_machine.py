"""An engine over memory tiers, through any order of requests, aborts, evictions and of what copies may do.

Copies move half a block at a time, in any order, fail, corrupt what they wrote, or hang. The runner's numbers depend on
all earlier ones as read back from the pool, so one wrong byte anywhere changes the answer.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_engine_machine import NAMES, POLICIES
from tiered import Tiered, expected, make_tiered

from ullage_engine.budgets import Retention
from ullage_engine.fake_device import FakeDevice
from ullage_engine.fake_runner import mix
from ullage_engine.prefix import blake2b_128
from ullage_engine.request import KvBudget
from ullage_engine.speculation.ngram import NgramProposer
from ullage_engine.tiers.manager import Bounds
from ullage_engine.tiers.scripted import Script

HASHERS = {
    "good": blake2b_128,
    "weak": lambda data: bytes([sum(data) % 3]),
    "constant": lambda data: b"same",
}
SCRIPTS = (
    Script(progress=0.9),
    Script(progress=0.3),
    Script(progress=0.05),
    Script(progress=0.6, failure=0.2),
    Script(progress=0.6, corruption=0.2),
    Script(progress=0.6, stuck=0.1),
    Script(progress=0.4, failure=0.1, corruption=0.1, stuck=0.05),
)
SIZE = 4
GRID, CLASSES = (2, 2), ((0, 1), (2, 3))
BUDGETS = (None, None, None, 5, 9, 0.3, 0.6)


class Scene:
    """One engine with random settings, and random things done to it."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.random = random
        self.blocks = random.choice([6, 10, 16])
        disk = random.choice([0, 0, 6, 40])
        self.tiered: Tiered = make_tiered(
            blocks=self.blocks,
            size=SIZE,
            host=random.choice([1, 4, 12, 60]),
            disk=disk,
            folder=folder if disk else None,
            script=random.choice(SCRIPTS),
            seed=random.randrange(1 << 30),
            budget=random.randint(4, 24),
            sequences=random.randint(1, 4),
            reuse=random.random() < 0.85,
            hasher=random.choice([*HASHERS.values()]),
            grid=GRID,
            classes=CLASSES,
            retention=Retention(interval=5, policies={policy.name: policy for policy in POLICIES}),
            proposer=NgramProposer() if random.random() < 0.3 else None,
            device=self.device(),
            bounds=Bounds(
                stores=random.choice([1, 64]),
                spills=random.choice([1, 8]),
                fetches=random.choice([0, 64]),
                pause_s=random.choice([0.0, 1.0, 30.0]),
            ),
        )
        self.aborted: set[str] = set()
        self.packed = 0
        """Times that a sequence's cells were seen on their way back."""
        self.heads = [[random.randint(0, 1) for _ in range(SIZE * 3)] for _ in range(3)]

    def device(self) -> FakeDevice | None:
        """What decode steps are launched on; None: none is."""
        return None

    def submit(self) -> None:
        random, name = self.random, f"r{len(self.tiered.requests)}"
        head = random.choice(self.heads)[: random.randint(1, SIZE * 3)]
        prompt = head + [random.randint(0, 1) for _ in range(random.randint(0, 6))]
        count = min(random.randint(1, 20), self.blocks * SIZE - len(prompt))
        budget = random.choice(BUDGETS)
        options: dict[str, Any] = {"kv_policy": random.choice(NAMES)}
        options["kv_budget"] = None if budget is None else KvBudget.of(budget)
        self.tiered.submit(name, prompt, count, **options)
        for _ in range(random.choice([0, 0, 0, 0, 2])):
            self.tiered.submit(f"r{len(self.tiered.requests)}", prompt, count, fork_of=name, **options)

    def step(self) -> None:
        self.tiered.engine.step()

    def tend(self) -> None:
        self.tiered.engine.tend()

    def time(self) -> None:
        self.tiered.clock.now += self.random.choice([0.1, 1.0, 3.0, 40.0])

    def unstick(self) -> None:
        self.tiered.transfers.release()

    def preempt(self) -> None:
        running = self.tiered.engine.scheduler.running
        if running:
            self.tiered.engine.scheduler.preempt(self.random.choice(running))

    def abort(self) -> None:
        live = [name for name in self.tiered.requests if not self.ended(name)]
        if live:
            name = self.random.choice(live)
            self.aborted.add(name)
            self.tiered.engine.abort(name)

    def compact(self) -> None:
        self.tiered.engine.compact(1000.0)

    def evict(self) -> None:
        engine = self.tiered.engine
        tiers = self.random.choice([("drop",), ("host", "drop"), ("host",)])
        ratio = self.random.uniform(0.01, 1.0)
        plan = engine.evict(ratio=ratio, bytes_=None, dry_run=True, tiers=tiers)
        free = engine.pool.free
        report = engine.evict(ratio=ratio, bytes_=None, dry_run=False, tiers=tiers)
        if "host" not in tiers:  # else stores that end meanwhile free blocks too
            assert engine.pool.free - free == report.blocks_freed, "the report and the pool disagree"
            assert plan.blocks_freed <= report.blocks_freed
        assert report.blocks_freed == report.dropped + report.demoted <= report.eligible_blocks
        assert report.blocks_freed >= min(report.requested_blocks, report.eligible_blocks)
        assert "drop" in tiers or report.dropped == 0, "content was dropped that was only to be demoted"

    def check(self) -> None:
        """Books agree, and every row that can be read is the sequence's own."""
        self.tiered.engine.check_integrity()
        images = [sequence.image for sequence in self.tiered.engine.scheduler.running]
        self.packed += sum(image is not None and image.cells is not None for image in images)
        for sequence in self.tiered.engine.scheduler.running:
            if sequence.reads is not None or sequence.loading or sequence in self.tiered.residency.failed:
                continue
            values, value = [], 0
            for position, token in enumerate(sequence.tokens[: sequence.computed]):
                value = mix(value, token, position)
                values.append(value)
            for row in range(sequence.kept):
                index, offset = divmod(row, SIZE)
                for place in range(4):
                    stored = self.tiered.runner.slots[(sequence.table[index] * 4 + place) * SIZE + offset]
                    assert stored == values[sequence.starts[index] + offset], "a row holds another token's value"
            self.check_cells(sequence, values)

    def check_cells(self, sequence: Any, values: list[int]) -> None:
        table, slots = sequence.cells, self.tiered.runner.slots
        for layer, head in itertools.product(range(2), range(2)) if table is not None else ():
            cells = table.cells[layer, head].tolist()
            positions = table.positions[layer, head, : int(table.rows[layer, head])].tolist()
            stored = [slots[cells[row // SIZE] * SIZE + row % SIZE] for row in range(len(positions))]
            assert stored == [values[position] for position in positions], "a survivor's value was not kept"

    def ended(self, name: str) -> bool:
        outputs = self.tiered.outputs[name]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def end(self) -> None:
        engine, clock = self.tiered.engine, self.tiered.clock
        for turn in range(3000):
            if engine.idle:
                break
            engine.step()
            clock.now += 0.2  # whatever hangs becomes late, and then comes after all: its block is needed
            if turn % 100 == 99:
                self.unstick()
        assert engine.idle, "work is stuck"
        self.tiered.settle()
        engine.tend()
        engine.check_integrity()
        assert engine.pool.active == 0 and engine.pool.in_flight == 0, "blocks leak"
        manager = self.tiered.residency.manager
        for table in (manager.host, manager.disk):
            assert table is None or table.used == len(table), "slots leak"
        for name, request in self.tiered.requests.items():
            tokens = [output.token for output in self.tiered.outputs[name]]
            wanted = expected([*request.prompt], request.sampling.max_tokens)
            assert tokens == (wanted[: len(tokens)] if name in self.aborted else wanted)
            assert name in self.aborted or self.tiered.outputs[name][-1].finish_reason == "length"


MOVES = {
    "step": 60,
    "tend": 8,
    "submit": 14,
    "abort": 3,
    "evict": 5,
    "preempt": 4,
    "time": 4,
    "unstick": 2,
    "compact": 1,
}


def episode(
    seed: int, operations: int, folder: Path, kind: type[Scene] = Scene, moves: Mapping[str, int] = MOVES
) -> Scene:
    random = Random(seed)
    scene = kind(random, folder)
    for count in range(operations):
        move = random.choices([*moves], [*moves.values()])[0]
        try:
            getattr(scene, move)()
            scene.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, operation {count} ({move}): {error}") from error
    try:
        scene.end()
    except Exception as error:
        raise AssertionError(f"seed {seed}, end: {error}") from error
    finally:
        if scene.tiered.folder is not None:
            scene.tiered.folder.close()
    return scene


@pytest.mark.filterwarnings("default")
def test_a_hundred_thousand_operations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Plain seeded random (ULLAGE_TEST_OPERATIONS says how many operations); a failure names its seed."""
    caplog.set_level("ERROR")
    left, seed, seen = int(os.environ.get("ULLAGE_TEST_OPERATIONS", "100000")), 0, dict.fromkeys(SEEN, 0)
    while left > 0:
        operations = min(left, 250)
        scene = episode(seed, operations, tmp_path / str(seed % 50))
        for what, count in SEEN.items():
            seen[what] += count(scene)
        left -= operations
        seed += 1
    assert all(seen.values()), f"never tried: {seen}"


SEEN = {
    "stored": lambda scene: scene.tiered.residency.manager.tally["host"].stored,
    "loaded": lambda scene: scene.tiered.residency.manager.tally["host"].loaded,
    "spilled": lambda scene: scene.tiered.residency.manager.tally["disk"].stored,
    "fetched": lambda scene: scene.tiered.residency.manager.tally["disk"].loaded,
    "failed": lambda scene: scene.tiered.residency.manager.tally["host"].failed,
    "failed on disk": lambda scene: scene.tiered.residency.manager.tally["disk"].failed,
    "cells on their way back": lambda scene: scene.packed,
    "preempted": lambda scene: scene.tiered.engine.scheduler.tally.preemptions,
}
