"""Attention over the paged cache, registered with transformers as one attention function.

The model's own layers project, rotate and call it; it writes this step's keys and values into the cache and reads
everything back from there, so a cold prefill and a prefix hit attend to the same (quantised) numbers.

Non-goals: choosing blocks (`scheduler`) and byte geometry (`layout`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ullage_engine.kernels.cpu import Decoding
from ullage_engine.kernels.view import Section
from ullage_engine.quant import decode
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore

NAME = "ullage_paged"
SHORT_CHUNK = 16
"""Tokens up to which compiled kernels attend to a chunk token by token: for so few a pass over codes costs less than
gathering, dequantising and masking does."""
GROUP_TOKENS = 16_384
"""Cached rows that one group of decoding sequences may read at once, padding included: bounds its workspace."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one step whose chunks have equal length, attended to together."""

    rows: torch.Tensor
    """[N * count] indices into the step's packed tokens."""
    count: int
    """Query tokens of each sequence."""
    tables: torch.Tensor
    """[N, B] block ids, padded with each sequence's own first block."""
    mask: torch.Tensor
    """[N, 1, count, B * block_tokens] bool: key rows that exist and are not after the query."""
    query_positions: torch.Tensor
    """[N, count]."""
    key_positions: torch.Tensor
    """[N, B * block_tokens]; meaningless where the mask is False."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the attention function must know of one step."""

    store: BlockStore
    slots: torch.Tensor
    """[T] where each packed token's key and value go."""
    groups: tuple[Group, ...]
    decoding: Decoding | None = None
    """Tokens attended to one by one, where the store has kernels; else they are among the groups."""


@dataclass(frozen=True, slots=True)
class Query:
    """Tokens of one sequence that are attended to together."""

    at: int
    """Offset of the first in the step's packed tokens."""
    sequence: Sequence
    offset: int
    """How many tokens of the same step come before them in their sequence."""

    @property
    def kept(self) -> int:
        """Rows of the cache before the first."""
        return self.sequence.kept + self.offset

    @property
    def position(self) -> int:
        return self.sequence.computed + self.offset


def make_batch(store: BlockStore, chunks: list[Chunk], device: torch.device, *, row_by_row: bool = False) -> Batch:
    """Tensors of one step; decoding chunks of similar context form a group, each longer chunk its own.

    Args:
        row_by_row: attend to every token by itself, over its own rows alone, so that its result depends neither on
            what else is in the step nor on how its sequence was cut into chunks.
    """
    slots: list[int] = []
    single: list[Query] = []
    groups: list[Group] = []
    for chunk in chunks:
        at, sequence = len(slots), chunk.sequence
        slots.extend(sequence.slots(chunk.width))
        if row_by_row or chunk.width == 1 or (store.kernels is not None and chunk.width <= SHORT_CHUNK):
            single.extend(Query(at + i, sequence, i) for i in range(chunk.width))
        else:
            groups.append(_group(store, [Query(at, sequence, 0)], chunk.width, device))
    decoding = _decoding(store, single) if single and store.kernels is not None else None
    if decoding is None:
        together = [[query] for query in single] if row_by_row else _alike(store, single)
        groups.extend(_group(store, members, 1, device) for members in together)
    return Batch(store, torch.tensor(slots, device=device), tuple(groups), decoding)


def _decoding(store: BlockStore, single: list[Query]) -> Decoding:
    width = max(store.layout.blocks_for(query.kept + 1) for query in single)
    return Decoding(
        at=torch.tensor([query.at for query in single]),
        tables=torch.tensor([_padded(query.sequence.table, width) for query in single]),
        starts=torch.tensor([_padded(query.sequence.starts, width) for query in single]),
        rows=torch.tensor([query.kept + 1 for query in single]),
        positions=torch.tensor([query.position for query in single]),
    )


def _alike(store: BlockStore, single: list[Query]) -> list[list[Query]]:
    """Single tokens in groups whose shared width is below twice anyone's own, and whose workspace is bounded."""
    size = store.layout.block_tokens
    buckets: dict[int, list[Query]] = {}
    for member in single:
        width = store.layout.blocks_for(member.kept + 1)
        buckets.setdefault((width - 1).bit_length(), []).append(member)
    groups: list[list[Query]] = []
    for bits, members in buckets.items():
        limit = max(1, GROUP_TOKENS // (size << bits))
        groups.extend(members[at : at + limit] for at in range(0, len(members), limit))
    return groups


def _group(store: BlockStore, members: list[Query], count: int, device: torch.device) -> Group:
    """Tensors of members that have `count` tokens each."""
    size = store.layout.block_tokens
    width = max(store.layout.blocks_for(query.kept + count) for query in members)
    tables = torch.tensor([_padded(query.sequence.table, width) for query in members], device=device)
    starts = torch.tensor([_padded(query.sequence.starts, width) for query in members], device=device)
    kept = torch.tensor([query.kept for query in members], device=device)
    positions = torch.tensor([query.position for query in members], device=device)
    steps = torch.arange(count, device=device)
    row = torch.arange(width * size, device=device)
    # query i of a sequence sees the rows kept before this chunk and the chunk's own up to itself
    mask = row[None, None, :] <= (kept[:, None] + steps[None, :])[:, :, None]
    return Group(
        rows=torch.tensor([query.at + i for query in members for i in range(count)], device=device),
        count=count,
        tables=tables,
        mask=mask.unsqueeze(1),
        query_positions=positions[:, None] + steps[None, :],
        key_positions=(starts[:, :, None] + torch.arange(size, device=device)).flatten(1),
    )


def _padded(items: list[int], width: int) -> list[int]:
    return items[:width] + [items[0]] * (width - len(items))


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
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer.

    Args:
        query: [1, Hq, T, D] after RoPE; T packs the tokens of all sequences of this step.
        key, value: [1, Hkv, T, D], not repeated for grouped queries.
        attention_mask: None, as no mask is registered for this name; masks come with the batch.
        sliding_window: keys at this distance or farther are not seen.
        softcap: logits are squashed to `softcap * tanh(logits / softcap)`.

    Returns:
        [1, T, Hq, D] and no weights.
    """
    packed = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attend_packed(layer, *packed, ullage_batch, scaling, sliding_window, softcap).unsqueeze(0), None


def attend_packed(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    scaling: float,
    window: int | None,
    softcap: float | None,
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
    if batch.decoding is not None:
        store.decode(layer, batch.decoding, query, out, scaling=scaling, window=window, softcap=softcap)
    for group in batch.groups:
        out[group.rows] = _attend_group(layer, query, group, store, scaling, window, softcap)
    return out


def _attend_group(
    layer: int,
    query: torch.Tensor,
    group: Group,
    store: BlockStore,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Results [N * count, Hq, D] of a group's queries, which are in the cache already."""
    # [N * count, Hq, D] -> [N, Hq, count, D]
    queries = query.index_select(0, group.rows).view(-1, group.count, *query.shape[1:]).transpose(1, 2)
    mask = _within(group, window)
    layout = store.layout
    if group.count == 1 and layout.groups == 1 and layout.cells[layer].kind.quantised:
        result = attend_codes(queries, *store.read_codes(layer, group.tables), mask, scaling, softcap)
    else:
        keys, values = store.read(layer, group.tables, query.dtype)
        result = attend(queries, keys, values, mask, scaling, softcap)
    return result.transpose(1, 2).flatten(0, 1)


def _within(group: Group, sliding_window: int | None) -> torch.Tensor:
    """The group's mask, narrowed to the window by true positions (rows may have been evicted in between)."""
    if not sliding_window:
        return group.mask
    distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
    return group.mask & (distance < sliding_window).unsqueeze(1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Masked grouped-query attention; query [N, Hq, Q, D], key and value [N, Hkv, S, D], mask [N, 1, Q, S]."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    repeat = query.shape[1] // key.shape[1]
    logits = query.float() @ key.float().repeat_interleave(repeat, 1).transpose(-1, -2) * scaling
    logits = (softcap * torch.tanh(logits / softcap)).masked_fill(~mask, float("-inf"))
    return (logits.softmax(-1) @ value.float().repeat_interleave(repeat, 1)).to(query.dtype)


def attend_codes(
    query: torch.Tensor,
    key: Section,
    value: Section,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """`attend` for one query token and one scale per row: K scales multiply logits, V scales multiply probabilities.

    Keys and values are never dequantised, which halves the passes over them; all sums are float32.
    """
    keys, factor = decode(key.codes)
    values, _ = decode(value.codes)
    count, heads = keys.shape[:2]
    grouped = query.float().view(count, heads, -1, query.shape[-1]) * (scaling * factor)
    # [N, Hkv, Hq / Hkv, S], as if the group's query heads were query tokens of its KV head
    logits = (grouped @ keys.transpose(-1, -2)) * _per_row(key)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill_(~mask, float("-inf")).softmax(-1)
    result = (weights * (_per_row(value) * factor)) @ values
    return result.view(query.shape).to(query.dtype)


def _per_row(section: Section) -> torch.Tensor:
    """[N, H, S, 1] scales as [N, H, 1, S]."""
    if section.scales is None:
        raise ValueError("the section has no scales")
    return section.scales.transpose(-1, -2)
