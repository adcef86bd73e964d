"""Every kernel, compiled for every GPU it is meant for: does it, and does it fit?

    python bench/kernels_aot.py [--reduced] [--targets sm_80,gfx942] [--kernels kv_write] [--jobs 2]

No GPU is needed: Triton brings all compilers. Serving configurations are head sizes 64, 128, 256; 1, 3, 4, 8 queries
a KV head; each cache type; blocks of 8, 16, 32 tokens; builds that are alike are made once. `--reduced` keeps one
configuration for all targets and adds every other head size with each cache type, every other value, and the builds
that come closest to a target's limits, on one target each. A build fails that does not compile, spills
registers, or takes more shared memory than a thread block may have on its target. The table shows the greatest figures
of each kernel's builds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from multiprocessing import get_context
from typing import Any

from ullage_engine.kernels import dispatch
from ullage_engine.kernels.build import Build, Serving
from ullage_engine.kernels.targets import TARGETS, Target
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import CACHE_TYPES, KvType

HEAD_SIZES = (64, 128, 256)
QUERIES = (1, 3, 4, 8)
BLOCK_SIZES = (8, 16, 32)
KV_HEADS = 8
LAYERS = 2
USUAL: tuple[int, int, KvType, int] = (128, 4, "fp8", 16)
"""Head size, query heads a KV head, cache type and tokens a block of the models most served."""
TIGHT: tuple[tuple[str, tuple[int, int, KvType, int]], ...] = (
    ("sm_80", (256, 1, "fp8", 16)),
    ("sm_90", (128, 8, "fp32", 8)),
    ("sm_120", (256, 8, "fp32", 32)),
    ("gfx942", (256, 8, "fp32", 16)),
)
"""Targets, and what comes closest to their registers or shared memory, or was seen beyond with larger tiles."""
PROGRESS = 100
"""Builds after which it is said how far it is: all of them take hours."""


@dataclass(frozen=True, slots=True)
class Job:
    """One build of one target, described so that another process finds it again."""

    target: str
    operation: int
    serving: tuple[int, int, KvType, int]
    index: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one build."""

    kernel: str
    function: str
    """The Triton function, which several builds may be of."""
    target: str
    serving: tuple[int, int, KvType, int]
    registers: int = 0
    """A thread's; vector registers on AMD."""
    spills: int = 0
    """Bytes stored for want of registers; registers on AMD."""
    shared: int = 0
    """Bytes of shared memory a thread block."""
    seconds: float = 0.0
    error: str | None = None


def servings(reduced: bool) -> dict[Target, list[tuple[int, int, KvType, int]]]:
    """Configurations to compile for each target."""
    if not reduced:
        every = list(product(HEAD_SIZES, QUERIES, CACHE_TYPES, BLOCK_SIZES))
        return dict.fromkeys(TARGETS, every)
    chosen = {target: [USUAL, *(tight for name, tight in TIGHT if name == target.name)] for target in TARGETS}
    there = {(head_size, kind) for each in chosen.values() for head_size, _, kind, _ in each}
    shapes = [shape for shape in product(HEAD_SIZES, CACHE_TYPES) if shape not in there]
    for (head_size, kind), target, queries, tokens in zip(
        shapes, cycle(TARGETS), cycle(QUERIES), cycle(BLOCK_SIZES), strict=False
    ):
        chosen[target].append((head_size, queries, kind, tokens))
    return chosen


def serving(head_size: int, queries: int, kind: KvType, block_tokens: int) -> Serving:
    return Serving(CacheLayout(LAYERS, KV_HEADS, head_size, block_tokens, kind), queries)


def jobs(reduced: bool, targets: set[str], kernels: set[str]) -> Iterator[Job]:
    """Builds that differ from each other."""
    seen = set()
    for target, configurations in servings(reduced).items():
        if target.name not in targets:
            continue
        for at, configuration in product(range(len(dispatch.OPERATIONS)), configurations):
            operation = dispatch.OPERATIONS[at]
            for index, build in enumerate(operation.builds(serving(*configuration), target)):
                key = (target.name, _identity(build))
                if build.name.partition("/")[0] in kernels and key not in seen:
                    seen.add(key)
                    yield Job(target.name, at, configuration, index)


def _identity(build: Build) -> tuple[Any, ...]:
    parts = (sorted(build.arguments.items()), sorted(build.constants.items()))
    return build.name, repr(parts), build.num_warps, build.num_stages, build.max_registers


def run(job: Job) -> Outcome:
    """Compile one build, in a process that does nothing else."""
    target = next(t for t in TARGETS if t.name == job.target)
    build = dispatch.OPERATIONS[job.operation].builds(serving(*job.serving), target)[job.index]
    name = f"{build.function.__module__}.{build.function.__name__}"
    began = time.perf_counter()
    try:
        registers, spills, shared = compiled(build, target)
    except Exception as error:  # noqa: BLE001 - whatever a compiler throws is this build's outcome
        return Outcome(build.name, name, target.name, job.serving, error=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    return Outcome(
        build.name, name, target.name, job.serving, registers, spills, shared, seconds, misfit(target, spills, shared)
    )


def misfit(target: Target, spills: int, shared: int) -> str | None:
    """Why a build that was compiled must not run."""
    if spills:
        return f"{spills} {'bytes' if target.backend == 'cuda' else 'registers'} spilled"
    if shared > target.shared_bytes:
        return f"{shared} bytes of shared memory, of {target.shared_bytes}"
    return None


def compiled(build: Build, target: Target) -> tuple[int, int, int]:
    """Registers, spills and shared memory of a build."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.function.arg_names
    missing = set(names) ^ {*build.arguments, *build.constants}
    if missing:
        raise ValueError(f"the build and the function differ in their arguments {sorted(missing)}")
    signature = {name: build.arguments.get(name, "constexpr").partition(":")[0] for name in names}
    aligned = [at for at, name in enumerate(names) if build.arguments.get(name, "").endswith(":16")]
    source = ASTSource(
        build.function, signature, dict(build.constants), {(at,): [["tt.divisibility", 16]] for at in aligned}
    )
    triton.knobs.nvidia.dump_ptxas_log = True
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    if build.max_registers:
        options["maxnreg"] = build.max_registers
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
    resources = ptxas_resources(log.getvalue()) if target.backend == "cuda" else amd_resources(made.asm["amdgcn"])
    return *resources, int(made.metadata.shared)


def ptxas_resources(log: str) -> tuple[int, int]:
    """Registers and bytes spilled, from what `ptxas -v` says."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise ValueError(f"ptxas says nothing of registers and spills: {log!r}")
    return max(map(int, registers)), sum(map(int, spills))


def amd_resources(assembly: str) -> tuple[int, int]:
    """Vector registers, and registers of either kind spilled, from the metadata in the assembly."""
    counts = {name: int(count) for name, count in re.findall(r"\.(\w+_count):\s+(\d+)", assembly)}
    return counts["vgpr_count"], counts["vgpr_spill_count"] + counts["sgpr_spill_count"]


def table(outcomes: Sequence[Outcome]) -> str:
    """Greatest figures of each kernel on each target."""
    lines = [
        "| kernel | target | builds | registers | shared KiB | spills | slowest s | failed |",
        "|---|---|" + "--:|" * 6,
    ]
    order = [target.name for target in TARGETS]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda o: (o.kernel, order.index(o.target))):
        groups.setdefault((outcome.kernel, outcome.target), []).append(outcome)
    for names, members in groups.items():
        registers, shared = max(o.registers for o in members), max(o.shared for o in members) / 1024
        slowest, failed = max(o.seconds for o in members), sum(o.error is not None for o in members)
        figures = (len(members), registers, f"{shared:.1f}", sum(o.spills for o in members), f"{slowest:.1f}", failed)
        lines.append(f"| {' | '.join(map(str, (*names, *figures)))} |")
    return "\n".join(lines)


def told(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """The outcomes; on standard error each failure as it comes, and how far it is."""
    for count, outcome in enumerate(outcomes, 1):
        if outcome.error:
            sys.stderr.write(f"{outcome.kernel} for {outcome.target}, serving {outcome.serving}: {outcome.error}\n")
        if count % PROGRESS == 0:
            sys.stderr.write(f"{count} of {total} builds\n")
        yield outcome


def summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {
        "kernels": len({o.function for o in outcomes}),
        "targets": len({o.target for o in outcomes}),
        "builds": len(outcomes),
        "spills": sum(o.spills for o in outcomes),
        "failures": sum(o.error is not None for o in outcomes),
    }


def main() -> int:
    """0: every build fits; 1: some do not, each named on standard error."""
    names = [operation.__name__.rpartition(".")[2] for operation in dispatch.OPERATIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reduced", action="store_true", help="every value of every parameter, not every combination")
    parser.add_argument("--targets", default=",".join(t.name for t in TARGETS), help="of these alone (%(default)s)")
    parser.add_argument("--kernels", default=",".join(names), help="these alone (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at once (%(default)s)")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set, so that nothing would be compiled; unset it")
    targets, kernels = set(options.targets.split(",")), set(options.kernels.split(","))
    for option, unknown in (("targets", targets - {t.name for t in TARGETS}), ("kernels", kernels - set(names))):
        if unknown:
            parser.error(f"--{option}: nothing is called {', '.join(sorted(unknown))}")
    todo = list(jobs(options.reduced, targets, kernels))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # what was compiled before would say nothing of its registers
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as processes:
            outcomes = list(told(processes.map(run, todo), len(todo)))
    sys.stdout.write(f"{table(outcomes)}\n{json.dumps(summary(outcomes))}\n")
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
