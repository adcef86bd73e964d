"""Where every byte of the KV cache lies: the one object that knows strides and offsets.

A *block* holds `block_tokens` tokens of all layers and KV heads in one contiguous byte range: the unit of sharing,
transfer and dense sequences. It is a grid of layers x heads *cells*; a cell holds `block_tokens` tokens of one KV
head in one layer as four sections, each aligned to `ALIGN` bytes: K codes [tokens, D], K scales [tokens, G], V
codes, V scales (no scale sections where the type has none). Scales lie inside the cell, so they travel with values.

Non-goal: which block belongs to whom (`pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ullage_engine.errors import ConfigError
from ullage_engine.kernels.view import UNIT
from ullage_engine.quant import CACHE_TYPES, CacheType, KvType

ALIGN = UNIT
"""Bytes: every section and so every cell and block starts on such a boundary."""
BLOCK_SIZES = (8, 16, 32)
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class CellShape:
    """Sections of one cell of one layer, in bytes from the cell's start."""

    kind: CacheType
    k_codes: int
    k_scales: int
    v_codes: int
    v_scales: int
    size: int


@dataclass(frozen=True)
class CacheLayout:
    """Byte geometry of blocks.

    Raises:
        ConfigError: a shape that cannot be laid out.
    """

    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int = 16
    kv_type: KvType = "fp8"
    group: int | None = None
    """Channels that share a scale; None: min(128, head_size)."""
    layer_types: Mapping[int, KvType] = field(default_factory=dict)
    """Layers stored in another type than `kv_type`."""

    def __post_init__(self) -> None:
        if self.block_tokens not in BLOCK_SIZES:
            raise ConfigError(f"block size {self.block_tokens} is not one of {BLOCK_SIZES}")
        if self.head_size % self.group_size:
            raise ConfigError(f"scale group {self.group_size} does not divide the head size {self.head_size}")
        unknown = sorted(layer for layer in self.layer_types if not 0 <= layer < self.layers)
        if unknown:
            raise ConfigError(f"cache type given for layers {unknown}, but the model has layers 0 to {self.layers - 1}")

    @property
    def group_size(self) -> int:
        return self.group or min(MAX_GROUP, self.head_size)

    @property
    def groups(self) -> int:
        """Scales per (token, head)."""
        return self.head_size // self.group_size

    @cached_property
    def cells(self) -> tuple[CellShape, ...]:
        """Cell geometry of each layer."""
        return tuple(self._cell(CACHE_TYPES[self.layer_types.get(i, self.kv_type)]) for i in range(self.layers))

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Bytes from a block's start to the layer's first cell."""
        offsets, at = [], 0
        for cell in self.cells:
            offsets.append(at)
            at += cell.size * self.kv_heads
        return tuple(offsets)

    @cached_property
    def block_bytes(self) -> int:
        return sum(cell.size for cell in self.cells) * self.kv_heads

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes one token takes, scales included."""
        return self.block_bytes / self.block_tokens

    def cell_offset(self, layer: int, head: int) -> int:
        """Bytes from a block's start to the cell of (layer, head)."""
        return self.layer_offsets[layer] + head * self.cells[layer].size

    @property
    def cells_per_block(self) -> int:
        return self.layers * self.kv_heads

    @cached_property
    def cell_classes(self) -> tuple[tuple[int, ...], ...]:
        """Places (`layer * kv_heads + head`) of cells of equal type: within a class any cell can serve any head."""
        kinds = list(dict.fromkeys(cell.kind.name for cell in self.cells))
        return tuple(
            tuple(
                layer * self.kv_heads + head
                for layer, cell in enumerate(self.cells)
                if cell.kind.name == kind
                for head in range(self.kv_heads)
            )
            for kind in kinds
        )

    def workspace_bytes(self, tokens: int) -> int:
        """Bytes that reading `tokens` rows of one layer takes on top of the cache: cells, codes, and float32 values."""
        cell = max(cell.size for cell in self.cells)
        codes = 2 * self.block_tokens * self.head_size * (1 + 2 + 4 + 4)
        return self.blocks_for(tokens) * self.kv_heads * (cell + codes)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def _cell(self, kind: CacheType) -> CellShape:
        codes = _aligned(self.block_tokens * self.head_size * kind.element_bytes)
        scales = _aligned(self.block_tokens * self.groups * 4) if kind.quantised else 0
        half = codes + scales
        return CellShape(kind, 0, codes, half, half + codes, 2 * half)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
