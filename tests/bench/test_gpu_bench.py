"""The GPU benchmark's sums, comparisons and flow, on a CPU: what it says of a GPU is for a GPU to show."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import gpu_checks
import pytest
import torch
from gpu_serving import Serving, random_llama
from gpu_speed import Speeds
from gpu_sums import (
    BATCHES,
    CONTEXTS,
    KINDS,
    KV_HEADS,
    LAYERS,
    Budget,
    DecodeCase,
    aims,
    decode_cases,
    prefill_flops,
    share_of_bandwidth,
    table,
    token_bytes,
)

from ullage_engine.device import CpuDevice
from ullage_engine.kernels.dispatch import TORCH
from ullage_engine.layout import CacheLayout

CPU = torch.device("cpu")
GIB = 1 << 30
ROOT = Path(gpu.__file__).parent


class HostClock:
    """Times a single call on the host."""

    def seconds(self, work: Callable[[], object], *, record: bool = True) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_are_the_layouts(kind: Any) -> None:
    assert CacheLayout(1, KV_HEADS, 128, 16, kind).bytes_per_token == token_bytes(kind)


def test_every_case_is_measured_or_named_as_too_large() -> None:
    for memory in (1 * GIB, 20 * GIB, 80 * GIB, 141 * GIB):
        fitting, left_out = decode_cases(memory)
        both = {(case.kind, case.batch, case.context) for case in (*fitting, *left_out)}
        assert both == {(kind, batch, context) for kind in KINDS for batch in BATCHES for context in CONTEXTS}
        assert all(case.held_bytes <= memory for case in fitting)
        assert all(case.held_bytes > memory * 0.8 for case in left_out)
    assert not decode_cases(141 * GIB)[1]
    assert {case.name for case in decode_cases(75 * GIB)[1]} == {"paged_decode bf16, batch 128, 131072 tokens"}


def test_cases_that_aims_are_about_come_first() -> None:
    fitting, _ = decode_cases(141 * GIB)
    aimed = [case.batch >= 32 and case.context in (8192, 32_768) for case in fitting]
    assert aimed == sorted(aimed, reverse=True)


def test_repeated_calls_read_more_than_a_cache_holds_or_all_layers() -> None:
    for case in decode_cases(1 << 50)[0]:
        assert case.held_bytes >= 1 << 30 or case.layers == LAYERS
    assert DecodeCase("fp8", 128, 131_072).layers == 1


def test_share_of_bandwidth_and_operations_by_hand() -> None:
    assert share_of_bandwidth(3_000_000, 1e-6, 4e12) == pytest.approx(0.75)
    assert DecodeCase("bf16", 1, 1024).moved_bytes == 1024 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2
    # two queries after three rows see four and five: nine pairs, each 2 x 128 for logits and values, times 32 heads
    assert prefill_flops(3, 2) == 9 * 2 * 2 * 128 * 32


def decode_row(kind: str, batch: int, context: int, us: float, share: float) -> dict[str, Any]:
    return {"kind": kind, "batch": batch, "context": context, "us": us, "share": share}


def test_aims_are_judged_by_the_worst_case_measured() -> None:
    rows = [
        decode_row("fp8", 32, 8192, 10.0, 0.85),
        decode_row("fp8", 128, 8192, 10.0, 0.81),
        decode_row("fp8", 1, 8192, 10.0, 0.2),
        decode_row("fp8", 32, 32_768, 55.0, 0.9),
        decode_row("bf16", 32, 32_768, 100.0, 0.9),
    ]
    bandwidth, ratio = aims(rows)
    assert (bandwidth["found"], bandwidth["met"]) == (0.81, True)
    assert (ratio["found"], ratio["met"]) == (0.55, True)
    rows += [decode_row("fp8", 128, 32_768, 61.0, 0.9), decode_row("bf16", 128, 32_768, 100.0, 0.9)]
    rows[1]["share"] = 0.79
    assert [aim["met"] for aim in aims(rows)] == [False, False]


def test_nothing_is_claimed_for_what_was_not_measured() -> None:
    assert [(aim["found"], aim["met"]) for aim in aims([])] == [(None, None), (None, None)]
    assert aims([decode_row("fp8", 32, 32_768, 50.0, 0.9)])[1]["met"] is None, "a ratio needs both"


def test_a_budget_skips_what_would_overrun_and_says_so() -> None:
    now = [100.0]
    budget = Budget(60.0, lambda: now[0])
    assert budget.allows("short", 10)
    now[0] = 155.0
    assert not budget.allows("long", 10)
    assert budget.allows("tiny", 5)
    assert budget.skipped == ["long: no time left"]
    assert budget.spent == 55.0


def test_a_table_lines_up_and_shows_what_is_missing() -> None:
    shown = table("title", [{"kind": "fp8", "us": 1234.5, "met": None}, {"kind": "bf16", "us": 0.12345, "met": False}])
    assert shown.splitlines() == [
        "title",
        "  kind     us  met",
        "   fp8  1,234    –",
        "  bf16  0.123   NO",
    ]
    assert "nothing was measured" in table("title", [])


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_references_agree_with_themselves() -> None:
    told: list[gpu_checks.Check] = []
    done = gpu_checks.run(CPU, TORCH, ("fp8",), told.append)
    assert done == told
    assert all(check.passed for check in done)
    assert {check.name.split()[0] for check in done} == {
        "kv_write", "paged_decode", "paged_prefill", "key_scores", "merge", "gather_cells", "copy_blocks",
    }  # fmt: skip


def _broken(name: str) -> Callable[..., Any]:
    """An operation that is a little wrong."""
    right = getattr(TORCH, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if name == "kv_write":
            view, slots, keys, values, centre = args
            right(view, slots, values, keys, centre)
        elif name == "key_scores":
            return right(*args, **kwargs) * 1.05
        elif name not in ("copy_blocks", "gather_cells"):  # these do nothing
            right(*args, **kwargs)
            out = args[3]
            out[-1] = out[-1] * 2
        return None

    return wrong


@pytest.mark.parametrize(
    "name", ["kv_write", "paged_decode", "paged_prefill", "key_scores", "merge", "gather_cells", "copy_blocks"]
)
def test_a_wrong_kernel_is_found(name: str) -> None:
    wrong: dict[str, Any] = {name: _broken(name)}
    done = gpu_checks.run(CPU, replace(TORCH, **wrong), ("int8",), lambda check: None)
    assert {check.name.split()[0] for check in done if not check.passed} == {name}


def test_a_kernel_that_raises_fails_its_own_comparisons_alone() -> None:
    def raising(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of resource: shared memory\nmore words")

    done = gpu_checks.run(CPU, replace(TORCH, paged_decode=raising), ("bf16",), lambda check: None)
    failed = [check.name for check in done if not check.passed]
    assert len(failed) == 4
    assert all("RuntimeError: out of resource: shared memory" in name for name in failed)
    assert sum(check.passed for check in done) > 10


# -- the run -----------------------------------------------------------------------------------------------------------


def test_every_measurement_runs_and_gives_figures() -> None:
    speeds = Speeds(CPU, TORCH, HostClock(), cold_bytes=1 << 16)
    bandwidth = speeds.copy_bandwidth()
    case = DecodeCase("fp8", 2, 48)
    rows = [
        speeds.decode(case, bandwidth),
        speeds.kv_write("int8", 24, bandwidth),
        speeds.prefill("bf16", 0, 20),
        speeds.prefill("bf16", 17, 20),
        *speeds.block_copies("fp8", 2),
    ]
    for row in rows:
        assert all(value > 0 for value in row.values() if isinstance(value, float)), row
    assert [row["copy"] for row in rows[-3:]] == ["2 blocks to host", "2 blocks from host", "2 blocks in place"]


def test_the_engine_is_measured_with_every_cache_type() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256}  # fmt: skip
    model = random_llama(sizes, CPU)
    assert torch.get_default_dtype() == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16
    for kind in KINDS:
        row = Serving(model, kind, CpuDevice(), 3, prompt=20, answer=5).measure(3)
        assert (row["kind"], row["batch"]) == (kind, 3)
        assert row["prefill_tokens_s"] > 0
        assert row["decode_tokens_s"] > 0


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def test_a_run_ends_with_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KINDS", ("fp8",))
    run = gpu.Run(Budget(600.0, time.monotonic), CpuDevice(), TORCH, {"gpu": "none"})
    assert run.report(check_only=True) == 0
    found = last_line(capsys.readouterr().out)
    assert found["checks"]["passed"] == found["checks"]["of"] > 20
    assert (found["failed"], found["skipped"], found["machine"]) == ([], [], {"gpu": "none"})


def test_a_failed_part_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "KINDS", ("fp8",))
    run = gpu.Run(Budget(600.0, time.monotonic), CpuDevice(), replace(TORCH, merge=_broken("merge")), {})

    def fail() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(run, "_speeds", fail)
    monkeypatch.setattr(run, "_serving", lambda: run.found.update(serving=[]))
    assert run.report(check_only=False) == 1
    found = last_line(capsys.readouterr().out)
    assert "speeds: RuntimeError: CUDA error: misaligned address" in found["failed"]
    assert any(line.startswith("merge") for line in found["failed"])
    assert found["serving"] == []


def test_a_run_out_of_time_tells_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    run = gpu.Run(Budget(0.0, time.monotonic), CpuDevice(), TORCH, {})
    assert run.report(check_only=False) == 0
    found = last_line(capsys.readouterr().out)
    assert found["skipped"] == [f"{part}: no time left" for part in ("checks", "speeds", "serving")]
    assert "decode" not in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "gpu.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "finds no GPU here" in done.stderr
    assert not done.stdout


def test_nothing_but_torch_triton_and_transformers_is_needed() -> None:
    """In a fresh process, packages that the rest of this repository uses cannot be imported."""
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"msgspec", "fastapi", "pydantic", "uvicorn", "prometheus_client", "aiohttp"}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(ROOT)!r})
import gpu, gpu_checks, gpu_speed, gpu_serving, ullage_engine.cuda
from ullage_engine.kernels.dispatch import TRITON
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
