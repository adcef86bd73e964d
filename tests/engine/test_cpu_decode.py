"""Compiled decode attention over blocks and cells, with its log-sum-exp and sinks, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import LAYER, block_tables, cell_tables, exact, filled_store
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.kernels.tables import BlockTables
from ullage_engine.layout import CacheLayout


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["fp8", "int8", "bf16", "fp32"]),
    shape=st.sampled_from([(64, None), (32, 16), (80, 80)]),
    heads=st.sampled_from([1, 3]),
    repeat=st.sampled_from([1, 3, 5]),
    size=st.sampled_from([8, 16]),
    cells=st.booleans(),
    window=st.sampled_from([None, 20]),
    softcap=st.sampled_from([None, 15.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_result_and_log_sum_exp_equal_float64(cpu_kernels: CpuKernels, **drawn: Any) -> None:
    """Tables are those of one layer among several, as evictions make them; some heads hold nothing."""
    layout = CacheLayout(2, drawn["heads"], drawn["shape"][0], drawn["size"], drawn["kind"], drawn["shape"][1])
    heads, width, window = layout.kv_heads * drawn["repeat"], layout.head_size, drawn["window"]
    tables: Any
    if drawn["cells"]:
        window = window and window * 300
        store = filled_store(layout, 3 * 30, drawn["seed"])
        lengths = [[0, 40, 17][: layout.kv_heads], [1, 0, 130][: layout.kv_heads]]
        found, held = cell_tables(store, lengths, torch.tensor([1, 0]), torch.tensor([10_000] * 2), seed=drawn["seed"])
        layers = {
            name: torch.stack([getattr(found, name)] * 2, 1)[:, 0] for name in ("offsets", "rows", "key_positions")
        }
        tables = replace(found, **layers)
    else:
        store, tables, held = block_tables(layout, [17, 130], seed=drawn["seed"], dropped=1)
        assert isinstance(tables, BlockTables)
        tables = replace(tables, at=tables.at.flip(0))
    sinks = torch.linspace(-1, 3, heads) if drawn["sinks"] else None
    query = torch.randn(3, heads, width, generator=torch.Generator().manual_seed(1)).to(drawn["dtype"])
    out, lse = torch.full((3, heads, width), torch.nan), torch.full((3, heads), torch.nan)
    rule = {"scaling": 0.1, "window": window, "softcap": drawn["softcap"], "sinks": sinks}
    cpu_kernels.decode(store.views[LAYER], tables, query, out, lse, **rule)
    for n, at in enumerate(tables.at.tolist()):
        wanted, logs, _ = exact(query[at], held[n], int(tables.positions[n]), **rule)
        # float32 sums: logits of up to 20 err by some 5e-6, and so does the share of values of up to 80
        assert torch.allclose(out[at].double(), wanted, rtol=1e-5, atol=5e-6 * 80)
        assert torch.allclose(lse[at].double(), logs, rtol=1e-5, atol=5e-6)
    assert out[2].isnan().all()
    assert lse[2].isnan().all()


def test_what_would_be_read_past_its_end_is_refused(cpu_kernels: CpuKernels) -> None:
    store, tables, _ = block_tables(CacheLayout(2, 2, 32), [5, 20])
    assert isinstance(tables, BlockTables)
    view, query = store.views[LAYER], torch.ones(2, 4, 32)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("tables must be", {"tables": replace(tables, tables=tables.tables.int())}),
        ("rows must be", {"tables": replace(tables, rows=tables.rows[:1])}),
        ("out must be", {"out": torch.empty(2, 4, 16)}),
        ("lse must be", {"lse": torch.empty(2, 3)}),
        ("sinks must be", {"sinks": torch.ones(4, dtype=torch.float64)}),
    ]
    for match, changed in bad:
        given_ = {"tables": tables, "out": torch.empty_like(query), **changed}
        with pytest.raises(ValueError, match=match):
            cpu_kernels.decode(view, query=query, scaling=1.0, **given_)
