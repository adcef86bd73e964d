"""Eviction policies: their maths against brute force, and that each is a policy of its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from ullage_engine.policies import DEFAULT, NAMES, Needs, Queries, make, mass, select
from ullage_engine.policies.base import Mode
from ullage_engine.policies.expected import Expected, rotations
from ullage_engine.policies.mass import Keys, Rule
from ullage_engine.policies.reread import Rereading, readings
from ullage_engine.policies.view import TensorView

LAYERS, HEADS, GROUP, SIZE = 2, 3, 2, 8


def drawn(rows: int, queries: int, seed: int = 0, *, rule: Rule | None = None) -> TensorView:
    """A sequence of random rows; of each head another one is missing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    exists = torch.ones(LAYERS, HEADS, rows, dtype=torch.bool)
    for head in range(HEADS):
        exists[:, head, (5 * head + 3) % rows] = False
    at = torch.arange(rows - queries, rows)
    observed = [Queries(2 * normal(queries, HEADS * GROUP, SIZE), at) for _ in range(LAYERS)]
    return TensorView(
        all_keys=[2 * normal(HEADS, rows, SIZE) for _ in range(LAYERS)],
        all_values=[normal(HEADS, rows, SIZE) for _ in range(LAYERS)],
        positions=torch.arange(rows).expand(LAYERS, HEADS, rows),
        exists=exists,
        length=rows,
        rule=rule or Rule(scaling=0.3),
        observed=observed,
        rereading=torch.rand(LAYERS, HEADS, rows, generator=generator),
    )


def chances(view: TensorView, layer: int) -> list[list[dict[int, float]]]:
    """p[query][query head][row] by the definition, one number at a time in double precision."""
    rule, observed = view.rule, view.observed[layer]
    result = []
    for vector, at in zip(observed.vectors.double(), observed.positions.tolist(), strict=True):
        of_heads = []
        for query_head in range(HEADS * GROUP):
            head = query_head // GROUP
            logits = {}
            for row in range(view.exists.shape[-1]):
                distance = at - int(view.positions[layer, head, row])
                if not view.exists[layer, head, row] or distance < 0 or (rule.window and distance >= rule.window):
                    continue
                logit = float(vector[query_head] @ view.all_keys[layer][head, row].double()) * rule.scaling
                logits[row] = rule.softcap * math.tanh(logit / rule.softcap) if rule.softcap else logit
            total = sum(math.exp(logit) for logit in logits.values())
            of_heads.append({row: math.exp(logit) / total for row, logit in logits.items()})
        result.append(of_heads)
    return result


RULES = [Rule(scaling=0.3), Rule(scaling=1.5, softcap=4.0), Rule(scaling=0.3, window=6)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("mode", ["square", "sum", "entropy"])
@pytest.mark.parametrize("tile", [1, 300, 1 << 22])
def test_attention_is_its_definition_whatever_the_tile(
    mode: Mode, rule: Rule, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mass, "TILE", tile)
    view = drawn(19, 7, rule=rule)
    wanted = torch.zeros(HEADS, 19, dtype=torch.float64)
    for query_head in range(HEADS * GROUP):
        found = torch.zeros(19, dtype=torch.float64)
        for of_heads in chances(view, 1):
            for row, p in of_heads[query_head].items():
                found[row] += {"square": p * p, "sum": p, "entropy": -p * math.log(p)}[mode]
        wanted[query_head // GROUP] += found / GROUP
    assert torch.allclose(view.attention(1, mode).double(), wanted, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_may_be_over_more_than_the_keys_given() -> None:
    """Two halves of the keys scored apart make the whole, as cells and blocks of one sequence do."""
    view = drawn(20, 4)
    keys = Keys(view.keys(0), view.positions[0], view.exists[0])
    lse = mass.log_sum_exp(view.observed[0], keys, view.rule)
    halves = [Keys(keys.vectors[:, at], keys.positions[:, at], keys.exists[:, at]) for at in (slice(9), slice(9, 20))]
    apart = torch.cat([mass.attention(view.observed[0], half, lse, "sum", view.rule) for half in halves], -1)
    assert torch.allclose(apart, view.attention(0, "sum"), atol=1e-6)
    assert torch.allclose(apart.sum(-1), torch.full((HEADS,), 4.0), atol=1e-5), "each query gives away 1 in all"


def test_a_query_that_sees_nothing_counts_for_nothing() -> None:
    view = drawn(12, 2)
    late = replace(view, positions=view.positions + 100)
    keys = Keys(late.keys(0), late.positions[0], late.exists[0])
    assert torch.equal(mass.log_sum_exp(late.observed[0], keys, late.rule), torch.full((2, 6), -math.inf))
    assert not late.attention(0, "sum").any()
    assert not late.attention(0, "entropy").any()
    assert not late.attention(0, "square").any()


def test_no_matrix_of_all_queries_and_keys_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass, "TILE", 6 * 64 * 3)
    view = drawn(64, 32)
    keys = Keys(view.keys(0), view.positions[0], view.exists[0])
    tiles = [tuple(logits.shape) for _, logits in mass._tiles(view.observed[0], keys, view.rule)]
    assert tiles == [(HEADS, GROUP, 3, 64)] * 10 + [(HEADS, GROUP, 2, 64)]


def test_entropy_drops_the_key_that_takes_everything() -> None:
    """Why it is not the default: -p log p is 0 at p = 1, and greatest at p = 1/e."""
    keys = torch.tensor([[[9.0, 0.0], [0.0, 1.0], [0.0, 0.9], [0.0, 0.8]]])
    view = TensorView(
        all_keys=[keys], all_values=[torch.ones(1, 4, 2)], positions=torch.arange(4).view(1, 1, 4),
        exists=torch.ones(1, 1, 4, dtype=torch.bool), length=9, rule=Rule(scaling=3.0),
        observed=[Queries(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([7, 8]))],
    )  # fmt: skip
    assert make("entropy", scaling=3.0).score(view).argmin() == 0
    assert make("window", scaling=3.0).score(replace(view, all_values=[keys])).argmax() == 0


def test_expected_attention_is_the_mean_over_normal_queries() -> None:
    """Against the mean of exp(q.k) over many queries drawn from the statistics of the observed ones."""
    view = drawn(6, 500, 3)
    view = replace(view, exists=torch.ones_like(view.exists), all_values=[torch.ones(HEADS, 6, SIZE)] * LAYERS)
    got = Expected(0.1, floor=0.0).score(view)[0, 0] / math.sqrt(SIZE)
    vectors = view.observed[0].vectors[:, :GROUP].double()
    wanted = torch.zeros(6, dtype=torch.float64)
    for head in range(GROUP):
        mean, covariance = vectors[:, head].mean(0), torch.cov(vectors[:, head].T)
        torch.manual_seed(0)
        drawn_queries = torch.distributions.MultivariateNormal(mean, covariance).sample((200_000,))
        mass_of_rows = (drawn_queries @ view.all_keys[0][0].double().T * 0.1).exp().mean(0)
        wanted += mass_of_rows / mass_of_rows.sum() / GROUP
    assert torch.allclose(got.double(), wanted, rtol=0.03)


def test_expected_turns_queries_to_where_they_will_be() -> None:
    """Queries that were one vector before rotation are that vector, rotated on, at the next position."""
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    base = torch.randn(HEADS * GROUP, SIZE, generator=torch.Generator().manual_seed(1))
    at = torch.arange(30, 37)
    vectors = torch.einsum("wde,he->whd", rotations(at[:, None] * frequencies.double(), SIZE), base)
    mean, covariance = Expected(1.0, horizon=1)._future(Queries(vectors, at), frequencies, 40)
    ahead = rotations(40 * frequencies.double()[None], SIZE)[0]
    assert torch.allclose(mean, base @ ahead.T, atol=1e-4)
    assert covariance.abs().max() < 1e-6


def test_rotations_turn_as_the_models_do() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    angles = torch.arange(5)[:, None] * frequencies
    vectors = torch.randn(1, 1, 5, SIZE, generator=torch.Generator().manual_seed(1))
    doubled = torch.cat([angles, angles], -1)[None]
    wanted, _ = apply_rotary_pos_emb(vectors, vectors, doubled.cos(), doubled.sin())
    got = torch.einsum("wde,we->wd", rotations(angles, SIZE), vectors[0, 0])
    assert torch.allclose(got, wanted[0, 0], atol=1e-6)


def test_readings_cover_the_context_once_and_watch_what_predicts_it() -> None:
    context, instruction = list(range(100, 121)), [7, 8, 9]
    passes = readings(context, instruction, chunk=8, cue=2)
    assert [list(p.tokens[p.observed + 1 :]) for p in passes] == [context[:8], context[8:16], context[16:]]
    assert passes[0].tokens[:3] == (7, 8, 9)
    assert passes[1].tokens[:6] == (7, 8, 9, 106, 107, 108)
    assert [p.observed for p in passes] == [2, 4, 4]


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunk": 4, "cue": -1}])
def test_readings_of_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="want 1, 1, 0"):
        readings([1, 2], [3], **wrong)
    with pytest.raises(ValueError, match="instruction of 0 tokens"):
        readings([1, 2], [], chunk=4)


def test_reconstruct_scores_what_dropping_a_row_does_to_heads_outputs() -> None:
    """To first order: each query's output moves by p times the value, and squares add up."""
    view = drawn(9, 4, rule=RULES[0])
    squares = torch.stack([view.attention(layer, "square") for layer in range(LAYERS)])
    scores = make("reconstruct", scaling=0.3).score(replace(view, rereading=squares))
    wanted = torch.zeros(HEADS, 9, dtype=torch.float64)
    for of_heads in chances(view, 1):
        for query_head, rows in enumerate(of_heads):
            for row, p in rows.items():
                moved = p * view.values(1)[query_head // GROUP, row].double()
                wanted[query_head // GROUP, row] += moved.square().sum() / GROUP
    assert torch.allclose(scores[1].double(), wanted, rtol=1e-5)


def test_rereading_adds_what_readings_give() -> None:
    rereading = Rereading(LAYERS, HEADS, 4)
    first, second = torch.rand(2, HEADS, 4, generator=torch.Generator().manual_seed(0))
    rereading.take(1, first)
    rereading.take(1, second)
    assert torch.equal(rereading.scores[1], first + second)
    assert not rereading.scores[0].any()
    assert rereading.nbytes == LAYERS * HEADS * 4 * 4


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_whole_and_leave_the_view_alone(name: str) -> None:
    view = drawn(21, 5)
    before = [tensor.clone() for tensor in (*view.all_keys, *view.all_values, view.positions, view.exists)]
    policy = make(name, scaling=0.3)
    scores = policy.score(view)
    assert scores.shape == view.exists.shape
    assert scores.dtype == torch.float32
    assert scores[view.exists].isfinite().all()
    assert policy.name == name
    after = (*view.all_keys, *view.all_values, view.positions, view.exists)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if make(name, scaling=1.0).needs is Needs.NOTHING])
def test_policies_that_need_nothing_look_at_nothing(name: str) -> None:
    bare = replace(drawn(9, 1), all_keys=(), all_values=(), observed=(), rereading=None)
    assert make(name, scaling=1.0).score(bare).shape == bare.exists.shape


def test_what_is_not_there_counts_for_nothing() -> None:
    """Rows that do not exist hold anything finite; the others' scores must not depend on it."""
    view = drawn(21, 5)
    filled = [
        torch.where(there.unsqueeze(-1), keys, 1e4) for keys, there in zip(view.all_keys, view.exists, strict=True)
    ]
    for name in NAMES:
        policy = make(name, scaling=0.3)
        one, other = policy.score(view), policy.score(replace(view, all_keys=filled))
        assert torch.allclose(one[view.exists], other[view.exists]), name


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="-".join)
def test_any_two_policies_keep_something_else(pair: tuple[str, str]) -> None:
    view = drawn(40, 8)
    one, other = (select(make(name, scaling=0.3).score(view), view.exists, 60) for name in pair)
    assert not torch.equal(one, other)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'lru' is not one of reconstruct, window"):
        make("lru", scaling=1.0)
    assert DEFAULT in NAMES
