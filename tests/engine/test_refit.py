"""Values fitted to what heads put out before a cut."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.policies import refit as module
from ullage_engine.policies.base import Queries
from ullage_engine.policies.mass import Keys, Rule, visible_logits
from ullage_engine.policies.refit import Part, Sample, refit

SIZE = 8


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Queries, Keys, torch.Tensor, Part, Rule]:
    seed, heads, group = draw(st.integers(0, 999)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 3]))
    steps, rows = draw(st.sampled_from([1, 5, 40])), draw(st.sampled_from([1, 9, 60]))
    generator = torch.Generator().manual_seed(seed)
    first = draw(st.sampled_from([0, rows // 2, rows]))
    queries = Queries(
        torch.randn(steps, heads * group, SIZE, generator=generator) * 2, torch.arange(first, first + steps)
    )
    exists = torch.rand(heads, rows, generator=generator) < draw(st.sampled_from([0.0, 0.8, 1.0]))
    positions = torch.stack([torch.randperm(rows, generator=generator) for _ in range(heads)]).int()
    keys = Keys(torch.randn(heads, rows, SIZE, generator=generator), positions, exists)
    values = torch.randn(heads, rows, SIZE, generator=generator) * 10
    stays = exists & (torch.rand(heads, rows, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0])))
    free = stays & (torch.rand(heads, rows, generator=generator) < 0.8)
    rule = Rule(scaling=0.4, window=draw(st.sampled_from([None, 4])), softcap=draw(st.sampled_from([None, 5.0])))
    return queries, keys, values, Part(stays, free), rule


def outputs(queries: Queries, keys: Keys, values: torch.Tensor, there: torch.Tensor, head: int, rule: Rule) -> Any:
    logits = visible_logits(queries, keys, head, rule).masked_fill(~there[head], float("-inf"))
    return logits.softmax(-1).nan_to_num(0.0) @ values[head]


@settings(max_examples=200)
@given(scene=scenes())
def test_no_head_is_farther_from_what_it_put_out(scene: tuple[Queries, Keys, torch.Tensor, Part, Rule]) -> None:
    queries, keys, values, part, rule = scene
    before = values.clone()
    fitted = refit(queries, keys, values, part, rule)
    assert torch.equal(values, before), "what it was given is changed"
    assert torch.equal(fitted[~part.free], values[~part.free])
    assert fitted.isfinite().all()
    for head in range(values.shape[0]):
        wanted = outputs(queries, keys, values, keys.exists, head, rule)
        cut = (outputs(queries, keys, values, part.stays, head, rule) - wanted).norm()
        mended = (outputs(queries, keys, fitted, part.stays, head, rule) - wanted).norm()
        assert mended <= cut * (1 + 1e-4) + 1e-3


def test_nothing_dropped_nothing_changed() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = Queries(torch.randn(30, 6, SIZE, generator=generator), torch.arange(20, 50))
    every = torch.ones(2, 20, dtype=torch.bool)
    keys = Keys(torch.randn(2, 20, SIZE, generator=generator), torch.arange(20).expand(2, 20), every)
    values = torch.randn(2, 20, SIZE, generator=generator)
    assert torch.allclose(refit(queries, keys, values, Part(every, every), Rule(scaling=0.3)), values, atol=1e-5)


def test_a_row_takes_over_what_its_twin_said() -> None:
    """Two rows with the same key share every query's attention: the one that stays has to say the mean of both."""
    keys = Keys(torch.ones(1, 2, SIZE), torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
    values = torch.stack([torch.full((SIZE,), 1.0), torch.full((SIZE,), 5.0)])[None]
    queries = Queries(torch.randn(50, 1, SIZE, generator=torch.Generator().manual_seed(1)), torch.arange(2, 52))
    stays = torch.tensor([[True, False]])
    fitted = refit(queries, keys, values, Part(stays, stays), Rule(scaling=0.3))
    assert torch.allclose(fitted[0, 0], torch.tensor(3.0), atol=0.01)
    assert torch.equal(fitted[0, 1], values[0, 1])


def test_nothing_was_noted() -> None:
    assert Sample(10, 1).of(0) is None


def test_what_queries_sample_does_not_depend_on_the_steps_they_came_in() -> None:
    context, heads = 2000, 3
    vectors = torch.randn(context, 9, SIZE, generator=torch.Generator().manual_seed(2))
    rule, found = Rule(scaling=1.0), []
    for step in (context, 512, 7):
        sample = Sample(context, heads)
        for first in range(0, context, step):
            positions = torch.arange(context + first, context + min(first + step, context))
            sample.take(4, Queries(vectors[first : first + step], positions), rule)
        queries, kept = sample.of(4)
        assert kept == rule
        assert module.VECTORS <= queries.vectors.shape[0] * 3 < module.VECTORS * 1.5
        assert torch.equal(queries.vectors, vectors[queries.positions - context])
        found.append(queries.positions)
    assert all(torch.equal(positions, found[0]) for positions in found)
    assert found[0][-1] - found[0][0] > 0.98 * context
