"""From token times to figures, and what the machine is. Standard library only."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def summary(started: float, token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures of requests that were all handed over at `started`.

    Args:
        token_times: of each request, when each of its tokens was there; in seconds, as is `started`.
    """
    ended = max(times[-1] for times in token_times)
    first = [times[0] - started for times in token_times]
    gaps = [after - before for times in token_times for before, after in pairwise(times)]
    generated = sum(len(times) for times in token_times)
    return {
        "requests": len(token_times),
        "generated_tokens": generated,
        "seconds": round(ended - started, 3),
        "tokens_per_s": round(generated / (ended - started), 2),
        "ttft_p50_s": round(percentile(first, 50), 4),
        "ttft_p99_s": round(percentile(first, 99), 4),
        "inter_token_p50_s": round(percentile(gaps, 50), 5) if gaps else None,
        "inter_token_p99_s": round(percentile(gaps, 99), 5) if gaps else None,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation, the values themselves included."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def peak_memory_bytes() -> int:
    """Most memory that this process held (VmHWM)."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine() -> dict[str, Any]:
    """What the figures were measured on: no names, only what makes them comparable."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = re.search(r"flags\s*:\s*(.+)", info)
    wide = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "features": sorted(wide & set(flags[1].split())) if flags else [],
        "memory_gib": round(int(memory[1]) / 1024**2, 1) if memory else None,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }
