"""`ullage plan --measure`: the times of tokens become a pace, and an engine's own words replace the formula."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from ullage_cli.errors import BrokenLoop, InputError
from ullage_cli.plan import measure
from ullage_cli.plan.asking import Asked, request_of
from ullage_cli.plan.engine_client import EngineClient, Facts, read_facts
from ullage_cli.plan.planning import Request

METRICS = """# TYPE ullage_engine_kv_block_bytes gauge
ullage_engine_kv_block_bytes 195840.0
ullage_engine_kv_block_tokens 16.0
ullage_engine_kv_blocks{state="free"} 200.0
ullage_engine_kv_blocks{state="active"} 14.0
"""


@pytest.fixture
def request_() -> Request:
    return request_of(Asked(model="smollm2-135m", context=1024, price=0.1), measured=True)


@pytest.fixture
async def engine() -> AsyncIterator[Callable[..., EngineClient]]:
    """Makes clients of a small server that streams as engines do."""
    sessions: list[aiohttp.ClientSession] = []
    runners: list[web.AppRunner] = []

    async def make(*, metrics: str = METRICS, failure: str | None = None) -> EngineClient:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "tiny"}]})

        async def told(_: web.Request) -> web.Response:
            return web.Response(text=metrics, status=200 if metrics else 404)

        async def complete(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            for _ in range(body["max_tokens"]):
                event = {"error": {"message": failure}} if failure else {"choices": [{"text": "x"}]}
                await reply.write(f"data: {json.dumps(event)}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
            return reply

        app = web.Application()
        app.add_routes(
            [web.get("/v1/models", models), web.get("/metrics", told), web.post("/v1/completions", complete)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        sessions.append(aiohttp.ClientSession())
        return EngineClient(sessions[-1], f"http://127.0.0.1:{port}")

    yield make
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


def test_a_step_gives_every_stream_a_token() -> None:
    # two streams of a token every 10 ms; the second begins 20 ms later and ends later
    first, second = [0.0, 0.01, 0.02, 0.03, 0.04], [0.02, 0.03, 0.04, 0.05, 0.06]
    assert measure.step_seconds([first, second]) == pytest.approx(0.01)


def test_streams_that_never_ran_together_say_nothing() -> None:
    assert measure.step_seconds([[0.0, 1.0], [2.0, 3.0]]) is None
    assert measure.step_seconds([[0.0]]) is None


def test_a_line_through_the_steps() -> None:
    pace = measure.line([(1, 0.011), (2, 0.012), (4, 0.014), (8, 0.018)])
    assert (pace.base, pace.each) == (pytest.approx(0.01), pytest.approx(0.001))


def test_neither_part_of_a_pace_is_below_zero() -> None:
    falling = measure.line([(1, 0.02), (8, 0.01)])
    assert falling.each == 0.0 and falling.base == pytest.approx(0.015)
    steep = measure.line([(1, 0.001), (8, 0.1)])
    assert steep.base >= 0.0
    assert measure.line([(1, 0.02)]).base == 0.02


def test_facts_come_from_the_engines_metrics() -> None:
    assert read_facts("m", METRICS) == Facts(model="m", token_bytes=12240.0, pool_bytes=214 * 195840)
    assert read_facts("m", "vllm:num_requests_running 1.0\n").token_bytes is None


def test_the_cache_is_known_by_the_bytes_of_its_tokens(request_: Request) -> None:
    assert measure.row_of(Facts(model="m", token_bytes=12240.0, pool_bytes=1), request_) == "fp8"
    assert measure.row_of(Facts(model="m", token_bytes=23040.0, pool_bytes=1), request_) == "fp16"
    assert measure.row_of(Facts(model="m", token_bytes=999.0, pool_bytes=1), request_) is None


async def test_an_engine_is_measured_and_the_plan_follows(
    engine: Callable[..., EngineClient], request_: Request
) -> None:
    ticks = count()
    run = await measure.ask(await engine(), request_, clock=lambda: next(ticks) / 100)
    assert run.row == "fp8" and run.facts.model == "tiny"
    assert run.steps[0].sequences == 1
    assert run.steps[0].seconds == pytest.approx(0.01)
    placed = measure.on_measured_pool(request_, [run])
    plan = measure.make_plan(placed, measure.by_row([run], ["fp16", "fp8", "int8"]))
    # 1,024 tokens take 64 of the 214 blocks
    assert plan.fits[1].sequences == 3
    assert plan.fits[1].step_s == pytest.approx(run.pace.step_s(3))
    assert plan.fits[0].token_bytes == 23040.0  # was not measured
    assert "12,240" in measure.text([run], request_)


async def test_an_engine_that_tells_no_pool_needs_an_accelerator(
    engine: Callable[..., EngineClient], request_: Request
) -> None:
    run = await measure.ask(await engine(metrics=""), request_, clock=iter(range(10_000)).__next__)
    assert run.row is None
    with pytest.raises(InputError, match="--gpu or --memory"):
        measure.on_measured_pool(request_, [run])


async def test_an_engine_that_fails_is_said(engine: Callable[..., EngineClient], request_: Request) -> None:
    with pytest.raises(BrokenLoop, match="no room"):
        await measure.ask(await engine(failure="no room"), request_)


async def test_nothing_that_serves_is_bad_input() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(InputError, match="does not answer as an engine"):
            await EngineClient(session, "http://127.0.0.1:9").facts()
