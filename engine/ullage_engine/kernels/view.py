"""One layer of a block store as kernels see it: the bytes, and where in a block its cells and their sections begin.

`layout.CacheLayout` is the authority on every number here; kernels get them from a view and compute none themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ullage_engine.quant import CacheType, dequantise

if TYPE_CHECKING:
    from ullage_engine.layout import CacheLayout

UNIT = 16
"""Bytes: every section, cell and block starts on such a boundary."""


@dataclass(frozen=True, slots=True)
class Section:
    """Keys or values of some rows as they are stored."""

    codes: torch.Tensor
    """[N, H, S, head_size] of the cache type's element."""
    scales: torch.Tensor | None
    """[N, H, S, groups] float32; None where the type has none."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised, [N, H, S, head_size]."""
        return dequantise(self.codes, self.scales, dtype)


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of a store's bytes. All offsets are bytes, multiples of `UNIT`."""

    data: torch.Tensor
    """[blocks, block_bytes] uint8, contiguous; blocks may be longer than the layout's, by what nobody reads."""
    kind: CacheType
    kv_heads: int
    head_size: int
    block_tokens: int
    group: int
    """Channels that share a scale."""
    uniform: bool
    """Whether the store is an array of cells of one size: all layers are alike, and blocks end with their last cell."""
    layer_offset: int
    """From a block's start to the layer's first cell."""
    cell_bytes: int
    """From a cell to the next head's."""
    k_codes: int
    """From a cell's start to its K codes [block_tokens, head_size]; the next three likewise."""
    k_scales: int
    """[block_tokens, head_size / group] float32; meaningless where the type has no scales."""
    v_codes: int
    v_scales: int

    @staticmethod
    def of(data: torch.Tensor, layout: CacheLayout, layer: int) -> LayerView:
        """One layer of `data`, [blocks, at least layout.block_bytes].

        Raises:
            ValueError: the bytes do not lie as they must.
        """
        fits = data.is_contiguous() and data.shape[1] >= layout.block_bytes and data.shape[1] % UNIT == 0
        if not fits or data.data_ptr() % UNIT:
            raise ValueError(
                f"blocks must be contiguous, {layout.block_bytes} bytes or more and whole units of {UNIT}, "
                f"not {tuple(data.shape)} with strides {data.stride()} at {data.data_ptr():#x}"
            )
        cell = layout.cells[layer]
        uniform = len(layout.cell_classes) == 1 and data.shape[1] % cell.size == 0
        return LayerView(
            data, cell.kind, layout.kv_heads, layout.head_size, layout.block_tokens, layout.group_size,
            uniform, layout.layer_offsets[layer], cell.size,
            cell.k_codes, cell.k_scales, cell.v_codes, cell.v_scales,
        )  # fmt: skip

    @property
    def block_bytes(self) -> int:
        return self.data.shape[1]

    @property
    def groups(self) -> int:
        """Scales per (token, head)."""
        return self.head_size // self.group

    def sections(self) -> list[tuple[int, int]]:
        """The sections of a cell: bytes from its start, and bytes of a row."""
        code_row, scale_row = self.head_size * self.kind.element_bytes, self.groups * 4
        codes = [(self.k_codes, code_row), (self.v_codes, code_row)]
        return [*codes, (self.k_scales, scale_row), (self.v_scales, scale_row)] if self.kind.quantised else codes

    # -- whole sections of all blocks ----------------------------------------------------------------------------

    def codes(self, at: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, head_size] at a section (`k_codes` or `v_codes`), to be indexed.

        Of e4m3 the bytes are given, since torch's advanced indexing does not know it.
        """
        element = self.kind.element
        return self._strided(at, torch.uint8 if element == torch.float8_e4m3fn else element, self.head_size)

    def scales(self, at: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, groups] float32 at a section (`k_scales` or `v_scales`)."""
        return self._strided(at, torch.float32, self.groups)

    def _strided(self, at: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        unit = dtype.itemsize
        return (
            self.data.view(-1)
            .view(dtype)
            .as_strided(
                (self.data.shape[0], self.kv_heads, self.block_tokens, width),
                (self.block_bytes // unit, self.cell_bytes // unit, width, 1),
                (self.layer_offset + at) // unit,
            )
        )

    # -- chosen cells --------------------------------------------------------------------------------------------

    def cell_offsets(self, blocks: torch.Tensor) -> torch.Tensor:
        """Bytes from the store's start to this layer's cells of blocks [N, B]: [N, kv_heads, B] int64."""
        heads = torch.arange(self.kv_heads, device=blocks.device) * self.cell_bytes + self.layer_offset
        return blocks[:, None, :].to(torch.int64) * self.block_bytes + heads[None, :, None]

    def of_blocks(self, blocks: torch.Tensor) -> tuple[Section, Section]:
        """Keys and values as stored of blocks [N, B]; rows in the order of the table."""
        if self.uniform:  # the store is an array of cells: one gather, straight into head order
            cells = self.cell_offsets(blocks) // self.cell_bytes
            rows = self.data.view(-1, self.cell_bytes).index_select(0, cells.reshape(-1))
            return self._sections(rows.view(*cells.shape, self.cell_bytes))
        count, width = blocks.shape
        layer = self.data[:, self.layer_offset : self.layer_offset + self.kv_heads * self.cell_bytes]
        rows = layer.index_select(0, blocks.reshape(-1)).view(count, width, self.kv_heads, self.cell_bytes)
        return self._sections(rows.transpose(1, 2))

    def of_cells(self, offsets: torch.Tensor) -> tuple[Section, Section]:
        """Keys and values as stored of cells at byte offsets [N, H, C]: each head has cells of its own."""
        units = self.data.view(-1, UNIT)  # every cell is consecutive rows of these
        index = (offsets.reshape(-1) // UNIT)[:, None] + torch.arange(self.cell_bytes // UNIT, device=offsets.device)
        rows = units.index_select(0, index.reshape(-1))
        return self._sections(rows.view(*offsets.shape, self.cell_bytes))

    def _sections(self, cells: torch.Tensor) -> tuple[Section, Section]:
        """Keys and values out of gathered cells [N, H, C, cell_bytes]."""
        return self._section(cells, self.k_codes, self.k_scales), self._section(cells, self.v_codes, self.v_scales)

    def _section(self, cells: torch.Tensor, codes_at: int, scales_at: int) -> Section:
        shape = (*cells.shape[:2], cells.shape[2] * self.block_tokens)
        size = self.block_tokens * self.head_size * self.kind.element_bytes
        codes = cells[..., codes_at : codes_at + size].contiguous().view(self.kind.element)
        scales = None
        if self.kind.quantised:
            raw = cells[..., scales_at : scales_at + self.block_tokens * self.groups * 4].contiguous()
            scales = raw.view(torch.float32).view(*shape, self.groups)
        return Section(codes.view(*shape, self.head_size), scales)
