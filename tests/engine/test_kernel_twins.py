"""Every operation with a Triton kernel: one signature with its reference, and a place in the dispatcher."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import kernel_cases as cases
import pytest
import torch

from ullage_engine import models
from ullage_engine.build import build_engine
from ullage_engine.config import EngineConfig
from ullage_engine.errors import KernelError
from ullage_engine.kernels import checks, dispatch, targets
from ullage_engine.kernels.build import Operation, Serving
from ullage_engine.kernels.targets import TARGETS
from ullage_engine.kernels.view import LayerView
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore


def name_of(operation: Operation) -> str:
    return operation.__name__.rpartition(".")[2]


@pytest.mark.parametrize("operation", dispatch.OPERATIONS, ids=name_of)
def test_kernel_and_reference_have_one_signature(operation: Operation) -> None:
    kernel, reference = inspect.signature(operation.kernel), inspect.signature(operation.reference)
    assert kernel == reference
    assert operation.kernel.__doc__


@pytest.mark.parametrize("operation", dispatch.OPERATIONS, ids=name_of)
def test_both_are_dispatched(operation: Operation) -> None:
    assert getattr(dispatch.TRITON, name_of(operation)) is operation.kernel
    assert getattr(dispatch.TORCH, name_of(operation)) is operation.reference


def test_every_dispatched_kernel_is_compiled_ahead_of_time() -> None:
    names = {field.name for field in fields(dispatch.Kernels)} - {"name", "native"}
    other = {name for name in names if getattr(dispatch.TRITON, name) is not getattr(dispatch.TORCH, name)}
    assert other == {name_of(operation) for operation in dispatch.OPERATIONS}


@pytest.mark.parametrize("operation", dispatch.OPERATIONS, ids=name_of)
def test_builds_name_every_argument_of_their_function(operation: Operation) -> None:
    serving = Serving(CacheLayout(2, 2, 64), queries=3)
    for target in TARGETS:
        for build in operation.builds(serving, target):
            assert build.name.partition("/")[0] == name_of(operation)
            assert sorted(build.function.arg_names) == sorted((*build.arguments, *build.constants))


def test_newer_gpus_run_what_the_newest_older_one_does() -> None:
    assert [targets.of_nvidia(c).name for c in (80, 86, 87, 89, 90, 100, 103, 120, 121, 130)] == [
        "sm_80", "sm_86", "sm_86", "sm_89", "sm_90", "sm_100", "sm_100", "sm_120", "sm_120", "sm_120",
    ]  # fmt: skip
    assert targets.of_amd("gfx942:sramecc+:xnack-").name == "gfx942"
    with pytest.raises(KernelError, match=r"compute capability 7\.5 is older than 8\.0"):
        targets.of_nvidia(75)
    with pytest.raises(KernelError, match="AMD GPU gfx90a is not supported; gfx942 is"):
        targets.of_amd("gfx90a:xnack-")


def test_triton_without_a_gpu_is_refused_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, cpu = CacheLayout(1, 1, 16), torch.device("cpu")
    if cases.DEVICE.type == "cpu":
        assert dispatch.choose(layout, cpu, "triton") is dispatch.TRITON
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert dispatch.choose(layout, cpu) is dispatch.TORCH
    with pytest.raises(KernelError, match="--kernels: triton needs a GPU"):
        dispatch.choose(layout, cpu, "triton")
    with pytest.raises(ValueError, match="kernels need tensors on a GPU"):
        checks.target_of(torch.zeros(1))


def test_an_engine_that_is_to_use_triton_without_a_gpu_ends_before_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(KernelError, match="--kernels: triton needs a GPU, and torch sees none here"):
        build_engine(EngineConfig(model=str(model_folder), kernels="triton"))


def test_views_refuse_bytes_that_do_not_lie_as_kernels_read_them() -> None:
    layout = CacheLayout(1, 2, 16)
    size = layout.block_bytes
    for stride in (size - 16, size + 8):
        with pytest.raises(ValueError, match="blocks must be contiguous"):
            BlockStore(layout, 2, block_stride=stride).views  # noqa: B018
    shifted = torch.zeros(2 * size + 8, dtype=torch.uint8)[8:].view(2, size)
    with pytest.raises(ValueError, match="blocks must be contiguous"):
        LayerView.of(shifted, layout, 0)
