"""Attention over the paged cache, registered with transformers as one attention function.

The model's own layers project, rotate and call it; it writes this step's keys and values into the cache and reads
everything back from there, so a cold prefill and a prefix hit attend to the same (quantised) numbers.

Non-goals: choosing blocks (`scheduler`) and byte geometry (`layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ullage_engine.cell_attention import tables_of
from ullage_engine.device import tensor_on
from ullage_engine.kernels.tables import BlockTables, CellTables, Chunks
from ullage_engine.policies import mass
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore
from ullage_engine.watch import Watch

NAME = "ullage_paged"
SHORT_CHUNK = 16
"""Most tokens of a verified draft that the compiled CPU kernels attend to token by token; see `_is_short`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a step that are attended to in one go."""

    tables: BlockTables | Chunks
    """Single tokens, or chunks."""
    cells: tuple[CellTables | Chunks, ...] = ()
    """What evictions left of the same sequences, for each layer, in the same form; empty: none was evicted."""

    @property
    def tokens(self) -> torch.Tensor:
        """Their places in the step's packed tokens."""
        return self.tables.at if isinstance(self.tables, BlockTables) else self.tables.tokens


@dataclass(frozen=True, slots=True)
class Watched:
    """Queries that somebody wants to see."""

    tokens: slice
    """Their places in the packed tokens."""
    first: int
    """Position of the first."""
    watch: Watch


@dataclass(frozen=True, slots=True)
class Batch:
    """What the attention function must know of one step."""

    store: BlockStore
    slots: torch.Tensor
    """[T] where each packed token's key and value go."""
    parts: tuple[Part, ...]
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """Tokens of one sequence that are attended to together."""

    at: int
    """Offset of the first in the step's packed tokens."""
    sequence: Sequence
    offset: int = 0
    """How many tokens of the same step come before them in their sequence."""
    count: int = 1

    @property
    def kept(self) -> int:
        """Rows of the cache before the first."""
        return self.sequence.kept + self.offset

    @property
    def position(self) -> int:
        return self.sequence.computed + self.offset


def make_batch(store: BlockStore, chunks: list[Chunk], device: torch.device, *, row_by_row: bool = False) -> Batch:
    """Tensors of one step.

    Args:
        row_by_row: attend to every token by itself, over its own rows alone, so that its result depends neither on
            what else is in the step nor on how its sequence was cut into chunks.
    """
    slots: list[int] = []
    single: list[Query] = []
    several: list[Query] = []
    watched: list[Watched] = []
    for chunk in chunks:
        at, sequence = len(slots), chunk.sequence
        slots.extend(sequence.slots(chunk.width))
        if sequence.reads is not None:
            watched.append(Watched(slice(at, at + chunk.width), sequence.computed, sequence.reads))
        if row_by_row or chunk.width == 1 or (store.kernels is not None and _is_short(chunk)):
            single.extend(Query(at + i, sequence, i) for i in range(chunk.width))
        else:
            several.append(Query(at, sequence, 0, chunk.width))
    # torch may sum in another order when there are more sequences; kernels don't
    apart = row_by_row and store.kernels is None
    together = [[query] for query in single] if apart else _by_eviction(single)
    parts = [_part(store, _tables(store, queries, device), queries) for queries in together]
    parts.extend(_part(store, _chunks(store, queries, device), queries) for queries in _by_eviction(several))
    return Batch(store, tensor_on(device, slots), tuple(parts), tuple(watched))


def _is_short(chunk: Chunk) -> bool:
    """Whether a pass over codes for each token costs less than gathering and dequantising them once for all.

    Measured over 64 to 4,096 cached rows: equal at 4 + 6,500 / rows tokens after the first. Prompts are computed one
    way however much of them a prefix hit leaves, since the two ways round differently: a hit answers as a miss does.
    """
    return bool(chunk.draft.tokens) and chunk.width <= SHORT_CHUNK and (chunk.width - 5) * chunk.sequence.kept <= 6500


def _by_eviction(queries: list[Query]) -> list[list[Query]]:
    """Sequences that hold cells apart from the others, whose results must not depend on whether there are any."""
    kinds = [[query for query in queries if (query.sequence.cells is None) == dense] for dense in (True, False)]
    return [kind for kind in kinds if kind]


def _part(store: BlockStore, tables: BlockTables | Chunks, queries: list[Query]) -> Part:
    held = [query.sequence.cells for query in queries if query.sequence.cells is not None]
    if not held:
        return Part(tables)
    if isinstance(tables, BlockTables):
        return Part(tables, tables_of(store, held, tables))
    if not isinstance(tables.tables, BlockTables):
        raise TypeError("a chunk's own rows lie in blocks")
    return Part(tables, tuple(replace(tables, tables=cells) for cells in tables_of(store, held, tables.tables)))


def _tables(store: BlockStore, queries: list[Query], device: torch.device) -> BlockTables:
    width = max(store.layout.blocks_for(query.kept + query.count) for query in queries)
    return BlockTables(
        at=tensor_on(device, [query.at for query in queries]),
        tables=tensor_on(device, [_padded(query.sequence.table, width) for query in queries]),
        starts=tensor_on(device, [_padded(query.sequence.starts, width) for query in queries]),
        rows=tensor_on(device, [query.kept + 1 for query in queries]),
        positions=tensor_on(device, [query.position for query in queries]),
    )


def _chunks(store: BlockStore, queries: list[Query], device: torch.device) -> Chunks:
    tokens = [query.at + i for query in queries for i in range(query.count)]
    return Chunks(
        _tables(store, queries, device),
        counts=tensor_on(device, [query.count for query in queries]),
        longest=max(query.count for query in queries),
        tokens=tensor_on(device, tokens),
    )


def _padded(items: list[int], width: int) -> list[int]:
    return items[:width] + [items[0]] * (width - len(items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one layer weighs keys; see `paged_decode.reference`."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ullage_batch: Batch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer.

    Args:
        query: [1, Hq, T, D] after RoPE; T packs the tokens of all sequences of this step.
        key, value: [1, Hkv, T, D], not repeated for grouped queries.
        attention_mask: None, as no mask is registered for this name; masks come with the batch.
        sliding_window: keys at this distance or farther are not seen.
        softcap: logits are squashed to `softcap * tanh(logits / softcap)`.
        s_aux: [Hq] attention sinks, logits of a key per head that has no value.

    Returns:
        [1, T, Hq, D] and no weights.
    """
    packed = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sinks = None if s_aux is None else s_aux.float()
    rule = Rule(scaling=scaling, window=sliding_window, softcap=softcap, sinks=sinks)
    return attend_packed(layer, *packed, ullage_batch, rule).unsqueeze(0), None


def attend_packed(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, rule: Rule
) -> torch.Tensor:
    """Write one layer's keys and values of all packed tokens, and attend.

    Args:
        query: [T, Hq, D] after RoPE.
        key, value: [T, Hkv, D].

    Returns:
        [T, Hq, D], contiguous.
    """
    store = batch.store
    store.write(layer, batch.slots, key, value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for part in batch.parts:
        _attend_part(layer, query, part, store, out, rule)
    for watched in batch.watched:
        seen = mass.Rule(scaling=rule.scaling, window=rule.window, softcap=rule.softcap)
        watched.watch.see(layer, query[watched.tokens], watched.first, seen)
    return out


def _attend_part(layer: int, query: torch.Tensor, part: Part, store: BlockStore, out: torch.Tensor, rule: Rule) -> None:
    """Attend to blocks, and to what evictions left where that is something."""
    operations = store.operations
    attend = operations.paged_decode if isinstance(part.tables, BlockTables) else operations.paged_prefill
    view, options = store.views[layer], {"scaling": rule.scaling, "window": rule.window, "softcap": rule.softcap}
    if not part.cells:
        attend(view, part.tables, query, out, None, sinks=rule.sinks, **options)
        return
    parts = torch.empty((2, *query.shape), dtype=torch.float32, device=query.device)
    lses = torch.empty(parts.shape[:-1], dtype=torch.float32, device=query.device)
    attend(view, part.tables, query, parts[0], lses[0], sinks=rule.sinks, **options)
    attend(view, part.cells[layer], query, parts[1], lses[1], sinks=None, **options)  # sinks count once
    operations.merge(parts, lses, part.tokens, out, None)
