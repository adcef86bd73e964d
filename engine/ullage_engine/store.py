"""The bytes of the KV cache, and the operations over them.

Non-goals: where in a block what lies (`layout`), which block belongs to whom (`pool`), and how an operation is
computed (`kernels`).
"""

from __future__ import annotations

from functools import cached_property

import torch

from ullage_engine import cuda
from ullage_engine.device import tensor_on
from ullage_engine.kernels import dispatch
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.kernels.view import LayerView, Section
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import quantise


class BlockStore:
    """The bytes of all blocks, [blocks, block_stride] uint8. Not thread-safe: the step loop alone touches it.

    Args:
        centre: [layers, kv_heads, head_size] subtracted from keys before they are stored. A vector common to all keys
            of a head shifts all logits of a query alike, so softmax does not see it, and codes lose no range to it.
        kernels: who computes; see `kernels.dispatch.Choice`.
        block_stride: bytes from a block to the next, a multiple of `view.UNIT`; None: `layout.block_bytes`. More puts
            blocks on pages, for whoever transfers them.

    Raises:
        KernelError: see `kernels.dispatch.choose`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        blocks: int,
        device: torch.device | str = "cpu",
        centre: torch.Tensor | None = None,
        kernels: dispatch.Choice = None,
        block_stride: int | None = None,
    ) -> None:
        self.layout = layout
        self.centre = centre
        self.operations = dispatch.choose(layout, torch.device(device), kernels)
        self.data = torch.zeros((blocks, block_stride or layout.block_bytes), dtype=torch.uint8, device=device)

    @property
    def kernels(self) -> CpuKernels | None:
        """The compiled CPU kernels, where they serve this layout."""
        return self.operations.native

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def allocator_bytes(self) -> tuple[int, int]:
        """Bytes that torch's allocator has reserved and, of those, handed out; on a CPU the store itself."""
        if self.data.device.type == "cuda":
            return cuda.allocator_bytes(self.data.device)
        return self.nbytes, self.nbytes

    @cached_property
    def views(self) -> tuple[LayerView, ...]:
        """Each layer as kernels see it."""
        return tuple(LayerView.of(self.data, self.layout, layer) for layer in range(self.layout.layers))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise and store one layer's rows.

        Args:
            slots: [T] int64, `block * block_tokens + offset`, all different.
            keys, values: [T, kv_heads, head_size], after RoPE.
        """
        centre = None if self.centre is None else self.centre[layer]
        self.operations.kv_write(self.views[layer], slots, keys, values, centre)

    def read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised keys and values, each [N, kv_heads, B * block_tokens, head_size], of blocks [N, B] int64."""
        if self.kernels is not None:
            return self.kernels.read(self.views[layer], blocks, dtype)
        keys, values = self.read_codes(layer, blocks)
        return keys.values(dtype), values.values(dtype)

    def read_codes(self, layer: int, blocks: torch.Tensor) -> tuple[Section, Section]:
        """Keys and values of blocks [N, B] int64 as they are stored."""
        return self.views[layer].of_blocks(blocks)

    def read_cells(self, layer: int, cells: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised keys and values, each [N, H, C * block_tokens, head_size], of cell ids [N, H, C] int64.

        The per-head form of `read`: each head has its own cells, of the class that serves `layer`.
        """
        if self.kernels is not None:
            return self.kernels.read_cells(self.views[layer], self.cell_offsets(cells), dtype)
        keys, values = self.views[layer].of_cells(self.cell_offsets(cells))
        return keys.values(dtype), values.values(dtype)

    def cell_offsets(self, cells: torch.Tensor) -> torch.Tensor:
        """Bytes from the store's start to cells by id, `block * cells_per_block + place`; any shape, int64."""
        count = self.layout.cells_per_block
        return cells // count * self.data.shape[1] + self._places[cells % count]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks: codes and scales of all layers and heads. Sources are read before targets are written."""
        device = self.data.device
        moves = [tensor_on(device, blocks) for blocks in (sources, targets)]
        if set(sources) & set(targets):  # a block that was copied, released and taken for another copy, in one step
            self.data[moves[1]] = self.data[moves[0]]
        else:
            self.operations.copy_blocks(self.data, self.data, *moves)

    def gather_cells(
        self,
        layer: int,
        sources: torch.Tensor,
        source_rows: torch.Tensor,
        targets: torch.Tensor,
        target_rows: torch.Tensor,
    ) -> None:
        """Copy rows between cells of the class that serves `layer`; see `kernels.gather_cells.reference`.

        Args:
            sources, targets: [n] int64 offsets of cells, from `cell_offsets` or a view's.
            source_rows, target_rows: [n] int64 in [0, block_tokens).
        """
        self.operations.gather_cells(self.views[layer], sources, source_rows, targets, target_rows)

    def copy_rows(
        self, sources: torch.Tensor, source_rows: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        """`gather_cells` for cells by id, of any classes; a source and its target are of one class."""
        moves = [moved.to(self.data.device) for moved in (sources, source_rows, targets, target_rows)]
        place = moves[0] % self.layout.cells_per_block
        for places in self.layout.cell_classes:
            chosen = torch.isin(place, torch.tensor(places, device=place.device))
            cells, rows, into, at = (moved[chosen] for moved in moves)
            layer = places[0] // self.layout.kv_heads
            self.gather_cells(layer, self.cell_offsets(cells), rows, self.cell_offsets(into), at)

    def write_values(self, layer: int, cells: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise and store values [n, D] in row `rows[i]` of cell `cells[i]`, [n] int64, of the class of `layer`."""
        view, device = self.views[layer], self.data.device
        codes, scales = quantise(values.to(device), view.kind, view.group)
        start, at, flat = self.cell_offsets(cells.to(device)), rows.to(device), self.data.view(-1)
        for section, data in ((view.v_codes, codes), (view.v_scales, scales)):
            if data is not None:
                row = data.contiguous().view(torch.uint8)
                first = start + section + at * row.shape[-1]
                flat[first[:, None] + torch.arange(row.shape[-1], device=device)] = row

    def zero_cells(self, cells: torch.Tensor) -> None:
        """Zero cells by id [n] int64."""
        flat = self.data.view(-1)
        offsets, places = self.cell_offsets(cells).tolist(), (cells % self.layout.cells_per_block).tolist()
        for offset, place in zip(offsets, places, strict=True):
            flat[offset : offset + self.layout.cells[place // self.layout.kv_heads].size] = 0

    @cached_property
    def _places(self) -> torch.Tensor:
        """[cells_per_block] bytes from a block's start to each cell."""
        layout, heads = self.layout, self.layout.kv_heads
        offsets = [layout.cell_offset(*divmod(place, heads)) for place in range(layout.cells_per_block)]
        return torch.tensor(offsets, device=self.data.device)
