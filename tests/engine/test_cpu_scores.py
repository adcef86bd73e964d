"""The compiled scores of keys against torch's: `policies.mass.attention` is the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.policies import Queries, mass
from ullage_engine.policies.base import Mode
from ullage_engine.policies.mass import Keys, Rule
from ullage_engine.runner import ModelRunner
from ullage_engine.store import BlockStore

MODES: tuple[Mode, ...] = ("square", "sum", "entropy")


def scene(
    steps: int, heads: int, group: int, rows: int, size: int, seed: int, *, missing: float = 0.0, ordered: bool = False
) -> tuple[Queries, Keys]:
    """Random queries and keys; of missing rows keys are NaN and positions anything.

    Queries are strided as the engine has them. In order, the last query is at the last row; else some of both are
    anywhere, and some queries come before all keys.
    """
    generator = torch.Generator().manual_seed(seed)
    vectors = 1.5 * torch.randn((heads * group, steps, size), generator=generator).transpose(0, 1)
    keys = 1.5 * torch.randn((heads, rows, size), generator=generator)
    exists = torch.rand((heads, rows), generator=generator) >= missing
    if ordered:
        at, positions = torch.arange(rows - steps, rows), torch.arange(rows).expand(heads, rows)
    else:
        at = torch.randint(-5, rows + 5, (steps,), generator=generator)
        positions = torch.stack([torch.randperm(rows, generator=generator) for _ in range(heads)])
    positions = positions.where(exists, -7 if seed % 2 else 1 << 20)
    keys[~exists] = math.nan
    return Queries(vectors, at), Keys(keys, positions, exists)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agree(ours: torch.Tensor, torchs: torch.Tensor, steps: int) -> None:
    # logits of up to some 30 are rounded in float32, in another order: 3e-6 each way
    assert torch.allclose(ours, torchs, rtol=3e-5, atol=1e-6 * math.sqrt(steps)), (ours - torchs).abs().max()


@settings(max_examples=150)
@given(
    steps=st.integers(1, 70),
    heads=st.integers(1, 3),
    group=st.sampled_from((1, 3, 8)),
    rows=st.integers(1, 130),
    size=st.sampled_from((32, 64, 80, 128, 256)),
    missing=st.sampled_from((0.0, 0.3, 1.0)),
    ordered=st.booleans(),
    window=st.sampled_from((None, 1, 9, 100)),
    softcap=st.sampled_from((None, 0.5, 20.0)),
    mode=st.sampled_from(MODES),
    whole=st.booleans(),
    seed=st.integers(0, 999),
)
def test_scores_are_torchs(cpu_kernels: CpuKernels, **drawn: Any) -> None:
    """With the log-sum-exp of these keys (`whole`), or of them and others that are not given."""
    steps, size, seed = drawn["steps"], drawn["size"], drawn["seed"]
    drawn["rows"] = max(drawn["rows"], steps if drawn["ordered"] else 1)
    shape = (steps, drawn["heads"], drawn["group"], drawn["rows"], size, seed)
    queries, keys = scene(*shape, missing=drawn["missing"], ordered=drawn["ordered"])
    rule = Rule(scaling=size**-0.5, window=drawn["window"], softcap=drawn["softcap"])
    lse = None
    if not drawn["whole"]:
        generator = torch.Generator().manual_seed(seed + 1)
        lse = mass.log_sum_exp(queries, keys, rule)
        lse = lse + 3 * torch.rand(lse.shape, generator=generator)
    wanted = mass.attention(queries, keys, lse, drawn["mode"], rule)
    found = []
    for count in (1, 2):
        with threads(count):
            found.append(cpu_kernels.attention(queries, keys, lse, drawn["mode"], rule))
    assert torch.equal(*found)
    agree(found[0], wanted, steps * drawn["group"])
    assert not found[0][~keys.exists].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [64, 96])
def test_a_long_reading_is_torchs_whatever_the_threads(cpu_kernels: CpuKernels, mode: Mode, size: int) -> None:
    """More tiles than one part, and more parts than one, of a context that all queries but the last ones see whole."""
    queries, keys = scene(500, 2, 5, 1303, size, seed=4, missing=0.02, ordered=True)
    rule = Rule(scaling=size**-0.5)
    with threads(1):
        one = cpu_kernels.attention(queries, keys, None, mode, rule)
    with threads(2):
        assert torch.equal(cpu_kernels.attention(queries, keys, None, mode, rule), one)
    agree(one, mass.attention(queries, keys, None, mode, rule), 500)
    if mode == "sum":
        assert torch.allclose(one.sum(-1), torch.tensor(500.0)), "each query gives away 1 in all"


def test_exponentials_are_exact_to_a_millionth(cpu_kernels: CpuKernels) -> None:
    exponents = torch.linspace(-86.9, 0.0, 20_011)
    shape = (1, exponents.numel())
    keys = Keys(exponents.view(1, -1, 1), torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool))
    queries = Queries(torch.ones(1, 1, 1), torch.tensor([0]))
    found = cpu_kernels.attention(queries, keys, torch.zeros(1, 1), "sum", Rule(scaling=1.0))
    wanted = exponents.double().exp()
    assert ((found[0] - wanted).abs() / wanted).max() < 1e-6


@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_capped_logits_are_exact(cpu_kernels: CpuKernels, softcap: float) -> None:
    """To a millionth of a small one, and to float32's rounding of a large one: p = e^(logit - 2 softcap)."""
    logits = torch.cat([torch.linspace(-200.0, 200.0, 4001), torch.tensor([1e-30, -1e-4, 0.0, 1e30, -1e30])])
    shape = (1, logits.numel())
    keys = Keys(logits.view(1, -1, 1), torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool))
    queries = Queries(torch.ones(1, 1, 1), torch.tensor([0]))
    shift = min(2 * softcap, 30.0) if softcap == 1.0 else softcap
    found = cpu_kernels.attention(
        queries, keys, torch.full((1, 1), shift), "sum", Rule(scaling=1.0, softcap=softcap)
    )  # fmt: skip
    capped = softcap * (logits.double() / softcap).tanh()
    seen = capped - shift > -86
    wanted = (capped - shift).exp()
    assert ((found[0] - wanted).abs() / wanted)[seen].max() < 2e-7 * max(8.0, 2 * softcap)


def test_rows_after_the_last_query_are_not_looked_at(cpu_kernels: CpuKernels) -> None:
    """Nor what is out of every window: NaN there would spread in torch's product too, were it not masked."""
    queries, keys = scene(8, 1, 3, 400, 64, seed=1, ordered=True)
    early = Queries(queries.vectors, queries.positions - 200)
    keys.vectors[:, 200:] = math.inf
    keys.vectors[:, :100] = -math.inf
    for lse in (None, torch.full((8, 3), 30.0)):
        found = cpu_kernels.attention(early, keys, lse, "sum", Rule(scaling=0.1, window=60))
        assert found.isfinite().all()
        assert not found[:, 200:].any()
        assert not found[:, :130].any()


def test_a_query_that_saw_nothing_gives_nothing(cpu_kernels: CpuKernels) -> None:
    queries, keys = scene(5, 2, 3, 40, 32, seed=0, ordered=True)
    early = Queries(queries.vectors, queries.positions - 100)
    for mode in MODES:
        for lse in (None, torch.full((5, 6), -math.inf)):
            assert not cpu_kernels.attention(early, keys, lse, mode, Rule(scaling=0.2)).any()


def test_no_queries_and_no_rows_are_no_scores(cpu_kernels: CpuKernels) -> None:
    queries, keys = scene(4, 2, 3, 16, 32, seed=0, ordered=True)
    none = Queries(queries.vectors[:0], queries.positions[:0])
    assert torch.equal(cpu_kernels.attention(none, keys, None, "sum", Rule(scaling=1.0)), torch.zeros(2, 16))
    empty = Keys(keys.vectors[:, :0], keys.positions[:, :0], keys.exists[:, :0])
    assert cpu_kernels.attention(queries, empty, None, "sum", Rule(scaling=1.0)).shape == (2, 0)


def test_a_fault_of_the_model_stays_visible(cpu_kernels: CpuKernels) -> None:
    queries, keys = scene(3, 1, 1, 16, 32, seed=0, ordered=True)
    keys.vectors[0, 4, 3] = math.nan
    assert cpu_kernels.attention(queries, keys, None, "square", Rule(scaling=1.0)).isnan().any()


def test_arguments_that_would_be_read_past_their_end_are_refused(cpu_kernels: CpuKernels) -> None:
    queries, keys = scene(4, 2, 3, 16, 32, seed=0, ordered=True)

    def score(queries: Queries, keys: Keys, lse: torch.Tensor | None = None) -> None:
        cpu_kernels.attention(queries, keys, lse, "sum", Rule(scaling=1.0))

    with pytest.raises(ValueError, match="queries must be of 32 numbers"):
        score(Queries(queries.vectors[..., :16], queries.positions), keys)
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        score(Queries(queries.vectors[:, :5], queries.positions), keys)
    with pytest.raises(ValueError, match="queries' positions must be"):
        score(Queries(queries.vectors, queries.positions[:3]), keys)
    with pytest.raises(ValueError, match="keys' positions must be"):
        score(queries, Keys(keys.vectors, keys.positions[:, :9], keys.exists))
    with pytest.raises(ValueError, match="exists must be"):
        score(queries, Keys(keys.vectors, keys.positions, keys.exists.int()))
    with pytest.raises(ValueError, match="lse must be"):
        score(queries, keys, torch.zeros(4, 5))


def test_what_watches_a_rereading_is_scored_by_the_store_s_kernels(cpu_kernels: CpuKernels) -> None:
    def computes(store: BlockStore) -> mass.Attention:
        return ModelRunner(None, store, torch.device("cpu")).attention

    layout = CacheLayout(1, 2, 32)
    assert computes(BlockStore(layout, 1, "cpu", None, cpu_kernels)) == cpu_kernels.attention
    assert computes(BlockStore(layout, 1, "cpu", None, "torch")) is mass.attention
