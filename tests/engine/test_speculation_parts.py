"""The pure parts of speculation: what stands, what is drafted, how much."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.sampler import Row, distribution, draw, rows_of, sample
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.accept import judge
from ullage_engine.speculation.control import PROBE_AFTER, PROBE_PRICE, Costs, Pace
from ullage_engine.speculation.ngram import LONGEST, SHORTEST, NgramProposer, SuffixIndex

# -- acceptance ------------------------------------------------------------------------------------------------------

TARGET = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
DRAFT = torch.tensor([0.5, 2.0, -1.0, 1.0, -2.0, 0.0])
SAMPLINGS = {
    "plain": SamplingParams(max_tokens=1),
    "cold": SamplingParams(max_tokens=1, temperature=0.5),
    "nucleus": SamplingParams(max_tokens=1, temperature=1.3, top_p=0.85),
    "few": SamplingParams(max_tokens=1, top_p=0.5),
}
TRIALS = 4000


def row_of(logits: torch.Tensor) -> Row:
    return rows_of(logits.unsqueeze(0))[0]


def chi_square(found: Counter[int], wanted: torch.Tensor, trials: int) -> float:
    return sum((found[i] - trials * p) ** 2 / (trials * p) for i, p in enumerate(wanted.tolist()) if p > 0)


def critical(wanted: torch.Tensor) -> float:
    """Of chi-square at a chance of 1e-4, by Wilson and Hilferty; seeds are fixed, so that a pass stays one."""
    degrees = int((wanted > 0).sum()) - 1
    if degrees == 0:
        return 0.0
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_tokens_have_the_models_distribution_whatever_was_drafted(name: str, kind: str) -> None:
    params, generator = SAMPLINGS[name], torch.Generator().manual_seed(1)
    wanted, proposed = distribution(TARGET, params), distribution(DRAFT, params)
    row, found, stood = row_of(TARGET), Counter[int](), 0
    for _ in range(TRIALS):
        draft = draw(proposed, generator) if kind == "drawn" else 1
        verdict = judge(row, draft, proposed if kind == "drawn" else None, params, generator)
        assert verdict.chosen is not None
        assert verdict.accepted == (verdict.chosen.token == draft)
        found[verdict.chosen.token] += 1
        stood += verdict.accepted
    assert not any(found[i] for i, p in enumerate(wanted.tolist()) if p == 0)
    assert chi_square(found, wanted, TRIALS) <= critical(wanted)
    if kind == "drawn":
        overlap = float(torch.minimum(wanted, proposed).sum())
        assert abs(stood / TRIALS - overlap) < 4 * math.sqrt(0.25 / TRIALS), "fewer stand than could"


@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_runs_of_tokens_have_the_models_joint_distribution(kind: str) -> None:
    """Two positions and the one after, where what follows depends on what came before."""
    params, generator = SAMPLINGS["plain"], torch.Generator().manual_seed(2)
    follow = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))  # logits after each token; row 3: the first
    guess = torch.randn(4, 3, generator=torch.Generator().manual_seed(4))
    found: Counter[int] = Counter()
    for _ in range(TRIALS):
        drafts, odds, last = [], [], 3
        for _ in range(2):
            odds.append(distribution(guess[last], params))
            last = draw(odds[-1], generator) if kind == "drawn" else int(guess[last].argmax())
            drafts.append(last)
        run, last = [], 3
        for i in range(3):  # a rejected draft ends the run; the next ones are then drawn without drafts
            valid = i < 2 and run == drafts[:i]
            proposed = odds[i] if valid and kind == "drawn" else None
            verdict = judge(row_of(follow[last]), drafts[i] if valid else None, proposed, params, generator)
            assert verdict.chosen is not None
            last = verdict.chosen.token
            run.append(last)
        found[run[0] * 9 + run[1] * 3 + run[2]] += 1
    chances = follow.double().softmax(-1)
    wanted = torch.stack(
        [chances[3, a] * chances[a, b] * chances[b, c] for a in range(3) for b in range(3) for c in range(3)]
    )
    assert chi_square(found, wanted, TRIALS) <= critical(wanted)


def test_a_certain_draft_changes_neither_the_token_nor_the_random_numbers() -> None:
    for params in (*SAMPLINGS.values(), SamplingParams(max_tokens=1, temperature=0)):
        plain, drafted = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        for turn in range(50):
            wanted = sample(row_of(TARGET), params, plain)
            assert judge(row_of(TARGET), turn % 6, None, params, drafted).chosen == wanted


def test_log_probabilities_are_the_models_own() -> None:
    params = SamplingParams(max_tokens=1, logprobs=2)
    odds = distribution(DRAFT, params)
    verdict = judge(row_of(TARGET), 1, odds, params, torch.Generator().manual_seed(0))
    assert verdict.chosen is not None
    logprobs = TARGET.log_softmax(-1)
    assert verdict.chosen.logprob == float(logprobs[verdict.chosen.token])
    assert [token for token, _ in verdict.chosen.top] == [0, 1]


def test_equal_distributions_accept_and_unfit_logits_choose_nothing() -> None:
    params, generator = SAMPLINGS["nucleus"], torch.Generator().manual_seed(6)
    odds = distribution(TARGET, params)
    assert all(judge(row_of(TARGET), draw(odds, generator), odds, params, generator).accepted for _ in range(500))
    broken = row_of(torch.full((6,), float("nan")))
    assert judge(broken, 1, odds, params, generator).chosen is None
    assert judge(broken, 1, None, params, generator) == judge(broken, None, None, params, generator)


# -- n-grams ---------------------------------------------------------------------------------------------------------


def best_length(tokens: list[int]) -> int:
    """Longest agreement of the end with the end of any earlier place, by trying all."""
    lengths = [0]
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        lengths.append(length)
    return max(lengths)


@given(tokens=st.lists(st.integers(0, 2), max_size=60), cuts=st.lists(st.integers(1, 9), max_size=10))
@settings(max_examples=300)
def test_matches_are_real_and_the_longest_among_those_looked_at(tokens: list[int], cuts: list[int]) -> None:
    index, taken = SuffixIndex(), 0
    for cut in [*cuts, len(tokens)]:
        taken = min(len(tokens), taken + cut)
        index.extend(tokens[:taken])
        assert index.length == taken
    match = index.longest_match(tokens)
    best = best_length(tokens)
    assert (match is not None) == (best >= SHORTEST)
    if match is not None:
        earlier = tokens[match.end - match.length : match.end]
        assert earlier == tokens[len(tokens) - match.length :]
        assert SHORTEST <= match.length <= best
        assert match.end < len(tokens)


def test_the_longest_match_wins_over_the_latest() -> None:
    tokens = [1, 2, 3, 4, 5, 60, 9, 9, 3, 4, 5, 70, 8, 8, 1, 2, 3, 4, 5]
    index = SuffixIndex()
    index.extend(tokens)
    match = index.longest_match(tokens)
    assert match is not None
    assert (match.end, match.length) == (5, 5)


def drafted(tokens: list[int], count: int) -> tuple[int, ...]:
    request = GenerationRequest(request_id="r", prompt=(0,), sampling=SamplingParams(max_tokens=9))
    sequence = Sequence(request, lambda output: None, 0, tokens, 16)
    proposed = NgramProposer().propose({sequence: count})
    return proposed[sequence].tokens if sequence in proposed else ()


def test_what_followed_is_drafted() -> None:
    assert drafted([5, 6, 7, 8, 9, 1, 5, 6, 7], 2) == (8, 9)
    assert drafted([5, 6, 7, 8, 9, 1, 4, 6, 7], 2) == ()
    assert drafted([1, 2], 4) == ()
    assert drafted([], 4) == ()


def test_a_run_that_reaches_the_end_goes_on_as_its_period() -> None:
    assert drafted([3, 3, 3, 3], 4) == (3, 3, 3, 3)
    assert drafted([1, 2, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def test_an_ended_sequence_is_forgotten() -> None:
    request = GenerationRequest(request_id="r", prompt=(0,), sampling=SamplingParams(max_tokens=9))
    sequence = Sequence(request, lambda output: None, 0, [1, 1, 1, 1], 16)
    proposer = NgramProposer()
    proposer.propose({sequence: 1})
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert not proposer._indexes


# -- how much --------------------------------------------------------------------------------------------------------


def test_a_draft_is_as_long_as_its_last_token_is_worth() -> None:
    pace = Pace(rate=0.5)
    assert [pace.length(price, 8) for price in (0.6, 0.5, 0.3, 0.25, 0.2, 0.1)] == [0, 0, 1, 1, 2, 3]
    assert Pace(rate=0.99).length(0.1, 8) == 8


def test_prices_rise_with_the_batch_until_nothing_is_drafted() -> None:
    costs = Costs(row=0.05)
    prices = [costs.price(rows, 0, 0) for rows in (1, 4, 16, 64, 512)]
    assert prices == sorted(prices)
    assert prices[0] < 0.05
    lengths = [Pace(rate=0.8).length(price, 8) for price in prices]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8
    assert lengths[-1] == 0
    assert Costs(row=0.05, draft=0.5).price(1, 0, 0) > 0.5
    assert Costs(row=0.05, cached=0.001).price(1, 2000, 2000) > 0.6, "each drafted row reads the whole context"
    assert Costs(row=0.05, cached=0.001).price(2, 2010, 10) < 0.1, "a short sequence beside a long one drafts cheaply"


def test_rates_follow_what_stood() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe(4, 0)
    assert pace.length(0.1, 8) == 0
    for _ in range(20):
        pace.observe(4, 4)
    assert pace.length(0.1, 8) == 8


def test_a_hopeless_sequence_is_tried_again_now_and_then_but_not_under_load() -> None:
    pace = Pace(rate=0.01)
    lengths = [pace.length(0.2, 8) for _ in range(4 * (PROBE_AFTER + 1))]
    assert lengths.count(1) == 4
    assert lengths.count(0) == 4 * PROBE_AFTER
    assert not any(pace.length(PROBE_PRICE, 8) for _ in range(4 * PROBE_AFTER))


def test_costs_of_a_machine_are_told_by_a_clock(smallest: Any) -> None:
    from ullage_engine.speculation.assemble import REPEATS, ROWS, measure_costs

    # ten fixed, one for each row and half a one for each cached token that it reads; the draft's pass is as long
    context = 2 * 8 - ROWS
    steps = [10 + rows * (1 + 0.5 * cached) for cached in (0, context) for rows in (1, ROWS)] + [3.0]
    disturbed = [seconds + 7 for seconds in steps]
    durations = iter([*disturbed, *steps * (REPEATS - 1)])
    now, running = 0.0, False

    def clock() -> float:
        nonlocal now, running
        now += next(durations) if running else 0.0
        running = not running
        return now

    costs = measure_costs(smallest, smallest, clock)
    assert (costs.row, costs.cached, costs.draft) == pytest.approx((0.1, 0.05, 0.3))


def test_rows_never_seem_free(smallest: Any) -> None:
    from ullage_engine.speculation.assemble import LEAST_ROW, measure_costs

    ticks = itertools.count()
    costs = measure_costs(smallest, None, lambda: float(next(ticks)))  # every step takes a second, however many rows
    assert (costs.row, costs.cached, costs.draft) == (LEAST_ROW, 0.0, 0.0)


@pytest.fixture
def smallest() -> Any:
    from ullage_engine.layout import CacheLayout
    from ullage_engine.store import BlockStore

    class Instant:
        store = BlockStore(CacheLayout(1, 1, 8, 8), 2)

        def forward(self, chunks: Any) -> torch.Tensor:
            assert sum(chunk.width for chunk in chunks) <= 16
            return torch.zeros(16, 4)

    return Instant()
