"""Ask a running engine for what a plan otherwise assumes: bytes of a token, and how long steps of n sequences take.

Either an engine that runs already (its URL), or engines started here from an InferenceService manifest, one for each
cache type that is compared. A run takes a few dozen tokens for a few batch sizes: enough to see whether steps cost the
same for one sequence as for eight, too short for a benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from ullage_operator.arguments import engine_arguments
from ullage_operator.model import InferenceService

from .. import scratch
from ..errors import BrokenLoop, InputError
from ..launch import ENGINE_START_S, installed_programs
from ..preflight import HOST, check_model_source, read_manifest
from ..processes import ChildSpec, Supervisor
from ..stopping import Stopped, StopSignals
from ..tables import columns
from . import report
from .engine_client import EngineClient, Facts
from .planning import Measured, Plan, Request, caches, make_plan
from .sums import Pace, token_bytes

BATCHES = (1, 2, 4, 8)
ANSWER_TOKENS = 32
WARM_UP_TOKENS = 8
ROWS = {"bf16": "fp16", "fp8": "fp8", "int8": "int8"}
"""Cache types of the engine, and the row of the plan that each stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch size as measured."""

    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine as measured."""

    row: str | None
    """Row of the plan that it stands for; None: which cache it has is not known."""
    facts: Facts
    steps: tuple[Step, ...]

    @property
    def pace(self) -> Pace:
        """A straight line through the steps."""
        return line([(step.sequences, step.seconds) for step in self.steps])


def measured_plan(what: str, request: Request, *, gpu_named: bool) -> tuple[Plan, dict[str, Any], str]:
    """The plan with measured paces and bytes, as an object, as a document, and in words.

    Raises:
        InputError: the engine or the manifest cannot be used.
        BrokenLoop: an engine broke while it was measured.
    """
    runs = asyncio.run(measure(what, request))
    if not gpu_named:
        request = on_measured_pool(request, runs)
    plan = make_plan(request, by_row(runs, [cache.name.partition(" ")[0] for cache in caches(request.budget)]))
    document = report.as_dict(plan) | {"measured": [_run_dict(run) for run in runs]}
    return plan, document, f"{report.text(plan)}\n\n{text(runs, request)}"


async def measure(what: str, request: Request) -> list[Run]:
    """All runs that were asked for, one after the other."""
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            if what.startswith(("http://", "https://")):
                return [await stop.or_finish(ask(EngineClient(http, what.rstrip("/")), request))]
            service = read_manifest(Path(what))
            check_model_source(service)
            return [await stop.or_finish(_started(service, kind, http, request)) for kind in ("bf16", "fp8")]
        except Stopped as error:
            raise BrokenLoop("stopped before the measurement was done") from error


async def ask(
    client: EngineClient, request: Request, row: str | None = None, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Measure one engine that serves."""
    facts = await client.facts()
    steps = []
    await client.answer(1, WARM_UP_TOKENS, clock)  # the first requests of a process are slower
    for count in BATCHES:
        seconds = step_seconds(await client.answer(count, ANSWER_TOKENS, clock))
        if seconds is not None:
            steps.append(Step(sequences=count, seconds=seconds))
    if not steps:
        raise BrokenLoop(f"{client.url}: answers ended before a step could be timed")
    return Run(row=row or row_of(facts, request), facts=facts, steps=tuple(steps))


def step_seconds(streams: Sequence[Sequence[float]]) -> float | None:
    """Seconds of a step while all of several streams ran, from the times their tokens came; None: never all.

    From the moment the last one began to the moment the first one ended, each step gave every stream one token: the
    median of the pauses, which a machine that was busy for a moment does not bend.
    """
    if any(len(times) < 2 for times in streams):
        return None
    began, ended = max(times[0] for times in streams), min(times[-1] for times in streams)
    within = [[at for at in times if began <= at <= ended] for times in streams]
    pauses = [later - earlier for times in within for earlier, later in pairwise(times)]
    return (median(pauses) or None) if pauses else None


def line(points: Sequence[tuple[int, float]]) -> Pace:
    """Least squares through (sequences, seconds), with neither part below zero."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    each = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    each = min(max(0.0, each), mean_y / mean_x)
    return Pace(base=mean_y - each * mean_x, each=each)


def row_of(facts: Facts, request: Request) -> str | None:
    """Which cache an engine has, by the bytes of its tokens; None where they fit none, or several, or are not told."""
    if facts.token_bytes is None:
        return None
    near = [
        cache.name
        for cache in caches(1.0)[:3]
        if abs(token_bytes(request.shape, cache, request.blocks) / facts.token_bytes - 1) < 0.005
    ]
    return near[0] if near else None


def by_row(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Measured]:
    """What the plan's rows take from the runs. Types of 8 bits that were not run take the pace of the one that was."""
    found = {run.row: Measured(pace=run.pace, token_bytes=run.facts.token_bytes) for run in runs if run.row}
    other = [Measured(pace=run.pace, token_bytes=None) for run in runs]
    narrow = found.get("fp8") or found.get("int8")
    filled = {}
    for name in names:
        instead = narrow if name in ("fp8", "int8") and narrow else other[0]
        filled[name] = found.get(name) or replace(instead, token_bytes=None)
    return filled


def on_measured_pool(request: Request, runs: Sequence[Run]) -> Request:
    """The plan for the cache that the engine was given, where no accelerator was named."""
    pool = next((run.facts.pool_bytes for run in runs if run.facts.pool_bytes), None)
    if pool is None:
        raise InputError("--measure: the engine does not tell its cache's size; say --gpu or --memory")
    weights = make_plan(request).weight_bytes
    machine = replace(request.machine, name=f"measured KV cache of {report.size(pool)} beside the weights", reserve=0.0)
    return replace(request, machine=replace(machine, memory_bytes=pool + weights), count_step=False, on_pool=True)


def text(runs: Sequence[Run], request: Request) -> str:
    """What was measured, beside what would have been assumed."""
    rows = []
    for run in runs:
        cache = next((cache for cache in caches(1.0) if cache.name == run.row), None)
        formula = "–" if cache is None else f"{token_bytes(request.shape, cache, request.blocks):,.0f}"
        told = "–" if run.facts.token_bytes is None else f"{run.facts.token_bytes:,.0f}"
        steps = {step.sequences: f"{1000 * step.seconds:.3g} ms" for step in run.steps}
        rows.append([run.row or "?", formula, told, *(steps.get(count, "–") for count in BATCHES), _growth(run)])
    header = ["measured", "B/token by formula", "B/token told", *(f"step of {n}" for n in BATCHES), "grows"]
    names = ", ".join(dict.fromkeys(run.facts.model for run in runs))
    notes = [f"note: {ANSWER_TOKENS} tokens for each sequence of {names}; larger batches follow a line through these"]
    if any(run.steps[-1].seconds < run.steps[0].seconds for run in runs):
        notes.append(
            "note: a step of several took less than a step of one: the machine was busy otherwise. Run it again."
        )
    return "\n".join([columns(header, rows), *notes])


def _growth(run: Run) -> str:
    """How much longer the largest batch's step takes than the smallest's."""
    first, last = run.steps[0], run.steps[-1]
    return f"{last.seconds / first.seconds:.2f} x"


def _run_dict(run: Run) -> dict[str, Any]:
    return {
        "cache": run.row,
        "model": run.facts.model,
        "bytesPerToken": run.facts.token_bytes,
        "poolBytes": run.facts.pool_bytes,
        "steps": [asdict(step) for step in run.steps],
    }


async def _started(service: InferenceService, kind: str, http: aiohttp.ClientSession, request: Request) -> Run:
    """Start the manifest's engine with a cache type, measure it, end it."""
    engine = service.spec.engine
    cache = engine.kv_cache.model_copy(update={"type": kind})
    spec = service.spec.model_copy(update={"engine": engine.model_copy(update={"kv_cache": cache})})
    typed = service.model_copy(update={"spec": spec})
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.scratch_folder())
        supervisor = await stack.enter_async_context(Supervisor())
        arguments = engine_arguments(typed, host=HOST, port=0, admin=f"unix:{folder / 'admin.sock'}")
        argv = (*installed_programs().engine, *arguments)
        child = supervisor.start(ChildSpec(name="engine", argv=argv, log=folder / "engine.log"))
        try:
            ready = await child.ready(ENGINE_START_S)
        except TimeoutError as error:
            raise BrokenLoop(str(error)) from error
        return await ask(EngineClient(http, str(ready["public"])), request, ROWS[kind])
