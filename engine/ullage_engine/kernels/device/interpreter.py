"""Whether Triton's interpreter stands in for a GPU, so that kernels run on CPU tensors."""

from __future__ import annotations

from triton import knobs


def active() -> bool:
    """As `TRITON_INTERPRET` says; functions that were jitted before it was set keep what it said then."""
    return bool(knobs.runtime.interpret)
