"""What each eviction policy leaves of a model's memory, through the engine's own blocks and cells.

    python bench/eviction_quality.py [--contexts 1024 2048] [--count 10] [--kvpress-python PATH] [--quick]

Tasks are in `eviction_tasks`. Each is first done with the full cache, and what that cannot do is left out: a score
below 0.9, or an answer with a token that it gives less than half of all probability, which any rounding may turn into
another (`--sure 0` counts these too). Retention is the score divided by the full cache's. Beside it stand the nats
lost: the negative log likelihood of a token of the right answer, given the right ones before it, above the full cache's
(0: nothing is lost). They still tell caches apart that all say the right digits. Two settings: the question is asked
after eviction (`unseen`, what a cache shared by several questions meets) or has been read before it (`seen`).
Budgets are shares of all (layer, head, token) entries of the context, protected ones included. Protected is what the
engine protects by default: as much of the first and the last 256 tokens as a sixteenth and an eighth of the budget is.

kvpress runs in an environment of its own on the same contexts and budgets, against its own full cache, where
`--kvpress-python` (or KVPRESS_PYTHON) names its Python. Results are appended to `--partial` as they come, and a run
that finds results there goes on where it stopped. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eviction_cache import EvictionCache, Settings, Variant
from eviction_report import HEADLINE, SURE, Result, Results, headline, picture, tables
from eviction_tasks import Context, contexts, means, scores, share_right, write
from measure import machine
from run_kvpress import METHODS
from throughput import MODEL
from workload import real_text

from ullage_engine import models
from ullage_engine.config import default_cache_dir
from ullage_engine.kernels import cpu_build
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.policies import NAMES
from ullage_engine.policies.reread import INSTRUCTION

HERE = Path(__file__).resolve().parent
DECODED = 16
"""Steps that are timed to say what a decode step takes."""


@dataclass(frozen=True, eq=False, slots=True)
class Said:
    """One variant's answers, by probe."""

    variant: Variant
    values: list[float]
    nats: list[float]
    """Mean negative log likelihood of a token of the right answer."""
    sure: list[float]
    """How sure the full cache is of the answer; of others nothing."""


def run_ours(
    cache: EvictionCache, context: Context, instruction: Sequence[int], settings: Sequence[str]
) -> Iterator[tuple[str, list[Said]]]:
    """What each variant says to each probe, by setting."""
    base = cache.prefill(context.tokens, instruction)
    cache.decode(base.sequence, DECODED)
    for setting in settings:
        rows: list[list[tuple[float, float]]] = []
        sure: list[float] = []
        variants: list[Variant] = []
        for probe in context.probes:
            prompt = probe.prompt
            if setting == "seen" or not variants:
                cache.release([v.sequence for v in variants])
                read = base if setting == "unseen" else cache.asked(base, prompt)
                variants = cache.variants(read)
                if read is not base:
                    cache.release([read.sequence])
            if setting == "seen":
                prompt = prompt[-1:]
            rows.append(ask(cache, variants, probe.task, prompt, probe.answer))
            sure.append(math.exp(float(cache.chances(variants[0].sequence, prompt, probe.answer).min())))
        cache.release([v.sequence for v in variants])
        said = []
        for variant, column in zip(variants, zip(*rows, strict=True), strict=True):
            values, nats = [value for value, _ in column], [lost for _, lost in column]
            said.append(Said(variant, values, nats, [] if variant.policy else sure))
        yield setting, said
    cache.release([base.sequence])


def ask(
    cache: EvictionCache, variants: Sequence[Variant], task: str, prompt: Sequence[int], answer: Sequence[int]
) -> list[tuple[float, float]]:
    """Of each variant the score, and the nats of a token of the right answer."""
    sequences = [variant.sequence for variant in variants]
    if task == "text":
        chances = [float(cache.chances(sequence, prompt, answer).mean()) for sequence in sequences]
        return [(math.exp(chance), -chance) for chance in chances]
    given = cache.answers(sequences, prompt, answer)
    return [(share_right(answer, one.tokens), -float(one.chances.mean())) for one in given]


def settings_of(context: Context, wanted: Sequence[str]) -> list[str]:
    """Text that goes on asks no question that could have been seen."""
    return [s for s in wanted if s == "unseen" or context.probes[0].task != "text"]


def ours(options: argparse.Namespace, folder: Path, made: dict[int, list[Context]], results: Results) -> dict[str, Any]:
    """Run the engine's side; what it cost."""
    loaded = models.load(folder, "bench", getattr(torch, options.dtype), torch.device("cpu"))
    kernels = None if options.no_kernels else CpuKernels(cpu_build.library(default_cache_dir() / "kernels"))
    instruction = loaded.tokenizer(INSTRUCTION, add_special_tokens=False).input_ids
    settings = Settings(
        policies=tuple(options.policies), keeps=tuple(options.keeps), floor=options.floor, kv_type=options.kv_type
    )
    costs: dict[str, Any] = {}
    for length, some in made.items():
        cache = EvictionCache(loaded, settings, length + 400, kernels)
        for context in some:
            wanted = [
                s for s in settings_of(context, options.settings) if not results.has(length, context.name, s, "ullage")
            ]
            if not wanted:
                continue
            with torch.inference_mode():
                for setting, found in run_ours(cache, context, instruction, wanted):
                    results.add([result_of(length, context, setting, said) for said in found])
                    print(f"  {length} {context.name} {setting}: {line_of(context, found)}", flush=True)
        if cache.costs.scored:
            costs[str(length)] = cost_of(cache)
    return costs


def result_of(length: int, context: Context, setting: str, said: Said) -> Result:
    variant = said.variant
    return Result(
        length,
        context.name,
        setting,
        "ullage",
        variant.policy,
        variant.keep,
        scores(context, said.values),
        scores(context, said.sure) if said.sure else {},
        variant.blocks,
        variant.freed,
        means(context, said.nats),
    )


def line_of(context: Context, found: Sequence[Said]) -> str:
    """Progress: the mean score of every policy at the budget nearest to the headline's."""
    keeps = sorted({s.variant.keep for s in found if s.variant.policy}, key=lambda keep: abs(keep - HEADLINE))
    parts = []
    for said in found:
        variant = said.variant
        if variant.policy is None or (keeps and variant.keep == keeps[0]):
            mean = sum(scores(context, said.values).values()) / len(scores(context, said.values))
            parts.append(f"{variant.policy or 'full'} {mean:.2f}")
    return ", ".join(parts)


def cost_of(cache: EvictionCache) -> dict[str, Any]:
    """What evicting a token costs by policy, beside a decode step; and what the re-reading costs beside a prefill.

    A token is one entry of each head of each layer. Scoring is shared by the cuts to all budgets, as if each had its
    own; the observation of queries is not counted, for here the prefill notes them on its way.
    """
    costs, heads = cache.costs, cache.heads
    step = costs.decode_s / costs.decode_tokens
    per_token = {}
    for name, seconds in costs.score_s.items():
        if name == "reconstruct":
            seconds += costs.reread_s * costs.scored / costs.contexts
        cuts, tokens = costs.cuts, costs.dropped[name] / heads
        score, cut = seconds * (cuts / costs.scored) / tokens, costs.cut_s[name] / tokens
        per_token[name] = {
            "score_us": round(1e6 * score, 1),
            "cut_us": round(1e6 * cut, 1),
            "share_of_decode_step": round((score + cut) / step, 4),
        }
    return {
        "per_evicted_token": per_token,
        "decode_step_ms": round(1e3 * step, 1),
        "prefill_ms": round(1e3 * costs.prefill_s / costs.contexts, 1),
        "reread_prefill_ratio": round(costs.reread_s / costs.prefill_s, 2),
        "reread_tokens_ratio": round(costs.reread_tokens / costs.prefill_tokens, 3),
    }


def kvpress(options: argparse.Namespace, folder: Path, made: dict[int, list[Context]], results: Results) -> None:
    """Run kvpress in its own process, context by context."""
    python = options.kvpress_python or os.environ.get("KVPRESS_PYTHON")
    if not python:
        return
    for length, some in made.items():
        missing = [
            c
            for c in some
            if any(not results.has(length, c.name, s, "kvpress") for s in settings_of(c, options.settings))
        ]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            job = Path(temporary) / "job.json"
            write(
                missing, job, model=str(folder), dtype=options.dtype, threads=options.threads,
                settings=options.settings, keeps=options.keeps, methods=options.kvpress_methods,
            )  # fmt: skip
            with subprocess.Popen(
                [python, str(HERE / "run_kvpress.py"), str(job)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as process:
                for line in process.stdout or ():
                    name, setting, found = json.loads(line)
                    results.add([Result(length, name, setting, "kvpress", **one) for one in found])
                    print(f"  {length} {name} {setting}: kvpress", flush=True)
        if process.returncode:
            sys.exit(f"error: kvpress ended with status {process.returncode}; run {HERE / 'run_kvpress.py'} by hand")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="Hugging Face folder, .gguf file or package:// source")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048], help="tokens (also 4096, 8192)")
    parser.add_argument("--count", type=int, default=10, help="contexts of each of three kinds, at each length")
    parser.add_argument("--first", type=int, default=0, help="number of the first (policies were chosen by 0 to 5)")
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.3, 0.2, 0.1])
    parser.add_argument("--policies", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--settings", nargs="+", choices=("unseen", "seen"), default=["unseen", "seen"])
    parser.add_argument("--sure", type=float, default=SURE, help="see above (%(default)s)")
    parser.add_argument("--floor", type=int, default=0, help="entries that each head keeps at least")
    parser.add_argument("--kv-type", default="bf16", help="the engine's cache type (%(default)s: eviction alone)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="everyone's weights")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="more texts to draw from, in turn")
    parser.add_argument(
        "--kvpress-python", metavar="PATH", help="Python of an environment with kvpress (or KVPRESS_PYTHON)"
    )
    parser.add_argument("--kvpress-methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--no-kernels", action="store_true", help="torch alone instead of the compiled kernels")
    parser.add_argument("--partial", type=Path, help="file of JSON lines to keep results in and to go on from")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one context of each kind at 1,024 tokens")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the plot."""
    options = parse(arguments)
    if options.quick:
        options.contexts, options.count = [1024], 1
    torch.set_num_threads(options.threads)
    models.quiet_progress()
    folder = models.folder_for(models.resolve(options.model), default_cache_dir())
    made = {length: make_contexts(folder, options, length) for length in options.contexts}
    results, about = Results(options.partial), machine()
    costs = ours(options, folder, made, results)
    kvpress(options, folder, made, results)
    done = [r for r in results.all if r.length in made]
    for setting in options.settings:
        print("\n".join(["", *tables(done, options.keeps, setting, options.sure)]), flush=True)
    if options.plot:
        options.plot.write_text(picture(done, options.keeps, options.settings, options.sure))
    report = {
        "machine": about,
        "contexts": options.contexts,
        "first": options.first,
        "count": options.count,
        "costs": costs,
    }
    by_setting = {s: headline(done, options.keeps, s, options.sure) for s in options.settings}
    print(json.dumps(by_setting[options.settings[0]] | {"settings": by_setting} | report))
    return 0


def make_contexts(folder: Path, options: argparse.Namespace, length: int) -> list[Context]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    texts = [encode(text) for text in [real_text(), *(path.read_text() for path in options.text)]]
    return contexts(encode, texts, length, options.count, first=options.first)


if __name__ == "__main__":
    sys.exit(main())
