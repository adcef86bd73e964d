"""Attention over the paged cache in torch, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import LAYER, Rows, block_tables, cell_tables, exact, filled_store
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.attention import Batch, Part, paged_attention
from ullage_engine.kernels import key_scores, merge, paged_decode, paged_prefill
from ullage_engine.kernels.paged_decode import GROUP_TOKENS, alike
from ullage_engine.kernels.tables import BlockTables, CellTables, Chunks
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

LENGTHS = [1, 15, 16, 17, 40, 130]
layouts = st.builds(
    CacheLayout,
    layers=st.just(2),
    kv_heads=st.sampled_from([1, 2, 3]),
    head_size=st.just(32),
    block_tokens=st.sampled_from([8, 16, 32]),
    kv_type=st.sampled_from(["fp8", "int8", "bf16", "fp32"]),
    group=st.sampled_from([None, 16]),
)
rules = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from([0.05, 0.3]),
        "window": st.sampled_from([None, 1, 20]),
        "softcap": st.sampled_from([None, 15.0]),
        "sinks": st.booleans(),
    }
)


def drawn_rule(rule: dict[str, Any], heads: int) -> dict[str, Any]:
    """The rule with sinks as a tensor."""
    sinks = torch.linspace(-1, 3, heads) if rule["sinks"] else None
    return {**rule, "sinks": sinks}


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float = 80) -> bool:
    """Logits of up to 20 have float32 errors of some 5e-6, so probabilities err by that share of the greatest value."""
    return torch.allclose(got.double(), wanted, rtol=1e-5, atol=5e-6 * limit)


def poisoned(tokens: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((tokens, heads, size), torch.nan), torch.full((tokens, heads), torch.nan)


@settings(max_examples=60)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3, 4]), wants_lse=st.booleans(),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), shared=st.integers(0, 2),
    dropped=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_decode_equals_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, wants_lse: bool, lengths: list[int], **case: int
) -> None:
    store, tables, held = block_tables(layout, lengths, **case)
    assert isinstance(tables, BlockTables)
    heads = layout.kv_heads * repeat
    rule = drawn_rule(rule, heads)
    query = torch.randn(len(lengths), heads, 32, generator=torch.Generator().manual_seed(1))
    out, lse = poisoned(len(lengths) + 1, heads, 32)
    paged_decode.reference(store.views[LAYER], tables, query, out, lse if wants_lse else None, **rule)
    for n in range(len(lengths)):
        wanted, logs, _ = exact(query[n], held[n], int(tables.positions[n]), **rule)
        assert close(out[n], wanted)
        assert not wants_lse or close(lse[n], logs, 1)
    assert out[len(lengths) :].isnan().all()
    assert lse[0 if not wants_lse else len(lengths) :].isnan().all()


@settings(max_examples=40)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3]), wants_lse=st.booleans(),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3), ratio=st.sampled_from([0.1, 0.5, 1.0]),
    shared=st.integers(0, 1), dropped=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_prefill_equals_float64(
    layout: CacheLayout,
    rule: dict[str, Any],
    repeat: int,
    wants_lse: bool,
    lengths: list[int],
    ratio: float,
    **case: int,
) -> None:
    counts = [max(1, int(length * ratio)) for length in lengths]
    store, chunks, held = block_tables(layout, lengths, counts, **case)
    assert isinstance(chunks, Chunks)
    heads = layout.kv_heads * repeat
    rule = drawn_rule(rule, heads)
    query = torch.randn(sum(counts), heads, 32, generator=torch.Generator().manual_seed(1))
    out, lse = poisoned(sum(counts) + 1, heads, 32)
    paged_prefill.reference(store.views[LAYER], chunks, query, out, lse if wants_lse else None, **rule)
    for n, (at, count) in enumerate(zip(chunks.tables.at.tolist(), counts, strict=True)):
        for i in range(count):
            seen = int(held[n][0].positions[lengths[n] - count + i])
            wanted, logs, _ = exact(query[at + i], held[n], seen, **rule)
            assert close(out[at + i], wanted)
            assert not wants_lse or close(lse[at + i], logs, 1)
    assert out[sum(counts) :].isnan().all()


@settings(max_examples=40)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3]), data=st.data(), count=st.integers(1, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_cells_of_each_heads_own_equal_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, data: st.DataObject, count: int, seed: int
) -> None:
    lengths = data.draw(
        st.lists(
            st.lists(st.sampled_from([0, 1, 7, 16, 40]), min_size=layout.kv_heads, max_size=layout.kv_heads),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    heads = layout.kv_heads * repeat
    rule = drawn_rule(rule, heads)
    if rule["window"]:
        rule["window"] *= 300  # of positions up to 10,000
    store = filled_store(layout, 3 * 6 * 3, seed)
    at = torch.arange(len(lengths)).flip(0) * count
    tables, held = cell_tables(store, lengths, at, torch.full((len(lengths),), 10_000), seed=seed)
    query = torch.randn(len(lengths) * count, heads, 32, generator=torch.Generator().manual_seed(1))
    out, lse = poisoned(len(lengths) * count, heads, 32)
    view = store.views[LAYER]
    if count == 1:
        paged_decode.reference(view, tables, query, out, lse, **rule)
    else:
        counts = torch.full((len(lengths),), count)
        paged_prefill.reference(view, Chunks(tables, counts, count, torch.arange(len(query))), query, out, lse, **rule)
    for n in range(len(lengths)):
        for i in range(count):
            wanted, logs, _ = exact(query[at[n] + i], held[n], 10_000 + i, **rule)
            assert close(out[at[n] + i], wanted)
            assert close(lse[at[n] + i], logs, 1)


@settings(max_examples=30)
@given(cut=st.integers(1, 99), sinks=st.booleans(), seed=st.integers(0, 99))
def test_parts_merge_to_the_whole(cut: int, sinks: bool, seed: int) -> None:
    """Rows cut in two, the sink counted in the first part alone; a part that saw nothing may hold NaN."""
    layout = CacheLayout(2, 2, 32, 16, "fp32")
    store, _, held = block_tables(layout, [100], seed=seed)
    del store
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(seed))
    sink = torch.tensor([2.0, 0.0, -1.0, 5.0]) if sinks else None
    parts, lses = torch.full((3, 3, 4, 32), torch.nan), torch.full((3, 3, 4), -torch.inf)
    wanted, logs, _ = exact(query[1], held[0], None, scaling=0.3, sinks=sink)
    for p, some in enumerate((slice(cut), slice(cut, None))):
        rows = [type(r)(r.keys[some], r.values[some], r.positions[some]) for r in held[0]]
        result, log, _ = exact(query[1], rows, None, scaling=0.3, sinks=None if p else sink)
        parts[p, 1], lses[p, 1] = result.float(), log.float()
    out, lse = poisoned(3, 4, 32)
    merge.reference(parts, lses, torch.tensor([1, 2]), out, lse)
    assert close(out[1], wanted)
    assert close(lse[1], logs, 1)
    assert out[0].isnan().all()
    assert out[2].eq(0).all()
    assert lse[2].eq(-torch.inf).all()


@settings(max_examples=40)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3]), mode=st.sampled_from(["square", "sum", "entropy"]),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3), dropped=st.integers(0, 1),
    queries=st.integers(1, 5), seed=st.integers(0, 99),
)  # fmt: skip
def test_scores_equal_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, mode: Any, lengths: list[int], queries: int, **case: int
) -> None:
    store, tables, held = block_tables(layout, lengths, **case)
    assert isinstance(tables, BlockTables)
    heads = layout.kv_heads * repeat
    rule = drawn_rule(rule, heads)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(lengths), queries, heads, 32, generator=generator) * 3
    positions = torch.full((len(lengths), queries), -1)
    lse = torch.full((len(lengths), queries, heads), -torch.inf)
    wanted = torch.zeros(len(lengths), heads, tables.blocks * layout.block_tokens, dtype=torch.float64)
    for n, length in enumerate(lengths):
        for w in range(min(length, queries)):  # the last queries; where there are fewer, the first places are empty
            place = queries - 1 - w
            positions[n, place] = held[n][0].positions[length - 1 - w]
            _, logs, chances = exact(query[n, place], held[n], int(positions[n, place]), **rule)
            lse[n, place] = logs.float()
            for h, p in enumerate(chances):
                of = {"square": p.square(), "sum": p, "entropy": -torch.xlogy(p, p)}[mode]
                wanted[n, h, :length] += of
    got = key_scores.reference(
        store.views[LAYER], tables, query, positions, lse, mode,
        scaling=rule["scaling"], window=rule["window"], softcap=rule["softcap"],
    )  # fmt: skip
    assert got.shape == (len(lengths), layout.kv_heads, wanted.shape[2])
    # logits and lse of up to 50 err by 2^-20 in float32, which -p log p passes on with p near 1, for each query
    wanted = wanted.unflatten(1, (layout.kv_heads, -1)).mean(2)
    assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=2e-5)


def test_scores_of_cells_are_parts_of_the_whole() -> None:
    """A query's probabilities over blocks and cells sum to one when its log-sum-exp is over both."""
    layout = CacheLayout(2, 2, 32)
    store = filled_store(layout, 40, 0)
    at, positions = torch.tensor([0]), torch.tensor([9_999])
    cells, _ = cell_tables(store, [[33, 5]], at, positions)
    free = [b for b in range(40) if not (cells.offsets // layout.block_bytes == b).any()][:2]
    blocks = BlockTables(at, torch.tensor([free]), torch.tensor([[9_970, 9_986]]), torch.tensor([30]), positions)
    query = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    parts, lses = torch.empty(2, 1, 4, 32), torch.empty(2, 1, 4)
    whole = torch.empty(1, 4)
    for p, tables in enumerate((blocks, cells)):
        paged_decode.reference(store.views[LAYER], tables, query, parts[p], lses[p], scaling=0.2)
    merge.reference(parts, lses, at, torch.empty(1, 4, 32), whole)
    scores = [
        key_scores.reference(
            store.views[LAYER], tables, query[None], positions[None], whole[None], "sum", scaling=0.2
        ).sum(-1)
        for tables in (blocks, cells)
    ]
    assert torch.allclose(sum(scores), torch.ones(1, 2), atol=1e-5)  # type: ignore[arg-type]


def test_a_window_over_cells_of_unknown_positions_is_refused() -> None:
    store = filled_store(CacheLayout(2, 1, 32), 8, 0)
    tables, _ = cell_tables(store, [[5]], torch.tensor([0]), torch.tensor([100]))
    bare = CellTables(tables.at, tables.offsets, tables.rows, tables.positions)
    out, lse = poisoned(1, 1, 32)
    with pytest.raises(ValueError, match="needs their key_positions"):
        paged_decode.reference(store.views[LAYER], bare, torch.ones(1, 1, 32), out, lse, scaling=1.0, window=4)


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, 0.0])])
def test_a_sequence_without_rows_gets_nothing(sinks: torch.Tensor | None) -> None:
    store = filled_store(CacheLayout(2, 1, 32), 8, 0)
    none = torch.tensor([0])
    tables = BlockTables(none, torch.tensor([[3]]), torch.tensor([[0]]), none, none)
    for logs in (torch.empty(1, 2), None):
        out = torch.full((1, 2, 32), torch.nan)
        paged_decode.reference(store.views[LAYER], tables, torch.ones(1, 2, 32), out, logs, scaling=1.0, sinks=sinks)
        assert out.eq(0).all()
        assert logs is None or torch.equal(logs[0], torch.full((2,), -torch.inf) if sinks is None else sinks)


@pytest.mark.parametrize("count", [1, 5])
def test_sinks_that_transformers_passes_count(count: int) -> None:
    """gpt-oss gives them as `s_aux`, one logit a head."""
    layout = CacheLayout(2, 2, 32, 16, "fp32")
    store = BlockStore(layout, 1)
    query, key, value = torch.randn(3, 1, 2, count, 32, generator=torch.Generator().manual_seed(0))
    one = torch.tensor([0])
    tables = BlockTables(one, torch.tensor([[0]]), torch.tensor([[0]]), one + 1, one)
    chunks = Chunks(tables, torch.tensor([count]), count, torch.arange(count))
    part = Part(tables if count == 1 else chunks)
    sinks = torch.tensor([3.0, -1.0])
    out, _ = paged_attention(
        Module(), query, key, value, None,
        scaling=0.2, ullage_batch=Batch(store, torch.arange(count), (part,)), s_aux=sinks.bfloat16(),
    )  # fmt: skip
    rows = [Rows(key[0, h].double(), value[0, h].double(), torch.arange(count)) for h in range(2)]
    for i in range(count):
        wanted, _, _ = exact(query[0, :, i], rows, i, scaling=0.2, sinks=sinks)
        assert close(out[0, i], wanted, 4)


class Module(torch.nn.Module):
    layer_idx = LAYER


def test_decoding_sequences_are_grouped_by_context_and_bounded() -> None:
    lengths = torch.tensor([1, 15, 16, 17, 100, 130, 4000, *[1000] * 40])
    count = len(lengths)
    table = torch.arange(count)[:, None].expand(-1, 251)
    groups = alike(BlockTables(torch.arange(count), table, table, lengths + 1, lengths), 16)
    assert sorted(int(place) for group in groups for place in group.at) == list(range(count))
    for group in groups:
        own = -(-group.rows // 16)
        assert group.blocks < 2 * own.min() or group.blocks == 1
        assert len(group.at) * group.blocks * 16 <= GROUP_TOKENS or len(group.at) == 1
