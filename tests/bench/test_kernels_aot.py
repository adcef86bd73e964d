"""Kernels compile for every target without a GPU, and what a compiler reports is read as it is meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import kernels_aot as aot
import pytest

from ullage_engine.kernels import copy_blocks, dispatch
from ullage_engine.kernels.build import Operation
from ullage_engine.kernels.targets import TARGETS
from ullage_engine.quant import CACHE_TYPES

PROGRAM = Path(aot.__file__)
PTXAS = """ptxas info    : Compiling entry function 'write' for 'sm_80'
ptxas info    : Function properties for write
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 49 registers, used 0 barriers, 400 bytes cmem[0]
"""


def name_of(operation: Operation) -> str:
    return operation.__name__.rpartition(".")[2]


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_every_target_and_fits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--reduced"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["spills"] == found["failures"] == 0
    names, targets = {name_of(operation) for operation in dispatch.OPERATIONS}, {target.name for target in TARGETS}
    assert found["builds"] == len([*aot.jobs(True, targets, names)])
    rows = [line.strip("| ").split(" | ") for line in table[2:]]
    assert {(row[0].partition("/")[0], row[1]) for row in rows} == {*product(names, targets)}


def test_the_reduced_matrix_has_the_usual_configuration_everywhere() -> None:
    chosen = aot.servings(reduced=True)
    assert set(chosen) == set(TARGETS)
    assert all(configurations[0] == aot.USUAL for configurations in chosen.values())
    assert {len(c) for c in aot.servings(reduced=False).values()} == {3 * 4 * len(CACHE_TYPES) * 3}


def test_the_reduced_matrix_has_each_cache_type_with_each_head_size_and_what_is_tight() -> None:
    chosen = aot.servings(reduced=True)
    shapes = {(head_size, kind) for configurations in chosen.values() for head_size, _, kind, _ in configurations}
    assert shapes == {*product(aot.HEAD_SIZES, CACHE_TYPES)}
    assert {*aot.TIGHT} <= {(target.name, c) for target, configurations in chosen.items() for c in configurations}
    assert sum(map(len, chosen.values())) <= 20, "CI builds these within minutes"


@pytest.mark.parametrize("operation", dispatch.OPERATIONS, ids=name_of)
def test_the_reduced_matrix_builds_each_kernel_with_every_value_that_it_knows(operation: Operation) -> None:
    built = [job.serving for job in aot.jobs(True, {target.name for target in TARGETS}, {name_of(operation)})]
    if operation is copy_blocks:  # moves bytes, whatever they are of
        assert built == [aot.USUAL] * len(TARGETS)
        return
    for at, values in enumerate((aot.HEAD_SIZES, aot.QUERIES, tuple(CACHE_TYPES), aot.BLOCK_SIZES)):
        assert {configuration[at] for configuration in built} == set(values)


def test_registers_and_spills_of_ptxas() -> None:
    assert aot.ptxas_resources(PTXAS.format(stack=0, stores=0, loads=0)) == (49, 0)
    assert aot.ptxas_resources(PTXAS.format(stack=24, stores=16, loads=20)) == (49, 36)
    with pytest.raises(ValueError, match="says nothing of registers"):
        aot.ptxas_resources("ptxas info    : 0 bytes gmem")


def test_registers_and_spills_of_amd() -> None:
    text = "    .sgpr_count:     20\n    .sgpr_spill_count: 1\n    .vgpr_count:     45\n    .vgpr_spill_count: 3\n"
    assert aot.amd_resources(text) == (45, 4)


def test_what_does_not_fit_is_a_failure() -> None:
    sm_80, gfx942 = TARGETS[0], TARGETS[-1]
    assert aot.misfit(sm_80, 0, sm_80.shared_bytes) is None
    assert aot.misfit(sm_80, 36, 0) == "36 bytes spilled"
    assert aot.misfit(gfx942, 4, 0) == "4 registers spilled"
    assert aot.misfit(gfx942, 0, 65_537) == "65537 bytes of shared memory, of 65536"


def test_a_kernel_that_does_not_compile_is_named_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    fine = aot.Outcome("kv_write", "m.write", "sm_80", aot.USUAL, 49, 0, 128, 1.0)
    wrong = aot.Outcome("kv_write", "m.write", "sm_90", aot.USUAL, error="CompilationError: at 3:4")
    assert aot.summary([fine, wrong]) == {"kernels": 1, "targets": 2, "builds": 2, "spills": 0, "failures": 1}
    assert list(aot.told([fine, wrong], 2)) == [fine, wrong]
    expected = "kv_write for sm_90, serving (128, 4, 'fp8', 16): CompilationError: at 3:4\n"
    assert capsys.readouterr().err == expected
    assert aot.table([wrong, fine]).splitlines()[2:] == [
        "| kv_write | sm_80 | 1 | 49 | 0.1 | 0 | 1.0 | 0 |",
        "| kv_write | sm_90 | 1 | 0 | 0.0 | 0 | 0.0 | 1 |",
    ]


def test_kernels_and_targets_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for option, value in (("--targets", "sm_80,sm_42"), ("--kernels", "kv_write,kv_wrote")):
        monkeypatch.setattr(sys, "argv", ["kernels_aot.py", option, value])
        with pytest.raises(SystemExit):
            aot.main()
        assert f"{option}: nothing is called {value.partition(',')[2]}" in capsys.readouterr().err


def test_nothing_is_compiled_in_an_interpreting_process() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--reduced"],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
