"""Where the keys and values of sequences lie, and which of them a query sees: what attention kernels are told.

Two forms, used alike. `BlockTables`: all heads of a sequence have the same blocks. `CellTables`: each head of one
layer has cells of its own, the survivors of an eviction; all lie before any query of the step.
Several queries of one sequence (a chunk of a prompt, drafts to verify) follow one another in the packed tokens from
`at` on, and what a table says of *the query* is meant of the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ullage_engine.kernels.checks import require
from ullage_engine.kernels.view import LayerView, Section


@dataclass(frozen=True, slots=True, eq=False)
class BlockTables:
    """Tokens of sequences whose rows lie in whole blocks, several of one perhaps; all int64, on the store's device."""

    at: torch.Tensor
    """[N] the query's place in the packed tokens."""
    tables: torch.Tensor
    """[N, B] block ids; beyond a sequence's rows any valid ones."""
    starts: torch.Tensor
    """[N, B] position of each block's first token."""
    rows: torch.Tensor
    """[N] rows that the query sees, its own included; 0: nothing. Each later query sees one more."""
    positions: torch.Tensor
    """[N] of the query."""

    causal: ClassVar[bool] = True
    """Whether rows may be after a query."""

    @property
    def blocks(self) -> int:
        """Width of the table."""
        return self.tables.shape[1]

    def pick(self, index: torch.Tensor | slice, blocks: slice) -> BlockTables:
        """Some of the sequences, with some of the table's columns; rows stay as they are."""
        tables, starts = self.tables[index, blocks], self.starts[index, blocks]
        return BlockTables(self.at[index], tables, starts, self.rows[index], self.positions[index])

    def read(self, view: LayerView) -> tuple[Section, Section]:
        """Keys and values as stored, [N, kv_heads, B * block_tokens, ...]."""
        return view.of_blocks(self.tables)

    def existing(self, block_tokens: int, count: int) -> torch.Tensor:
        """[N, 1, B * block_tokens] bool: rows that the last of `count` queries sees; others may hold anything."""
        row = torch.arange(self.blocks * block_tokens, device=self.rows.device)
        return (row < (self.rows + (count - 1))[:, None]).unsqueeze(1)

    def visible(self, block_tokens: int, count: int, window: int | None) -> torch.Tensor:
        """[N, 1, count, B * block_tokens] bool: which rows each of `count` queries sees."""
        row = torch.arange(self.blocks * block_tokens, device=self.rows.device)
        steps = torch.arange(count, device=self.rows.device)
        seen = row < (self.rows[:, None] + steps)[:, :, None]
        if window:
            distance = (self.positions[:, None] + steps)[:, :, None] - self.row_positions(block_tokens)
            seen &= distance < window
        return seen.unsqueeze(1)

    def row_positions(self, block_tokens: int) -> torch.Tensor:
        """[N, 1, B * block_tokens] true position of each row; meaningless beyond the sequence's rows."""
        return (self.starts[:, :, None] + torch.arange(block_tokens, device=self.starts.device)).flatten(1).unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class CellTables:
    """Survivors of an eviction in one layer: cells of each head's own; int64 unless said otherwise."""

    at: torch.Tensor
    """[N] the query's place in the packed tokens."""
    offsets: torch.Tensor
    """[N, H, C] bytes from the store's start to cells of this layer's class; beyond a head's rows any valid ones."""
    rows: torch.Tensor
    """[N, H] rows in the cells; 0: none. All of them are before the sequence's queries."""
    positions: torch.Tensor
    """[N] of the query."""
    key_positions: torch.Tensor | None = None
    """[N, H, C * block_tokens] int32 true position of each row; only a sliding window needs it."""

    causal: ClassVar[bool] = False

    @property
    def blocks(self) -> int:
        """Width of the table."""
        return self.offsets.shape[2]

    def pick(self, index: torch.Tensor | slice, blocks: slice) -> CellTables:
        """Some of the sequences, with some of the table's columns; rows stay as they are."""
        known = self.key_positions
        if known is not None:
            known = known.view(*self.offsets.shape, -1)[index, :, blocks].flatten(2)
        return CellTables(
            self.at[index], self.offsets[index, :, blocks], self.rows[index], self.positions[index], known
        )

    def read(self, view: LayerView) -> tuple[Section, Section]:
        """Keys and values as stored, [N, H, C * block_tokens, ...]."""
        return view.of_cells(self.offsets)

    def existing(self, block_tokens: int, count: int) -> torch.Tensor:
        """[N, H, C * block_tokens] bool: rows that hold something; `count` queries see the same."""
        row = torch.arange(self.blocks * block_tokens, device=self.rows.device)
        return row < self.rows[:, :, None]

    def visible(self, block_tokens: int, count: int, window: int | None) -> torch.Tensor:
        """[N, H, count, C * block_tokens] bool: which rows each of `count` queries sees."""
        seen = self.existing(block_tokens, count)[:, :, None].expand(-1, -1, count, -1)
        if not window:
            return seen
        steps = torch.arange(count, device=self.rows.device)
        queries = (self.positions[:, None] + steps)[:, None, :, None]
        return seen & (queries - self.row_positions(block_tokens).unsqueeze(2) < window)

    def row_positions(self, block_tokens: int) -> torch.Tensor:
        """[N, H, C * block_tokens] int32 true position of each row.

        Raises:
            ValueError: the table doesn't say.
        """
        if self.key_positions is None:
            raise ValueError("a sliding window over cells needs their key_positions, which this table does not have")
        return self.key_positions


Tables = BlockTables | CellTables


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Sequences of one step that compute several tokens each."""

    tables: Tables
    counts: torch.Tensor
    """[N] int64 queries of each sequence, which follow one another from `tables.at` on."""
    longest: int
    """No count is greater."""
    tokens: torch.Tensor
    """[sum of counts] int64 places of all queries in the packed tokens."""


def addresses(
    tables: Tables, window: int | None
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[int, ...]]:
    """Blocks or cells, rows, and what tells rows' positions, where it is looked at; and of each its two strides."""
    if isinstance(tables, BlockTables):
        steps = (tables.tables.stride(0), 0, tables.rows.stride(0), 0, tables.starts.stride(0), 0)
        return (tables.tables, tables.rows, tables.starts), steps
    known = tables.key_positions if window else None
    strides = (*tables.offsets.stride()[:2], *tables.rows.stride(), *((0, 0) if known is None else known.stride()[:2]))
    return (tables.offsets, tables.rows, known), strides


def check_tables(view: LayerView, tables: Tables, window: int | None) -> None:
    """Shapes, types and devices of a table; entries of one sequence, or of its head, must lie side by side."""
    count, device, long = len(tables.at), view.data.device, torch.int64
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]] = {
        "at": (tables.at, (count,), long),
        "positions": (tables.positions, (count,), long),
    }
    if isinstance(tables, BlockTables):
        shape: tuple[int, ...] = (count, tables.blocks)
        wanted |= {"tables": (tables.tables, shape, long), "starts": (tables.starts, shape, long)}
        wanted["rows"] = tables.rows.unsqueeze(1), (count, 1), long
    else:
        heads = (count, view.kv_heads)
        wanted["offsets"] = tables.offsets, (*heads, tables.blocks), long
        wanted["rows"] = tables.rows.unsqueeze(2), (*heads, 1), long
        if window:
            shape = (*heads, tables.blocks * view.block_tokens)
            wanted["key_positions"] = tables.row_positions(view.block_tokens), shape, torch.int32
    for name, (given, shape, dtype) in wanted.items():
        beside = given.shape[-1:] == (1,) or given.stride(-1) == 1
        fits = given.shape == shape and given.dtype == dtype and given.device == device and beside
        require(fits, f"{name} must be {shape} of {dtype} on {device}, the last dimension contiguous", given)
