"""One contestant of `throughput.py`: vLLM, in an environment of its own. Usage: VLLM_PYTHON run_vllm.py JOB."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from measure import peak_memory_bytes, summary
from workload import Job


def run(job: Job) -> dict[str, Any]:
    """Figures of one job."""
    # Read by vLLM and OpenMP when they are imported.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(job.options.get("kv_gib", 1)),
        "OMP_NUM_THREADS": str(job.threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    longest = max(map(len, job.prompts)) + job.output_tokens
    llm = vllm.LLM(
        model=job.model,
        dtype=job.dtype,
        max_model_len=longest,
        max_num_seqs=len(job.prompts),
        max_num_batched_tokens=max(int(job.options.get("max_batch_tokens", 512)), longest),
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    generate(llm, [[1, 2, 3, 4]], 4, "warm-up")
    started, times = generate(llm, job.prompts, job.output_tokens, "r")
    return summary(started, times) | {
        "engine": "vllm",
        "version": vllm.__version__,
        "kv_type": job.dtype,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def generate(llm: Any, prompts: list[list[int]], count: int, name: str) -> tuple[float, list[list[float]]]:
    """Hand all prompts over and step the engine; when it began, and when each token came."""
    import vllm

    sampling = vllm.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    times: dict[str, list[float]] = {}
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{name}{index}", {"prompt_token_ids": prompt}, sampling)
        times[f"{name}{index}"] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            now, seen = time.perf_counter(), times[output.request_id]
            seen.extend([now] * (len(output.outputs[0].token_ids) - len(seen)))
    return started, list(times.values())


if __name__ == "__main__":
    print(json.dumps(run(Job.read(Path(sys.argv[1])))))
