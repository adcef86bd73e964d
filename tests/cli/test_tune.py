"""`ullage tune`: block sizes against counting by hand, KL against the whole distribution, advice, a small engine."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters.base import Reading
from ullage_agent.histogram import Histogram
from ullage_agent.wire import EngineIdentity, Snapshot
from ullage_cli.commands import run
from ullage_cli.errors import BrokenLoop, InputError
from ullage_cli.replay.data import Moment, Recording
from ullage_cli.tune import advice, measure
from ullage_cli.tune.lengths import Mix, SizeCost, advised, cost, from_means, from_recording, points
from ullage_cli.tune.measure import Candidate, Measured, groups
from ullage_cli.tune.quality import Quality, compare, divergence

TARGET = 0.01


@given(prompt=st.integers(1, 80), answer=st.integers(0, 80), size=st.sampled_from([8, 16, 32]))
def test_the_waste_is_what_counting_gives(prompt: int, answer: int, size: int) -> None:
    held = sum(prompt + step for step in range(answer + 1))
    allocated = sum(size * math.ceil((prompt + step) / size) for step in range(answer + 1))
    found = cost(Mix(prompts=(prompt,), answers=(answer,), source=""), size)
    assert found.waste == pytest.approx(1 - held / allocated)
    assert found.blocks == pytest.approx(allocated / size / (answer + 1))


def test_the_largest_size_that_wastes_hardly_more_is_advised() -> None:
    def sizes(*waste: float) -> list[SizeCost]:
        return [SizeCost(tokens=8 << i, waste=w, blocks=1.0, lost_prefix=0.0) for i, w in enumerate(waste)]

    assert advised(sizes(0.01, 0.018, 0.04)).tokens == 16
    assert advised(sizes(0.001, 0.002, 0.004)).tokens == 32
    assert advised(sizes(0.10, 0.18, 0.30)).tokens == 8


def test_long_sequences_take_large_blocks_and_short_ones_small() -> None:
    def best(prompt: int, answer: int) -> int:
        return advised([cost(from_means(prompt, answer), size) for size in (8, 16, 32)]).tokens

    assert best(8000, 1000) == 32
    assert best(30, 20) == 8


def recording(first: dict[str, int], last: dict[str, int], **histograms: Histogram) -> Recording:
    def moment(at: float, counters: dict[str, int], found: dict[str, Histogram]) -> Moment:
        reading = Reading(
            snapshot=Snapshot(sampled_at=at, **counters),  # type: ignore[arg-type]
            identity=EngineIdentity(type="x", instance="i"),
            histograms=found,
        )
        return Moment(at=at, wall=at, reading=reading)

    return Recording(source="here", moments=(moment(0.0, first, {}), moment(60.0, last, histograms)))


def test_lengths_come_from_histograms_where_there_are_any() -> None:
    buckets = Histogram(((100.0, 10.0), (200.0, 40.0), (math.inf, 40.0)))
    mix = from_recording(recording({}, {}, prompt_tokens=buckets, answer_tokens=buckets))
    assert mix.prompts == points(buckets)
    assert min(mix.prompts) < 100 < max(mix.prompts) <= 200
    assert mix.source == "40 requests of here"


def test_lengths_come_from_counters_else() -> None:
    zero = {"finished_total": 0, "prompt_tokens_total": 0, "generated_tokens_total": 0, "prefix_query_tokens_total": 0,
            "prefix_hit_tokens_total": 0}  # fmt: skip
    later = {"finished_total": 50, "prompt_tokens_total": 5000, "generated_tokens_total": 2500,
             "prefix_query_tokens_total": 5000, "prefix_hit_tokens_total": 1000}  # fmt: skip
    mix = from_recording(recording(zero, later))
    assert sum(mix.prompts) / len(mix.prompts) == pytest.approx(100, rel=0.02)
    assert sum(mix.answers) / len(mix.answers) == pytest.approx(50, rel=0.02)
    assert mix.hit_ratio == 0.2


def test_too_few_requests_teach_nothing() -> None:
    with pytest.raises(InputError, match="shows 3 ended requests"):
        from_recording(recording({"finished_total": 0}, {"finished_total": 3}))


def logs(*shares: float) -> dict[str, float]:
    return {str(index): math.log(share) for index, share in enumerate(shares)}


def test_equal_predictions_are_no_distance_apart() -> None:
    assert divergence(logs(0.6, 0.3), logs(0.6, 0.3)) == pytest.approx(0.0, abs=1e-12)


@given(st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6), st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6))
def test_the_figure_is_at_most_the_whole_distributions(first: list[float], second: list[float]) -> None:
    p, q = ([x / sum(xs) for x in xs] for xs in (first, second))
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def top(shares: list[float]) -> dict[str, float]:
        likeliest = sorted(range(6), key=lambda i: -shares[i])[:4]
        return {str(i): math.log(shares[i]) for i in likeliest}

    assert divergence(top(p), top(q)) <= whole + 1e-9


def test_the_whole_distribution_gives_the_whole_figure() -> None:
    p, q = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert divergence(logs(*p), logs(*q)) == pytest.approx(whole, abs=1e-9)


def test_positions_are_summed_up() -> None:
    found = compare([logs(0.9, 0.1), logs(0.6, 0.4)], [logs(0.9, 0.1), logs(0.4, 0.6)])
    assert (found.positions, found.top1) == (2, 0.5)
    assert found.worst == pytest.approx(2 * found.kl)


def cache(kind: str, size: float, kl: float, kept: tuple[int, ...] = ()) -> Measured:
    quality = Quality(kl=kl, worst=kl, top1=1.0, positions=8)
    return Measured(candidate=Candidate(kind=kind, kept_layers=kept), token_bytes=size, quality=quality)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([cache("fp8", 100, 0.002), cache("int8", 100, 0.001)], "int8"),
        ([cache("fp8", 100, 0.02), cache("int8", 100, 0.03)], "bf16"),
        ([cache("fp8", 100, 0.02), cache("fp8", 130, 0.005, (0, 1))], "fp8"),
        ([cache("fp8", 190, 0.001)], "bf16"),
    ],
)
def test_the_smallest_cache_within_the_target_is_advised(found: list[Measured], expected: str) -> None:
    document = advice.as_dict(None, [], 200.0, found, TARGET)
    assert document["type"] == expected
    assert f"type: {expected}" in advice.type_text(200.0, found, TARGET)


def test_kept_layers_are_told_as_the_engine_takes_them() -> None:
    text = advice.type_text(200.0, [cache("fp8", 130, 0.005, (0, 1))], TARGET)
    assert "extraArgs: [--kv-bf16-layers=0,1]" in text
    assert "fp8, layers 0-1 in bf16" in text


def test_groups_cover_all_layers_once() -> None:
    for layers, count in ((30, 3), (7, 4), (8, 8)):
        found = groups(layers, count)
        assert [layer for group in found for layer in group] == list(range(layers))


@pytest.fixture
async def engine() -> AsyncIterator[Callable[..., Any]]:
    """A server with a tokenizer of one token a character, whose prediction depends on the prompt's length."""
    runners: list[web.AppRunner] = []
    sessions: list[aiohttp.ClientSession] = []

    async def make(*, status: int = 200) -> tuple[aiohttp.ClientSession, str, list[list[int]]]:
        asked: list[list[int]] = []

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "tiny"}]})

        async def tokenize(request: web.Request) -> web.Response:
            return web.json_response({"tokens": [ord(c) for c in (await request.json())["prompt"]]})

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text="ullage_engine_kv_block_bytes 1600\nullage_engine_kv_block_tokens 16\n")

        async def complete(request: web.Request) -> web.Response:
            prompts = (await request.json())["prompt"]
            asked.extend(prompts)
            choices = [
                {"index": i, "logprobs": {"top_logprobs": [{str(len(prompt)): -0.1}]}}
                for i, prompt in enumerate(prompts)
            ]
            return web.json_response({"choices": choices[::-1]}, status=status)  # order is not promised

        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/tokenize", tokenize), web.get("/metrics", metrics),
                        web.post("/v1/completions", complete)])  # fmt: skip
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        sessions.append(aiohttp.ClientSession())
        return sessions[-1], f"http://127.0.0.1:{runners[-1].addresses[0][1]}", asked

    yield make
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


async def test_predictions_come_in_the_order_of_their_places(engine: Callable[..., Any]) -> None:
    http, url, asked = await engine()
    size, found = await measure.predictions(http, url, "x" * 500, 10)
    assert size == 100.0
    places = [measure.FIRST + measure.STRIDE * i for i in range(10)]
    assert [list(prediction) for prediction in found] == [[str(place)] for place in places]
    assert [len(prompt) for prompt in asked] == places


async def test_a_short_text_is_refused(engine: Callable[..., Any]) -> None:
    http, url, _ = await engine()
    with pytest.raises(InputError, match="has 100 tokens"):
        await measure.predictions(http, url, "x" * 100, 10)


async def test_an_engine_that_refuses_is_said(engine: Callable[..., Any]) -> None:
    http, url, _ = await engine(status=400)
    with pytest.raises(BrokenLoop, match="HTTP 400"):
        await measure.predictions(http, url, "x" * 500, 4)


def test_the_default_text_is_long_enough_and_files_are_read(tmp_path: Path) -> None:
    assert len(measure.read_text(None)) == 20_000
    (tmp_path / "t.txt").write_text("words")
    assert measure.read_text(tmp_path / "t.txt") == "words"
    with pytest.raises(InputError, match="--text"):
        measure.read_text(tmp_path / "none")


def test_block_size_by_means_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--prompt-tokens", "300", "--answer-tokens", "200"]) == 0
    assert "blockSize: 16" in capsys.readouterr().out
    assert run(["tune", "--prompt-tokens", "300", "--answer-tokens", "200", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["blockSize"] == 16


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "RECORDING: none"),
        (["--prompt-tokens", "3"], "give both"),
        (["--measure", "x.yaml", "--types", "fp4"], "--types"),
        (["--measure", "x.yaml", "--layers", "2"], "--layers"),
        (["--measure", "x.yaml"], "x.yaml"),
    ],
)
def test_bad_input_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and complaint in said
