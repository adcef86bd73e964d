"""How much one program of an attention kernel does at a time, by target.

`MEASURED` holds what `bench/gpu.py --tune` found fastest on a GPU of a target. Where it says nothing, `by_rule` holds:
chosen without a GPU, so that no build spills a register or needs more shared memory than there is
(`bench/kernels_aot.py` checks this of both). Nothing is measured for a target that has no entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ullage_engine.kernels.targets import INTERPRETER, Target, side
from ullage_engine.kernels.view import LayerView


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program does at a time."""

    queries: int
    """Query tokens times query heads of one KV head; tensor cores want sixteen at least."""
    rows: int
    warps: int
    stages: int


class Key(NamedTuple):
    """What a measurement is of."""

    target: str
    kind: str
    """Cache type."""
    columns: int
    """`columns_of` the head size."""
    queries: int
    """At most so many of a KV head in all: 16, 32, or 64, which is said of more too."""


MEASURED: dict[Key, Tile] = {}


def tile_of(view: LayerView, target: Target, queries: int) -> Tile:
    """For up to `queries` queries of a KV head in all."""
    rule = by_rule(target, view.kind.name, columns_of(view.head_size), queries)
    return MEASURED.get(key_of(target, view.kind.name, view.head_size, queries), rule)


def key_of(target: Target, kind: str, head_size: int, queries: int) -> Key:
    """Where `MEASURED` has the tile for these."""
    return Key(target.name, kind, columns_of(head_size), min(64, max(16, side(queries))))


def by_rule(target: Target, kind: str, columns: int, queries: int) -> Tile:
    """What fits every target."""
    if target is INTERPRETER:
        return Tile(16 if queries <= 16 else 64, 256, 4, 1)  # fewer and larger operations are faster
    if target.backend == "hip":  # more queries, or loads ahead, cost more registers than there are
        return Tile(16, 32, 4, 1)
    # dots of float32 are sums in registers, without tensor cores: of more to a thread ptxas spills some
    summed = kind == "fp32" and columns >= 128
    wide = columns > 128 or summed
    if queries <= 16:
        return Tile(16, 32, 8, 2) if wide else Tile(16, 64, 4, 2)
    if summed:
        return Tile(32, 16, 8, 2)
    return Tile(32 if wide or queries <= 32 else 64, 32, 8, 2)


def candidates(rule: Tile) -> Iterator[Tile]:
    """What is worth trying on a GPU in place of a rule's tile, that one first; some may not fit."""
    yield rule
    for rows, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4)):
        other = replace(rule, rows=rows, warps=warps, stages=stages)
        if other != rule:
            yield other


def columns_of(size: int) -> int:
    """The power of two that holds `size` channels."""
    return max(16, side(size))
