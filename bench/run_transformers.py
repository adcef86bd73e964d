"""One contestant of `throughput.py`: transformers' own continuous batching. Usage: run_transformers.py JOB."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import peak_memory_bytes, summary
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from workload import Job

PAGE = 32
"""Tokens a page; smaller than its default of 256, so that prefix sharing can take place."""


def run(job: Job) -> dict[str, Any]:
    """Figures of one job."""
    torch.set_num_threads(job.threads)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa", local_files_only=True
    ).eval()
    generate(model, job, [[1, 2, 3, 4]], 4)
    outputs = generate(model, job, job.prompts, job.output_tokens)
    started = min(output.created_time for output in outputs)  # without allocating its cache
    times = [output.timestamps for output in outputs]
    short = [len(found) for found in times if len(found) != job.output_tokens]
    if short:
        raise RuntimeError(f"{len(short)} answers do not have {job.output_tokens} tokens")
    return summary(started, times) | {
        "engine": "transformers",
        "version": transformers.__version__,
        "kv_type": job.dtype,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def generate(model: Any, job: Job, prompts: list[list[int]], count: int) -> list[Any]:
    """All prompts at once; the answers with their tokens' times."""
    pages = sum(-(-(len(prompt) + count) // PAGE) for prompt in prompts)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + len(prompts),
            max_batch_tokens=max(int(job.options.get("max_batch_tokens", 512)), len(prompts)),
        ),
        record_timestamps=True,
    )
    failed = [output.error for output in outputs.values() if output.error is not None]
    if failed or len(outputs) != len(prompts):
        raise RuntimeError(f"transformers answered {len(outputs)} of {len(prompts)} prompts: {failed[:1]}")
    return list(outputs.values())


if __name__ == "__main__":
    print(json.dumps(run(Job.read(Path(sys.argv[1])))))
