"""Selection keeps exact counts, whatever scores and protection are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ullage_engine.policies import select

Case = tuple[torch.Tensor, torch.Tensor, int, int]


@st.composite
def cases(draw: DrawFn) -> Case:
    layers, heads, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    number = layers * heads * rows
    scores = draw(st.lists(st.sampled_from([-2.0, 0.0, 0.0, 0.5, 1.0, 7.0]), min_size=number, max_size=number))
    candidates = draw(st.lists(st.booleans(), min_size=number, max_size=number))
    shape = (layers, heads, rows)
    count, floor = draw(st.integers(-1, number + 1)), draw(st.integers(0, rows + 1))
    return torch.tensor(scores).view(shape), torch.tensor(candidates).view(shape), count, floor


@given(cases())
def test_exactly_as_many_as_asked_and_only_candidates(case: Case) -> None:
    scores, candidates, count, floor = case
    keep = select(scores, candidates, count, floor)
    assert keep.sum() == max(0, min(count, int(candidates.sum())))
    assert not (keep & ~candidates).any()


@given(cases())
def test_every_head_keeps_its_floor_as_far_as_the_budget_goes(case: Case) -> None:
    scores, candidates, count, floor = case
    keep = select(scores, candidates, count, floor)
    heads = scores.shape[0] * scores.shape[1]
    reachable = min(floor, max(0, min(count, int(candidates.sum()))) // heads)
    assert (keep.sum(-1) >= candidates.sum(-1).clamp_max(reachable)).all()


@given(cases())
def test_without_a_floor_the_best_of_all_heads_stay(case: Case) -> None:
    scores, candidates, count, _ = case
    keep = select(scores, candidates, count)
    gone = candidates & ~keep
    if keep.any() and gone.any():
        assert scores[keep].min() >= scores[gone].max()


@given(cases())
def test_within_a_head_the_best_stay_floor_or_not(case: Case) -> None:
    scores, candidates, count, floor = case
    keep = select(scores, candidates, count, floor)
    for score, kept, there in zip(scores.flatten(0, 1), keep.flatten(0, 1), candidates.flatten(0, 1), strict=True):
        gone = there & ~kept
        if kept.any() and gone.any():
            assert score[kept].min() >= score[gone].max()


def test_of_equals_the_later_stay() -> None:
    keep = select(torch.zeros(1, 2, 4), torch.ones(1, 2, 4, dtype=torch.bool), 4, floor=1)
    assert keep.tolist() == [[[False, False, False, True], [False, True, True, True]]]


def test_a_budget_of_everything_keeps_everything() -> None:
    candidates = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(select(scores, candidates, int(candidates.sum())), candidates)
