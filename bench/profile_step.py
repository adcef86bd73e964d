"""Where the time of a step goes: SmolLM2, a batch of decoding sequences, or one chunk of prefill.

    python bench/profile_step.py [--sequences 32] [--context 192] [--steps 20] [--prefill 512] [--dtype bfloat16]

Parts are measured by wrapping the functions that do them, inside one real engine; what is not wrapped (residuals,
transformers' and torch's own Python; with torch alone also norms, rotary embedding and activation functions) is `rest
of the model`. Wrapping costs some microseconds a call, shown as `wrapping`. The last line is one JSON object: seconds a
step by part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from measure import machine
from model import load
from throughput import model_and_text

from ullage_engine import attention, engine, fused, models
from ullage_engine import runner as runner_module
from ullage_engine.cells import CellPool
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.packing import PackedLinear
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore


class Clock:
    """Time by part; a part's time does not count for the parts around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls = 0
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its own time booked under `part`."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return wrapper


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile decode steps, then a prefill step."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    folder, text_ids = model_and_text()
    models.quiet_progress()
    native = options.kernels == "native"
    loaded, kernels = load(folder, getattr(torch, options.dtype), native=native)
    clock = Clock()
    subject = build(loaded, options, kernels)
    wrap(clock, loaded, subject)
    report = {"machine": machine(), "settings": vars(options)}
    report["decode"] = decode(clock, subject, text_ids, options)
    report["prefill"] = prefill(clock, subject, text_ids, options)
    for name in ("decode", "prefill"):
        show(name, report[name])
    print(json.dumps(report))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=192, help="tokens of each sequence when measured")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill step")
    parser.add_argument("--kv-type", default="fp8")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


def build(loaded: models.LoadedModel, options: argparse.Namespace, kernels: CpuKernels | None) -> Engine:
    """An engine with room for the batch; no prefix reuse, so that every prompt is computed."""
    shape = models.shape_of(loaded.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, options.block_size, options.kv_type)
    longest = options.context + options.steps + 8
    blocks = options.sequences * layout.blocks_for(longest) + layout.blocks_for(options.prefill) + 8
    pool = BlockPool(blocks, options.block_size, PrefixIndex("profile", options.block_size))
    return Engine(
        identity=EngineIdentity(model=loaded.name, version="0"),
        runner=ModelRunner(loaded.model, BlockStore(layout, blocks, "cpu", None, kernels), torch.device("cpu")),
        pool=pool,
        scheduler=Scheduler(
            pool,
            max_batch_tokens=max(options.prefill, options.sequences),
            max_sequences=options.sequences,
            prefix_reuse=False,
            cells=CellPool(pool, layout.cell_classes),
        ),
        protection=Protection(first_tokens=0, recent_tokens=0),
    )


def wrap(clock: Clock, loaded: models.LoadedModel, subject: Engine) -> None:
    """Put the clock around every part."""
    store = subject._runner.store
    store.operations = replace(
        store.operations,
        kv_write=clock.timed("cache write: quantise, scatter", store.operations.kv_write),
        paged_decode=clock.timed("attention: one token a sequence", store.operations.paged_decode),
        paged_prefill=clock.timed("attention: chunks", store.operations.paged_prefill),
    )
    for name in ("rms_norm", "silu_mul", "rotate"):
        setattr(CpuKernels, name, clock.timed("norms, rotary embedding, activation", getattr(CpuKernels, name)))
    names: list[tuple[Any, str, str]] = [
        (attention, "paged_attention", "attention: masks, packing, Python"),
        (fused, "attend_packed", "attention: masks, packing, Python"),
        (runner_module, "make_batch", "batch tensors"),
        (engine, "sample", "sampling"),
    ]
    for module, name, part in names:
        setattr(module, name, clock.timed(part, getattr(module, name)))
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.paged_attention)
    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear | PackedLinear):
            part = "linear: output head" if name.endswith("lm_head") else "linear: layers"
            module.forward = clock.timed(part, module.forward)  # type: ignore[method-assign]
    loaded.model.forward = clock.timed("rest of the model", loaded.model.forward)
    subject._runner.forward = clock.timed("runner", subject._runner.forward)  # type: ignore[method-assign]


def decode(clock: Clock, subject: Engine, text_ids: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Steps in which every sequence computes one token."""
    for index in range(options.sequences):
        add(subject, f"d{index}", text_ids[index * 300 :][: options.context], options.steps + 2)
    while not all(sequence.generated for sequence in subject.scheduler.live()):
        subject.step()
    figures = measure(clock, subject, options.steps)
    while not subject.idle:
        subject.step()
    return figures


def prefill(clock: Clock, subject: Engine, text_ids: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """One step that computes a whole prompt; the first of two is not counted."""
    add(subject, "p0", text_ids[-options.prefill :], 1)
    subject.step()
    add(subject, "p1", text_ids[: options.prefill], 1)
    return measure(clock, subject, 1)


def add(subject: Engine, name: str, prompt: list[int], count: int) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=0)
    subject.add(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling), lambda _: None)


def measure(clock: Clock, subject: Engine, steps: int) -> dict[str, Any]:
    """Mean seconds by part over `steps` steps, and the median step."""
    clock.seconds.clear()
    clock.calls = 0
    totals = []
    for _ in range(steps):
        began = time.perf_counter()
        clock.timed("scheduling, bookkeeping", subject.step)()
        totals.append(time.perf_counter() - began)
    return {
        "step_p50_s": round(statistics.median(totals), 5),
        "step_mean_s": round(statistics.fmean(totals), 5),
        "wrapping_s": round(wrapping_cost() * clock.calls / steps, 5),
        "parts_s": {part: round(seconds / steps, 5) for part, seconds in by_cost(clock.seconds)},
    }


def by_cost(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def wrapping_cost() -> float:
    """Seconds that the clock adds to a call."""
    clock, count = Clock(), 20_000
    nothing = clock.timed("x", lambda: None)
    began = time.perf_counter()
    for _ in range(count):
        nothing()
    return (time.perf_counter() - began) / count


def show(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}: {figures['step_mean_s'] * 1e3:.1f} ms a step (wrapping {figures['wrapping_s'] * 1e3:.1f} ms)")
    for part, seconds in figures["parts_s"].items():
        print(f"  {seconds * 1e3:8.2f} ms {100 * seconds / figures['step_mean_s']:5.1f} %  {part}")


if __name__ == "__main__":
    main()
