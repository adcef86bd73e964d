"""Caches with sequences in them, and what attention over them must give, computed in float64 row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ullage_engine.kernels.tables import BlockTables, CellTables, Chunks
from ullage_engine.kernels.view import LayerView
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

LAYER = 1


@dataclass(frozen=True)
class Rows:
    """What one head of one sequence holds."""

    keys: torch.Tensor
    """[S, D] float64, as they were read back from the cache."""
    values: torch.Tensor
    positions: torch.Tensor
    """[S] int64."""


def filled_store(layout: CacheLayout, blocks: int, seed: int) -> BlockStore:
    """A store whose every slot holds something; K and V differ in scale, so that a swap of the two would show."""
    generator = torch.Generator().manual_seed(seed)
    store = BlockStore(layout, blocks)
    slots = torch.arange(blocks * layout.block_tokens)
    shape = (len(slots), layout.kv_heads, layout.head_size)
    keys = torch.randn(shape, generator=generator) * 0.5
    values = torch.randn(shape, generator=generator) * 20
    keys[::7, :, 3] = 8.0
    for layer in range(layout.layers):
        store.write(layer, slots, keys * (layer + 1), values)
    return store


def poison(view: LayerView, block: int, head: int, rows: slice) -> None:
    """Make some rows of one cell hold what no sum may meet: NaN scales, NaN codes."""
    for at in (view.k_codes, view.v_codes):
        codes = view.codes(at)
        codes[block, head, rows] = float("nan") if codes.is_floating_point() else 127
    if view.kind.quantised:
        for at in (view.k_scales, view.v_scales):
            view.scales(at)[block, head, rows] = float("nan")


def block_tables(
    layout: CacheLayout,
    lengths: Sequence[int],
    counts: Sequence[int] | None = None,
    *,
    seed: int = 0,
    shared: int = 0,
    dropped: int = 0,
    spare: int = 2,
) -> tuple[BlockStore, BlockTables | Chunks, list[list[Rows]]]:
    """A store, tables of sequences, and what each sequence's heads hold.

    Args:
        lengths: rows of each sequence, those of its queries included.
        counts: queries of each; None: one, in the form of decoding.
        shared: first blocks that all sequences have in common, if they are full.
        dropped: blocks that are gone after a sequence's first, so that positions have a gap.
        spare: columns beyond the longest sequence's table.
    """
    size = layout.block_tokens
    needed = [layout.blocks_for(length) for length in lengths]
    store = filled_store(layout, sum(needed) + spare + 1, seed)
    view = store.views[LAYER]
    order = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    poisoned = sum(needed) + spare  # the last block: padding of tables
    for head in range(layout.kv_heads):
        poison(view, poisoned, head, slice(None))
    common = order[:shared]
    order = order[shared:]
    tables, starts = [], []
    width = max(needed) + spare
    asked = list(counts or [1] * len(lengths))
    for length, count, blocks in zip(lengths, asked, needed, strict=True):
        full = min(shared, length // size, blocks - 1) if blocks else 0
        mine = common[:full] + order[: blocks - full]
        order = order[blocks - full :]
        tail = length - (blocks - 1) * size
        if blocks and tail < size:
            for head in range(layout.kv_heads):
                poison(view, mine[-1], head, slice(tail, None))
        gap = dropped * size if length - count >= size else 0  # a chunk itself has no gaps
        first = [0, *(gap + i * size for i in range(1, blocks))][:blocks]
        tables.append(mine + [poisoned] * (width - blocks))
        starts.append(first + [-1_000_000] * (width - blocks))
    at = torch.tensor(asked).cumsum(0) - torch.tensor(asked)
    rows = torch.tensor([length - count + 1 for length, count in zip(lengths, asked, strict=True)])
    held = [held_rows(store, layout, t, s, n) for t, s, n in zip(tables, starts, lengths, strict=True)]
    positions = torch.tensor(
        [int(h[0].positions[r - 1]) if n else 0 for h, r, n in zip(held, rows, lengths, strict=True)]
    )
    found = BlockTables(at, torch.tensor(tables), torch.tensor(starts), rows.clamp_min(0), positions)
    if counts is None:
        return store, found, held
    return store, Chunks(found, torch.tensor(asked), max(asked), torch.arange(sum(asked))), held


def held_rows(store: BlockStore, layout: CacheLayout, table: list[int], starts: list[int], length: int) -> list[Rows]:
    keys, values = (part[0].double() for part in store.read(LAYER, torch.tensor([table]), torch.float32))
    positions = (torch.tensor(starts)[:, None] + torch.arange(layout.block_tokens)).flatten()
    return [Rows(keys[h, :length], values[h, :length], positions[:length]) for h in range(layout.kv_heads)]


def cell_tables(
    store: BlockStore, lengths: Sequence[Sequence[int]], at: torch.Tensor, positions: torch.Tensor, *, seed: int = 0
) -> tuple[CellTables, list[list[Rows]]]:
    """Tables over cells of `store`, which must have one block for each, and what each sequence's heads hold.

    Args:
        lengths: [N][H] rows of each head.
    """
    layout, view = store.layout, store.views[LAYER]
    size = layout.block_tokens
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(store.data.shape[0] * layout.kv_heads, generator=generator).tolist()
    width = max(1, *(layout.blocks_for(n) for heads in lengths for n in heads)) + 1
    all_blocks = torch.arange(store.data.shape[0]).unsqueeze(0)
    places = view.cell_offsets(all_blocks)[0]  # [H, blocks]
    keys, values = (part[0].double() for part in store.read(LAYER, all_blocks, torch.float32))
    offsets = torch.empty((len(lengths), layout.kv_heads, width), dtype=torch.int64)
    known = torch.randint(0, 10_000, (*offsets.shape[:2], width * size), generator=generator, dtype=torch.int32)
    held: list[list[Rows]] = []
    padding = divmod(free.pop(), store.data.shape[0])
    poison(view, padding[1], padding[0], slice(None))
    for n, heads in enumerate(lengths):
        held.append([])
        for h, length in enumerate(heads):
            used = [divmod(free.pop(), store.data.shape[0]) for _ in range(layout.blocks_for(length))]
            for i, (head, block) in enumerate([*used, *[padding] * (width - len(used))]):
                offsets[n, h, i] = places[head, block]
            if length % size:
                poison(view, used[-1][1], used[-1][0], slice(length % size, None))
            index = [(head, block * size + r) for head, block in used for r in range(size)][:length]
            k = torch.stack([keys[i] for i in index]) if index else keys.new_empty((0, layout.head_size))
            v = torch.stack([values[i] for i in index]) if index else k
            held[-1].append(Rows(k, v, known[n, h, :length].long()))
    rows = torch.tensor([list(heads) for heads in lengths])
    return CellTables(at, offsets, rows, positions, known), held


def exact(
    query: torch.Tensor,
    rows: Sequence[Rows],
    position: int | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Result [Hq, D], log-sum-exp [Hq] and each query head's probabilities, in float64.

    Args:
        query: [Hq, D].
        rows: of each KV head.
        position: of the query, which sees no later rows; None: it sees all.
    """
    repeat = query.shape[0] // len(rows)
    out, logs, chances = torch.zeros(query.shape, dtype=torch.float64), [], []
    for h, q in enumerate(query.double()):
        held = rows[h // repeat]
        logits = held.keys @ q * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if position is not None:
            logits = logits.masked_fill(held.positions > position, -torch.inf)
            if window:
                logits = logits.masked_fill(position - held.positions >= window, -torch.inf)
        more = logits if sinks is None else torch.cat((logits, sinks[h].double().view(1)))
        log = more.logsumexp(0) if len(more) else torch.tensor(-torch.inf, dtype=torch.float64)
        chance = torch.zeros_like(logits) if log == -torch.inf else (logits - log).exp()
        out[h] = chance @ held.values
        logs.append(log)
        chances.append(chance)
    return out, torch.stack(logs), chances
