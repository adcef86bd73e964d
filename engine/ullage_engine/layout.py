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

import torch

from ullage_engine.errors import ConfigError
from ullage_engine.kernels.cpu import Cells, CpuKernels, Decoding
from ullage_engine.quant import CACHE_TYPES, CacheType, KvType, dequantise, quantise

ALIGN = 16
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


@dataclass(frozen=True, slots=True)
class Section:
    """Keys or values of some rows as they are stored."""

    codes: torch.Tensor
    """[N, H, S, head_size] of the cache type's element."""
    scales: torch.Tensor | None
    """[N, H, S, groups] float32; None where the type has none."""


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

    def cell_address(self, cell: int) -> int:
        """Bytes from the store's start to a cell by id, `block * cells_per_block + place`."""
        block, place = divmod(cell, self.cells_per_block)
        return block * self.block_bytes + self.cell_offset(*divmod(place, self.kv_heads))

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


class BlockStore:
    """The bytes of all blocks, [blocks, block_bytes] uint8, with typed views made by the layout.

    Not thread-safe: the step loop alone touches it.

    Args:
        centre: [layers, kv_heads, head_size] subtracted from keys before they are stored. A vector common to all keys
            of a head shifts all logits of a query alike, so softmax does not see it, and codes lose no range to it.
        kernels: what writes and reads, where the bytes are in host memory; None: torch.
    """

    def __init__(
        self,
        layout: CacheLayout,
        blocks: int,
        device: torch.device | str = "cpu",
        centre: torch.Tensor | None = None,
        kernels: CpuKernels | None = None,
    ) -> None:
        self.layout = layout
        self.centre = centre
        self.kernels = kernels if kernels is not None and kernels.serves(layout) else None
        self.data = torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def allocator_bytes(self) -> tuple[int, int]:
        """Bytes that torch's allocator has reserved and, of those, handed out; on a CPU the store itself."""
        if self.data.device.type == "cuda":
            return torch.cuda.memory_reserved(self.data.device), torch.cuda.memory_allocated(self.data.device)
        return self.nbytes, self.nbytes

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise and store one layer's rows.

        Args:
            slots: [T] int64, `block * block_tokens + offset`, all different.
            keys, values: [T, kv_heads, head_size], after RoPE.
        """
        if self.kernels is not None:
            centre = None if self.centre is None else self.centre[layer]
            self.kernels.write(self._native[layer], slots, keys, values, centre)
            return
        block, offset = slots // self.layout.block_tokens, slots % self.layout.block_tokens
        if self.centre is not None:
            keys = keys - self.centre[layer]
        cell = self.layout.cells[layer]
        for rows, at, scales_at in ((keys, cell.k_codes, cell.k_scales), (values, cell.v_codes, cell.v_scales)):
            codes, scales = quantise(rows, cell.kind, self.layout.group_size)
            self._codes(layer, at)[block, :, offset] = codes.view(_storage(cell.kind))
            if scales is not None:
                self._scales(layer, scales_at)[block, :, offset] = scales

    def read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised keys and values, each [N, kv_heads, B * block_tokens, head_size], of blocks [N, B] int64."""
        if self.kernels is not None:
            return self.kernels.read(self._native[layer], blocks, dtype)
        keys, values = self.read_codes(layer, blocks)
        return dequantise(keys.codes, keys.scales, dtype), dequantise(values.codes, values.scales, dtype)

    def read_codes(self, layer: int, blocks: torch.Tensor) -> tuple[Section, Section]:
        """Keys and values of blocks [N, B] int64 as they are stored."""
        count, width = blocks.shape
        heads, size = self.layout.kv_heads, self.layout.cells[layer].size
        if len(self.layout.cell_classes) == 1:
            # all cells are of one size: gather cells straight into head order
            first = blocks * self.layout.cells_per_block + layer * heads
            cells = first[:, None, :] + torch.arange(heads, device=blocks.device)[None, :, None]
            rows = self.data.view(-1, size).index_select(0, cells.reshape(-1)).view(count, heads, width, size)
        else:
            rows = self._rows(layer).index_select(0, blocks.reshape(-1)).view(count, width, heads, size).transpose(1, 2)
        return self._sections(layer, rows, (count, heads, width * self.layout.block_tokens))

    def decode(
        self,
        layer: int,
        decoding: Decoding,
        query: torch.Tensor,
        out: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Attention of one query token a sequence over one layer, into `out`; see `CpuKernels.decode`.

        Raises:
            ValueError: this store has no kernels.
        """
        if self.kernels is None:
            raise ValueError("this store has no kernels; attend to what `read` gives")
        self.kernels.decode(self._native[layer], decoding, query, out, scaling=scaling, window=window, softcap=softcap)

    @cached_property
    def _native(self) -> tuple[Cells, ...]:
        """Each layer as the kernels see it."""
        return tuple(CpuKernels.cells(self.data, self.layout, layer) for layer in range(self.layout.layers))

    def read_cells(self, layer: int, cells: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised keys and values, each [N, H, C * block_tokens, head_size], of cell ids [N, H, C] int64.

        The per-head form of `read`: each head has its own cells, of the class that serves `layer`.
        """
        count, heads, width = cells.shape
        cell = self.layout.cells[layer]
        block, place = cells.reshape(-1) // self.layout.cells_per_block, cells.reshape(-1) % self.layout.cells_per_block
        start = block * self.layout.block_bytes + self._place_offsets.to(cells.device)[place]
        # every cell starts on an ALIGN boundary, so a store of ALIGN-byte rows holds it as consecutive rows
        rows = self.data.view(-1, ALIGN)
        index = (start // ALIGN)[:, None] + torch.arange(cell.size // ALIGN, device=cells.device)
        found = rows.index_select(0, index.reshape(-1)).view(count, heads, width, cell.size)
        keys, values = self._sections(layer, found, (count, heads, width * self.layout.block_tokens))
        return dequantise(keys.codes, keys.scales, dtype), dequantise(values.codes, values.scales, dtype)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks: codes and scales of all layers and heads."""
        self.data[torch.tensor(targets, device=self.data.device)] = self.data[
            torch.tensor(sources, device=self.data.device)
        ]

    @cached_property
    def _place_offsets(self) -> torch.Tensor:
        """[cells_per_block] bytes from a block's start to each cell."""
        heads = self.layout.kv_heads
        return torch.tensor([self.layout.cell_offset(*divmod(p, heads)) for p in range(self.layout.cells_per_block)])

    def _sections(self, layer: int, rows: torch.Tensor, shape: tuple[int, int, int]) -> tuple[Section, Section]:
        """Keys and values out of gathered cells [N, H, B, cell bytes]; `shape` is (N, H, tokens)."""
        cell = self.layout.cells[layer]
        return (
            self._section(rows, cell.kind, cell.k_codes, cell.k_scales, shape),
            self._section(rows, cell.kind, cell.v_codes, cell.v_scales, shape),
        )

    def _section(
        self, rows: torch.Tensor, kind: CacheType, codes_at: int, scales_at: int, shape: tuple[int, int, int]
    ) -> Section:
        tokens, size, groups = self.layout.block_tokens, self.layout.head_size, self.layout.groups
        codes = rows[..., codes_at : codes_at + tokens * size * kind.element_bytes].contiguous()
        scales = None
        if kind.quantised:
            raw = rows[..., scales_at : scales_at + tokens * groups * 4].contiguous()
            scales = raw.view(torch.float32).view(*shape, groups)
        return Section(codes.view(kind.element).view(*shape, size), scales)

    def _rows(self, layer: int) -> torch.Tensor:
        """One layer of every block, [blocks, kv_heads * cell bytes]."""
        start = self.layout.layer_offsets[layer]
        return self.data[:, start : start + self.layout.kv_heads * self.layout.cells[layer].size]

    def _codes(self, layer: int, at: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, head_size] of the storage type."""
        kind = self.layout.cells[layer].kind
        return self._strided(layer, at, _storage(kind), self.layout.head_size)

    def _scales(self, layer: int, at: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, groups] float32."""
        return self._strided(layer, at, torch.float32, self.layout.groups)

    def _strided(self, layer: int, at: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        layout, unit = self.layout, dtype.itemsize
        start = layout.layer_offsets[layer] + at
        return (
            self.data.view(-1)
            .view(dtype)
            .as_strided(
                (self.data.shape[0], layout.kv_heads, layout.block_tokens, width),
                (layout.block_bytes // unit, layout.cells[layer].size // unit, width, 1),
                start // unit,
            )
        )


def _storage(kind: CacheType) -> torch.dtype:
    """The dtype to index with: torch's advanced indexing does not know e4m3."""
    return torch.uint8 if kind.element == torch.float8_e4m3fn else kind.element


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
