"""Triton's attention against float64 and against its references, on a GPU where there is one, else interpreted.

Tolerances. Interpreted dots are float32; on a GPU they multiply float16 (10 bits behind the point) or, of a bfloat16
cache, bfloat16 (7 bits), and sum in float32: logits and weights each err by half a last place of their type.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product
from typing import Any

import kernel_cases as cases
import pytest
import torch
from attention_cases import LAYER, Rows, block_tables, cell_tables, exact, filled_store
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels import dispatch, key_scores, launch, merge, paged_decode, paged_prefill, tuning
from ullage_engine.kernels.tables import BlockTables, CellTables, Chunks
from ullage_engine.kernels.view import LayerView
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import CACHE_TYPES
from ullage_engine.store import BlockStore

ON_GPU = cases.DEVICE.type == "cuda"
ROUNDING = {"fp8": 2**-10, "int8": 2**-10, "bf16": 2**-7, "fp32": 2**-17} if ON_GPU else dict.fromkeys(
    ("fp8", "int8", "bf16", "fp32"), 2**-17
)  # fmt: skip
rules = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from([0.05, 0.2]),
        "window": st.sampled_from([None, 1, 20, 600]),
        "softcap": st.sampled_from([None, 15.0]),
        "sinks": st.booleans(),
    }
)
layouts = st.builds(
    lambda heads, shape, size, kind: CacheLayout(2, heads, shape[0], size, kind, shape[1]),
    heads=st.integers(1, 2),
    shape=st.sampled_from([(64, None), (32, 16), (80, None), (96, 48)]),
    size=st.sampled_from([8, 16, 32]),
    kind=st.sampled_from(["fp8", "int8", "bf16", "fp32"]),
)


def rule_of(rule: dict[str, Any], heads: int) -> dict[str, Any]:
    sinks = torch.linspace(-1, 3, heads, device=cases.DEVICE) if rule["sinks"] else None
    return {**rule, "sinks": sinks}


def there(item: Any) -> Any:
    """The same on the device of the kernels: a view, a table, or chunks."""
    if isinstance(item, torch.Tensor):
        return item.to(cases.DEVICE)
    fields = {"data"} if isinstance(item, LayerView) else set(item.__dataclass_fields__)
    moved = {name: getattr(item, name) for name in fields}
    deep = (torch.Tensor, BlockTables, CellTables)
    return replace(item, **{name: there(value) for name, value in moved.items() if isinstance(value, deep)})


def strided(tables: Any) -> Any:
    """The same tables within larger tensors, as those of one layer among all."""
    names = [name for name in ("tables", "starts", "offsets", "rows", "key_positions") if hasattr(tables, name)]
    wide = {}
    for name in names:
        part = getattr(tables, name)
        wide[name] = torch.stack([part, torch.full_like(part, -7)], 1)[:, 0]
    return replace(tables, **wide)


def view_of(store: BlockStore) -> LayerView:
    view: LayerView = there(store.views[LAYER])
    return view


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=cases.DEVICE, dtype=dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, kind: str, limit: float) -> bool:
    """Within rounding of logits of up to 20, of weights, and so of values of up to `limit`."""
    return torch.allclose(got.double().cpu(), wanted, rtol=ROUNDING[kind], atol=ROUNDING[kind] * limit)


@settings(max_examples=20)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3, 8]), wants_lse=st.booleans(),
    lengths=st.lists(st.sampled_from(cases.LENGTHS[:-1]) | st.just(700), min_size=1, max_size=3),
    shared=st.integers(0, 2), dropped=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_decode_equals_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, wants_lse: bool, lengths: list[int], **case: int
) -> None:
    store, tables, held = block_tables(layout, lengths, **case)
    assert isinstance(tables, BlockTables)
    heads, size, kind = layout.kv_heads * repeat, layout.head_size, layout.kv_type
    rule = rule_of(rule, heads)
    # rows of a padded buffer, in another order than the tables'
    query = torch.randn(len(lengths) + 1, heads + 1, size, generator=torch.Generator().manual_seed(1)) * 0.7
    tables = strided(replace(tables, at=tables.at.flip(0)))
    out, lse = poisoned(len(lengths) + 1, heads, size), poisoned(len(lengths) + 1, heads)
    options = {**rule, "scaling": rule["scaling"]}
    paged_decode.kernel(
        view_of(store), there(tables), there(query)[:, :heads], out, lse if wants_lse else None, **options
    )
    plain = {**rule, "sinks": None if rule["sinks"] is None else rule["sinks"].cpu()}
    for n, at in enumerate(tables.at.tolist()):
        wanted, logs, _ = exact(query[at, :heads], held[n], int(tables.positions[n]), **plain)
        assert close(out[at], wanted, kind, 80)
        assert not wants_lse or close(lse[at], logs, kind, 20)
    assert out[len(lengths)].isnan().all()
    assert lse[0 if not wants_lse else len(lengths) :].isnan().all()


@settings(max_examples=12)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3, 8]), lengths=st.permutations([1, 17, 530]),
    counts=st.sampled_from([(1, 3, 5), (1, 17, 40)]), dropped=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunks_equal_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, lengths: list[int], counts: tuple[int, ...], **case: int
) -> None:
    """A few drafts, over splits of rows, and longer chunks."""
    asked = [min(pair) for pair in zip(lengths, counts, strict=True)]
    store, chunks, held = block_tables(layout, lengths, asked, **case)
    assert isinstance(chunks, Chunks)
    heads, size, kind = layout.kv_heads * repeat, layout.head_size, layout.kv_type
    rule = rule_of(rule, heads)
    query = torch.randn(sum(asked), heads, size, generator=torch.Generator().manual_seed(1)) * 0.7
    out, lse = poisoned(sum(asked) + 1, heads, size), poisoned(sum(asked) + 1, heads)
    padded = torch.cat((query, query[:1]))
    paged_prefill.kernel(view_of(store), there(chunks), there(padded), out, lse, **rule)
    plain = {**rule, "sinks": None if rule["sinks"] is None else rule["sinks"].cpu()}
    for n, (at, count) in enumerate(zip(chunks.tables.at.tolist(), asked, strict=True)):
        for i in range(count):
            seen = int(held[n][0].positions[lengths[n] - count + i])
            wanted, logs, _ = exact(query[at + i], held[n], seen, **plain)
            assert close(out[at + i], wanted, kind, 80)
            assert close(lse[at + i], logs, kind, 20)
    assert out[-1].isnan().all()


@settings(max_examples=12)
@given(
    layout=layouts, rule=rules, repeat=st.sampled_from([1, 3]), count=st.integers(1, 2), seed=st.integers(0, 99),
    data=st.data(),
)  # fmt: skip
def test_cells_of_each_heads_own_equal_float64(
    layout: CacheLayout, rule: dict[str, Any], repeat: int, count: int, seed: int, data: st.DataObject
) -> None:
    one = st.lists(st.sampled_from([0, 1, 16, 40, 530]), min_size=layout.kv_heads, max_size=layout.kv_heads)
    lengths = data.draw(st.lists(one, min_size=1, max_size=2))
    heads, size, kind = layout.kv_heads * repeat, layout.head_size, layout.kv_type
    rule = rule_of({**rule, "window": rule["window"] and rule["window"] * 300}, heads)
    store = filled_store(layout, 2 * 2 * 68, seed)
    at = torch.arange(len(lengths)) * count
    tables, held = cell_tables(store, lengths, at, torch.full((len(lengths),), 10_000), seed=seed)
    tables = strided(tables)
    query = torch.randn(len(lengths) * count, heads, size, generator=torch.Generator().manual_seed(1)) * 0.7
    out, lse = poisoned(*query.shape), poisoned(*query.shape[:2])
    if count == 1:
        paged_decode.kernel(view_of(store), there(tables), there(query), out, lse, **rule)
    else:
        chunks = Chunks(tables, torch.full((len(lengths),), count), count, torch.arange(len(query)))
        paged_prefill.kernel(view_of(store), there(chunks), there(query), out, lse, **rule)
    plain = {**rule, "sinks": None if rule["sinks"] is None else rule["sinks"].cpu()}
    for n in range(len(lengths)):
        for i in range(count):
            wanted, logs, _ = exact(query[at[n] + i], held[n], 10_000 + i, **plain)
            assert close(out[at[n] + i], wanted, kind, 80)
            assert close(lse[at[n] + i], logs, kind, 20)


@pytest.mark.parametrize("mode", ["square", "sum", "entropy"])
@settings(max_examples=4)
@given(
    layout=layouts, repeat=st.sampled_from([1, 3]), window=st.sampled_from([None, 20]),
    softcap=st.sampled_from([None, 15.0]), cells=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_scores_equal_the_reference(
    mode: Any, layout: CacheLayout, repeat: int, window: int | None, softcap: float | None, cells: bool, seed: int
) -> None:
    heads, size = layout.kv_heads * repeat, layout.head_size
    if cells:
        store = filled_store(layout, 40, seed)
        at, last = torch.tensor([0, 1]), torch.tensor([10_000, 9_999])
        tables: Any = cell_tables(store, [[33] * layout.kv_heads, [0, 17][: layout.kv_heads]], at, last, seed=seed)[0]
        window = window and window * 300
    else:
        store, tables, _ = block_tables(layout, [17, 300], seed=seed, dropped=1)
    tables = strided(tables)
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, 20, heads, size, generator=generator) * 0.7
    positions = (tables.positions[:, None] - torch.arange(20)).clamp_min(-1)  # more queries than the first has
    lse = torch.randn(2, 20, heads, generator=generator) + 12
    lse[1, 3] = -torch.inf
    options = {"scaling": 0.1, "window": window, "softcap": softcap}
    wanted = key_scores.reference(store.views[LAYER], tables, queries, positions, lse, mode, **options)
    got = key_scores.kernel(
        view_of(store), there(tables), there(queries), there(positions), there(lse), mode, **options
    )
    assert close(got, wanted.double(), layout.kv_type, float(wanted.max()) * 20)


def test_merging_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    parts, lses = torch.randn(19, 5, 4, 80, generator=generator), torch.randn(19, 5, 4, generator=generator) * 5
    lses[1], parts[1] = -torch.inf, torch.nan
    lses[:, 3] = -torch.inf
    at = torch.tensor([3, 1, 4])
    out, lse = poisoned(5, 4, 80), poisoned(5, 4)
    merge.kernel(there(parts), there(lses), there(at), out, lse)
    wanted, log = torch.full((5, 4, 80), torch.nan), torch.full((5, 4), torch.nan)
    merge.reference(parts, lses, at, wanted, log)
    assert torch.allclose(out.cpu(), wanted, atol=1e-6, equal_nan=True)
    assert torch.allclose(lse.cpu(), log, atol=1e-5, equal_nan=True)


def test_a_result_does_not_depend_on_the_batch_nor_on_the_width_of_its_table() -> None:
    """One long sequence beside short ones: alone, each is read in as many splits as in company."""
    layout = CacheLayout(2, 1, 64)
    lengths = [1, 15, 16, 17, 4097]
    store, tables, held = block_tables(layout, lengths, seed=3, shared=1)
    assert isinstance(tables, BlockTables)
    view = view_of(store)
    query = there(torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)))
    together, alone = poisoned(5, 2, 64), poisoned(5, 2, 64)
    sinks = torch.tensor([1.0, -1.0], device=cases.DEVICE)
    paged_decode.kernel(view, there(tables), query, together, None, scaling=0.1, sinks=sinks)
    for n, length in enumerate(lengths):
        one = tables.pick(slice(n, n + 1), slice(layout.blocks_for(length)))
        compact = BlockTables(one.at, one.tables.contiguous(), one.starts.contiguous(), one.rows, one.positions)
        paged_decode.kernel(view, there(compact), query, alone, None, scaling=0.1, sinks=sinks)
        wanted, _, _ = exact(query[n].cpu(), held[n], None, scaling=0.1, sinks=sinks.cpu())
        assert close(alone[n], wanted, "fp8", 80)
    assert torch.equal(together, alone)


def test_a_hundred_thousand_rows_reduce_as_float64_does() -> None:
    """Weights that are alike: a sum of low precision would lose what comes late."""
    layout = CacheLayout(2, 1, 64, 32)
    rows = 100_000
    store, tables, held = block_tables(layout, [rows], seed=1)
    query = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    out = poisoned(1, 1, 64)
    paged_decode.kernel(view_of(store), there(tables), there(query), out, None, scaling=0.01)
    wanted, _, _ = exact(query[0], held[0], None, scaling=0.01)
    assert (out[0].cpu().double() - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(("queries", "keys", "values"), [(1.0, 0.5, 2.0), (1e4, 1e-4, 1e6), (1e-8, 1e8, 1e-8)])
def test_scales_are_neither_swapped_nor_lost(queries: float, keys: float, values: float) -> None:
    """A query scale other than one, a K scale other than V's; products beyond float16's range either way."""
    layout = CacheLayout(2, 1, 64)
    store = BlockStore(layout, 4)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 64, 1, 64, generator=generator)
    store.write(LAYER, torch.arange(64), key * keys, value * values)
    read = [part[0, 0].double() for part in store.read(LAYER, torch.arange(4)[None], torch.float32)]
    one = torch.tensor([0])
    tables = BlockTables(one, torch.arange(4)[None], torch.arange(4)[None] * 16, one + 64, one + 63)
    query = torch.randn(1, 1, 64, generator=generator) * queries
    out = poisoned(1, 1, 64)
    paged_decode.kernel(view_of(store), there(tables), there(query), out, None, scaling=0.125 / (queries * keys))
    wanted, _, _ = exact(query[0], [Rows(*read, torch.arange(64))], None, scaling=0.125 / (queries * keys))
    assert close(out[0] / values, wanted / values, "fp8", 4)


def test_bfloat16_results_are_rounded_once() -> None:
    layout = CacheLayout(2, 1, 64)
    store, tables, held = block_tables(layout, [40])
    query = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = poisoned(1, 2, 64, dtype=torch.bfloat16)
    paged_decode.kernel(view_of(store), there(tables), there(query), out, None, scaling=0.1)
    wanted, _, _ = exact(query[0], held[0], None, scaling=0.1)
    # 8 bits of bfloat16; the interpreter cuts where a GPU rounds
    assert torch.allclose(out[0].double().cpu(), wanted, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("operation", [paged_decode, paged_prefill, key_scores, merge])
def test_kernel_and_reference_have_one_signature(operation: Any) -> None:
    assert inspect.signature(operation.kernel) == inspect.signature(operation.reference)
    name = operation.__name__.rpartition(".")[2]
    assert getattr(dispatch.TRITON, name) is operation.kernel


def test_arguments_that_do_not_fit_are_refused() -> None:
    layout = CacheLayout(2, 2, 64)
    store, tables, _ = block_tables(layout, [5, 20])
    assert isinstance(tables, BlockTables)
    view, fit = view_of(store), there(tables)
    query = torch.ones(2, 4, 64, device=cases.DEVICE)
    out = torch.empty_like(query)

    def refused(match: str, table: Any = fit, q: torch.Tensor = query, o: torch.Tensor = out, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            paged_decode.kernel(view, table, q, o, more.pop("lse", None), scaling=1.0, **more)

    refused("tables must be", replace(fit, tables=fit.tables.int()))
    refused("starts must be", replace(fit, starts=fit.starts[:, :1]))
    refused("rows must be", replace(fit, rows=fit.rows[:1]))
    refused("query must be", q=query[:, :3])
    refused("query must be", q=query[..., :32])
    refused("out must be", o=out[:1])
    refused("out must be", o=out.transpose(1, 2).contiguous().transpose(1, 2))
    refused("lse must be", lse=torch.empty(2, 3, device=cases.DEVICE))
    refused("sinks must be", sinks=torch.ones(3, device=cases.DEVICE))
    queries, positions, lse = query[:, None], fit.positions[:, None], torch.ones(2, 1, 4, device=cases.DEVICE)
    with pytest.raises(ValueError, match="lse must be"):
        key_scores.kernel(view, fit, queries, positions, lse[..., :2], "square", scaling=1.0)
    with pytest.raises(ValueError, match="positions must be"):
        key_scores.kernel(view, fit, queries, positions.int(), lse, "square", scaling=1.0)
    with pytest.raises(ValueError, match="lses must be"):
        merge.kernel(out[None], out[None, ..., 0, :2], fit.at, out, None)


def test_every_tile_divides_a_split() -> None:
    """Else a split's rows would be read in other tiles than the sequence's own."""
    from ullage_engine.kernels.targets import INTERPRETER, TARGETS

    for target in (*TARGETS, INTERPRETER):
        for size, kind in product((16, 64, 80, 128, 256), CACHE_TYPES):
            view = BlockStore(CacheLayout(2, 1, size, kv_type=kind), 1).views[LAYER]
            for queries in (1, 3, 16, 20, 64, 4096):
                tile = tuning.tile_of(view, target, queries)
                assert launch.SPLIT % tile.rows == 0
                assert tile.queries >= 16
