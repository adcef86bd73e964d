"""One contestant of `throughput.py`: Ullage's own step loop, in this process. Usage: run_ullage.py JOB."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

from measure import peak_memory_bytes, summary
from workload import Job

from ullage_engine.build import LoadedEngine, build_engine
from ullage_engine.config import EngineConfig
from ullage_engine.layout import CacheLayout
from ullage_engine.models import shape_of
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput


def run(job: Job) -> dict[str, Any]:
    """Figures of one job."""
    engine = build_engine(config_for(job))
    try:
        generate(engine, [[1, 2, 3, 4]], 4, "warm-up")
        before = engine.core.snapshot()
        started, times = generate(engine, job.prompts, job.output_tokens, "r")
        after = engine.core.snapshot()
    finally:
        engine.close()
    steps = after.step - before.step
    return summary(started, times) | {
        "engine": "ullage",
        "version": after.engine_version,
        "kv_type": job.options["kv_type"],
        "kv_bytes": after.blocks.total * after.block_bytes,
        "peak_memory_bytes": peak_memory_bytes(),
        "steps": steps,
        "preemptions": after.counters.preemptions,
        "prefix_hit_tokens": after.counters.prefix_hit_tokens - before.counters.prefix_hit_tokens,
    }


def config_for(job: Job) -> EngineConfig:
    """A cache in which all requests fit, with a twentieth to spare."""
    from transformers import AutoConfig

    kv_type: Any = job.options["kv_type"]
    block_size: Any = job.options.get("block_size", 16)
    shape = shape_of(AutoConfig.from_pretrained(job.model, local_files_only=True))
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, block_size, kv_type)
    spare = len(job.prompts) * block_size
    blocks = layout.blocks_for(int(job.total_tokens * 1.05) + spare)
    dtype: Any = job.dtype
    return EngineConfig(
        model=job.model,
        kv_type=kv_type,
        kv_memory=int(job.options.get("blocks", blocks)) * layout.block_bytes,
        block_size=block_size,
        dtype=dtype,
        threads=job.threads,
        max_sequences=len(job.prompts),
        max_batch_tokens=max(int(job.options.get("max_batch_tokens", 512)), len(job.prompts)),
        max_queue=max(256, len(job.prompts)),
    )


def generate(engine: LoadedEngine, prompts: list[list[int]], count: int, name: str) -> tuple[float, list[list[float]]]:
    """Hand all prompts over and wait; when it began, and when each token came."""
    times: list[list[float]] = [[] for _ in prompts]
    left, done = [len(prompts)], threading.Event()
    errors: list[str] = []

    def receive(index: int, output: TokenOutput) -> None:
        if output.token is not None:
            times[index].append(time.perf_counter())
        if output.error is not None:
            errors.append(output.error)
        if output.finish_reason is not None:
            left[0] -= 1
            if left[0] == 0:
                done.set()

    sampling = SamplingParams(max_tokens=count, temperature=0)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(request_id=f"{name}{index}", prompt=tuple(prompt), sampling=sampling)
        engine.core.submit(request, lambda output, index=index: receive(index, output))  # type: ignore[misc]
    done.wait()
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    return started, times


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(run(Job.read(Path(sys.argv[1])))))
