"""Is the engine right and fast on this GPU? One command, a table, and one JSON object as the last line.

    python bench/gpu.py                # everything, in under eight minutes
    python bench/gpu.py --check-only   # every kernel against its reference, nothing timed
    python bench/gpu.py --tune         # which tiles attention is fastest with here, for kernels/tuning.py; half an hour

Needs this repository, torch, triton and transformers, and a GPU. Exit code 0: all checks passed; 1: one did not, or a
measurement failed; 2: nothing could be tried here. What is not measured is `null` or listed as skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

from gpu_sums import BATCHES, KINDS, Budget, aims, decode_cases, table  # noqa: E402

NOTHING_TRIED = 2
MINUTES = 7.5
"""Leaves half a minute of eight for what is under way when time runs out."""
TUNING_MINUTES = 30.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="compare kernels with their references, time nothing")
    parser.add_argument("--minutes", type=float, help=f"begin nothing later ({MINUTES:g}; tuning {TUNING_MINUTES:g})")
    parser.add_argument("--tune", action="store_true", help="measure tiles of attention, and print what to check in")
    options = parser.parse_args(arguments)
    missing = _missing()
    if missing:
        print(f"bench/gpu.py: {missing}", file=sys.stderr)
        return NOTHING_TRIED
    from ullage_engine.cuda import CudaDevice
    from ullage_engine.kernels.dispatch import TRITON

    device = CudaDevice()
    minutes = options.minutes or (TUNING_MINUTES if options.tune else MINUTES)
    run = Run(Budget(minutes * 60, time.monotonic), device, TRITON, machine_of(device))
    return run.tuned() if options.tune else run.report(check_only=options.check_only)


def _missing() -> str | None:
    """What this needs and does not find here."""
    for package in ("torch", "triton", "transformers"):
        try:
            __import__(package)
        except ImportError:
            return f"{package} is not installed; install torch, triton and transformers"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU here; run this where nvidia-smi (or rocm-smi) lists one"
    return None


def machine_of(device: Any) -> dict[str, Any]:
    """What the figures are measured on: no names of hosts, only what makes them comparable."""
    import platform

    import torch
    import transformers
    import triton

    from ullage_engine.kernels import targets

    properties = torch.cuda.get_device_properties(device.torch_device)
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "target": targets.of(device.torch_device).name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


class Run:
    """All parts in order; one that fails is told and the others go on."""

    def __init__(self, budget: Budget, device: Any, operations: Any, machine: dict[str, Any]) -> None:
        self._budget = budget
        self._device = device
        self._operations = operations
        self.failed: list[str] = []
        self.found: dict[str, Any] = {"benchmark": "gpu", "machine": machine}

    def report(self, *, check_only: bool) -> int:
        self._part("checks", 5, self._checks)
        if not check_only:
            self._part("speeds", 5, self._speeds)
            self._part("serving", 60, self._serving)
        return self._end()

    def tuned(self) -> int:
        """Measure tiles, and compare kernels with their references with the ones found."""
        from ullage_engine.kernels import tuning

        tuning.MEASURED.update(self._part("tiles", 60, self._tiles) or {})
        self._part("checks", 5, self._checks)
        return self._end()

    def _end(self) -> int:
        self.found |= {"skipped": self._budget.skipped, "failed": self.failed, "seconds": round(self._budget.spent, 1)}
        for line in (*self._budget.skipped, *(f"FAILED: {line}" for line in self.failed)):
            print(line)
        print(json.dumps(self.found))
        return 1 if self.failed else 0

    def _part(self, name: str, seconds: float, part: Callable[[], Any]) -> Any:
        """A part's result; None where there was no time for it or it failed."""
        import torch

        if not self._budget.allows(name, seconds):
            return None
        try:
            return part()
        except Exception as error:  # noqa: BLE001 - told, and the rest is measured all the same
            lines = str(error).strip().splitlines() or [""]
            self.failed.append(f"{name}: {type(error).__name__}: {lines[0][:300]}")
            return None
        finally:
            torch.cuda.empty_cache()

    def _checks(self) -> None:
        import gpu_checks

        def tell(check: gpu_checks.Check) -> None:
            if not check.passed:
                self.failed.append(f"{check.name}: differs by {check.error:.3g}, allowed {check.allowed:g}")

        done = gpu_checks.run(self._device.torch_device, self._operations, (*KINDS, "fp32"), tell)
        worst = max((check.error for check in done if check.passed), default=None)
        self.found["checks"] = {"passed": sum(c.passed for c in done), "of": len(done), "greatest_error": worst}
        print(f"{self.found['checks']['passed']} of {len(done)} comparisons of kernels with their references passed")

    def _tiles(self) -> dict[Any, Any]:
        from gpu_speed import GpuClock, Speeds
        from gpu_tune import lines, tune

        from ullage_engine.kernels import targets

        where = self._device.torch_device
        found = tune(Speeds(where, self._operations, GpuClock()), targets.of(where), KINDS, self._budget)
        print("\n".join(["", "MEASURED: dict[Key, Tile] = {", *lines(found), "}"]))
        self.found["tiles"] = lines(found)
        return found

    def _speeds(self) -> None:
        from gpu_speed import GpuClock, Speeds

        speeds = Speeds(self._device.torch_device, self._operations, GpuClock())
        bandwidth = self._part("copy bandwidth", 2, speeds.copy_bandwidth)
        if bandwidth is None:
            return
        self.found["copy_gb_s"] = bandwidth / 1e9
        print(f"copies within the GPU: {bandwidth / 1e9:,.0f} GB/s, read and written")
        cases, left_out = decode_cases(self._device.memory().available)
        self._budget.skipped += [f"{case.name}: {case.held_bytes / 2**30:.1f} GiB do not fit" for case in left_out]
        rows = [self._part(case.name, 4, partial(speeds.decode, case, bandwidth)) for case in cases]
        self._keep("decode", "paged_decode, one layer", rows)
        writes = [(kind, tokens) for kind in KINDS for tokens in (32, 128, 8192)]
        rows = [self._part(f"kv_write {k} {t}", 3, partial(speeds.kv_write, k, t, bandwidth)) for k, t in writes]
        self._keep("kv_write", "kv_write, one layer", rows)
        chunks = [(kind, past) for past in (0, 6144, 30_720) for kind in KINDS]
        rows = [self._part(f"paged_prefill {k} {p}", 4, partial(speeds.prefill, k, p, 2048)) for k, p in chunks]
        self._keep("prefill", "paged_prefill of 2048 tokens, beside scaled_dot_product_attention in bfloat16", rows)
        copies = self._part("block copies", 5, partial(speeds.block_copies, "fp8", 256))
        self._keep("copies", "copy_blocks, beside plain copies of as many bytes", copies or [])
        self._keep("aims", "aims (one H200)", aims(self.found["decode"]))

    def _serving(self) -> None:
        from gpu_serving import LLAMA3_8B, Serving, random_llama

        model = random_llama(LLAMA3_8B, self._device.torch_device)
        rows: list[Any] = []
        for kind in KINDS:
            serving = self._part(f"engine {kind}", 25, partial(Serving, model, kind, self._device, max(BATCHES)))
            batches = (1, 32, 128) if serving is not None else ()
            rows += [
                self._part(f"serving {kind}, batch {batch}", 15, partial(serving.measure, batch)) for batch in batches
            ]
            del serving  # its cache is given back before the next one's is taken
        self._keep("serving", "the engine with a Llama-3-8B of random weights, 1024 tokens in, 64 out", rows)

    def _keep(self, name: str, title: str, rows: list[Any]) -> None:
        self.found[name] = [row for row in rows if row is not None]
        print(table(title, self.found[name]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
