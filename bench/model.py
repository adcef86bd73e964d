"""The model as the engine runs it: weights laid out for this CPU, and the kernels to go with it."""

from __future__ import annotations

from pathlib import Path

import torch

from ullage_engine import models
from ullage_engine.build import speed_up
from ullage_engine.config import default_cache_dir
from ullage_engine.kernels import cpu_build
from ullage_engine.kernels.cpu import CpuKernels


def load(folder: Path, dtype: torch.dtype, *, native: bool = True) -> tuple[models.LoadedModel, CpuKernels | None]:
    """The model of a folder; with torch alone where `native` is False."""
    loaded = models.load(folder, "smollm2", dtype, torch.device("cpu"))
    kernels = CpuKernels(cpu_build.library(default_cache_dir() / "kernels")) if native else None
    speed_up(loaded.model, dtype, kernels)
    return loaded, kernels
