"""What is compiled ahead of time: each operation's module names its builds for a serving configuration and a target.

An operation's module offers `builds(serving, target) -> list[Build]`, made by the same functions that its launcher
takes its constants from, so that what CI compiles is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.view import LayerView

if TYPE_CHECKING:
    from ullage_engine.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Serving:
    """A model's shape and its cache, as far as kernels are compiled for them."""

    layout: CacheLayout
    queries: int
    """Query heads that share a KV head."""
    element: torch.dtype = torch.bfloat16
    """Of activations."""

    @property
    def view(self) -> LayerView:
        """The first layer of a store of one block."""
        return LayerView.of(torch.empty((1, self.layout.block_bytes), dtype=torch.uint8), self.layout, 0)


@dataclass(frozen=True, slots=True)
class Build:
    """One compilation of a Triton function."""

    name: str
    """Operation and what tells this build from its others: `kv_write`, `paged_decode/reduce`."""
    function: Any
    """The jitted function."""
    arguments: Mapping[str, str]
    """Type by argument that is not a constant: `*bf16`, `i64`, `fp32`; with `:16`, its value or address is a multiple
    of sixteen, as the launcher has checked or Triton finds at the call."""
    constants: Mapping[str, Any]
    """Value by `tl.constexpr` argument; arguments that are None are here too."""
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None
    """Of a thread, which the launcher asks for too; None: the compiler's choice."""


class Operation(Protocol):
    """A module of this package: an operation as torch says it, as Triton does it, and what is compiled for it.

    `kernel` and `reference` have one signature.
    """

    __name__: str

    @property
    def kernel(self) -> Callable[..., Any]: ...

    @property
    def reference(self) -> Callable[..., Any]: ...

    def builds(self, serving: Serving, target: Target, /) -> list[Build]: ...
