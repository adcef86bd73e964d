"""The demo load against a small OpenAI server whose memory can be seen filling and emptying."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from ullage_cli.chat import Answer, ChatClient, Question
from ullage_cli.load import DemoLoad
from ullage_cli.pace import (
    LoadPlan,
    Pressure,
    fitting_answer_tokens,
    how_many_more,
    long_answer_tokens,
    projected_blocks,
)
from ullage_cli.prompts import long_prompt

QUESTION = Question(system="s", user="u", max_tokens=3, seed=1)
Handler = Callable[[web.Request], "asyncio.Future[web.StreamResponse]"]


def event(payload: object) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def delta(text: str | None, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}})
DONE = b"data: [DONE]\n\n"
GOOD = (delta("two "), delta("words", "stop"), USAGE, DONE)


class FakeServer:
    """Answers each request with the next script: a response, or the pieces of a stream."""

    def __init__(self, *scripts: web.Response | tuple[bytes, ...]) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict[str, object]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, web.Response):
            return script
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in script:
            if piece == b"":
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(piece)
        return response


@asynccontextmanager
async def client(server: FakeServer, waits: list[float] | None = None) -> AsyncIterator[ChatClient]:
    async def sleep(seconds: float) -> None:
        (waits if waits is not None else []).append(seconds)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with aiohttp.ClientSession() as session:
        yield ChatClient(session, server.url, "m", sleep=sleep)
    await runner.cleanup()


def refusal(retry_after: str | None = "2") -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return web.json_response({"error": {"message": "later"}}, status=429, headers=headers)


async def test_a_whole_answer() -> None:
    async with client(server := FakeServer(GOOD)) as chat:
        assert await chat.ask(QUESTION) == Answer(text="two words", prompt_tokens=5, completion_tokens=2)
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
    ]
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["stream"]) == (3, True)


async def test_events_split_anywhere_are_read() -> None:
    whole = b"".join(GOOD)
    async with client(FakeServer(tuple(whole[i : i + 7] for i in range(0, len(whole), 7)))) as chat:
        assert (await chat.ask(QUESTION)).text == "two words"


async def test_a_refusal_for_now_is_waited_for_and_counts_once() -> None:
    waits: list[float] = []
    async with client(FakeServer(refusal("2"), refusal("0.5"), GOOD), waits) as chat:
        answer = await chat.ask(QUESTION)
    assert (answer.failure, answer.refusals, waits) == (None, 2, [2.0, 0.5])


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (refusal(None), "HTTP 429 with Retry-After None"),
        (refusal("soon"), "HTTP 429 with Retry-After 'soon'"),
        (web.json_response({"error": {"message": "bad"}}, status=400), "HTTP 400"),
        (web.Response(status=500, text="oops"), "HTTP 500: oops"),
        (web.Response(status=503, headers={"Retry-After": "1"}), "HTTP 503"),
        ((delta("a"), b""), "ClientPayloadError"),
        ((delta("a"),), "the connection ended before the answer did"),
        ((delta("a"), DONE), "ended without a finish reason"),
        ((delta("a", "stop"), DONE), "without a finish reason and usage"),
        ((delta("a", "abort"), USAGE, DONE), "finish reason 'abort'"),
        ((event({"error": {"message": "pool gone"}}), DONE), "error in the stream: pool gone"),
        ((b"data: {nonsense\n\n",), "cannot be read"),
        ((b"data: " + b"x" * 2**21,), "longer than 1 MiB"),
    ],
)
async def test_everything_else_is_a_failure_with_its_reason(
    script: web.Response | tuple[bytes, ...], failure: str
) -> None:
    async with client(FakeServer(script)) as chat:
        answer = await chat.ask(QUESTION)
    assert answer.failure is not None
    assert failure in answer.failure


async def test_no_server_is_a_failure() -> None:
    async with client(FakeServer(GOOD)) as chat:
        pass
    async with aiohttp.ClientSession() as session:
        answer = await ChatClient(session, "http://127.0.0.1:9", "m").ask(QUESTION)
    assert answer.failure is not None
    assert chat is not None


class Pool:
    """Asks and Feedback in one: a pool that fills with what is asked and empties by evictions."""

    def __init__(self, total: int = 200, *, evicts: bool = True, hold_back: bool = False) -> None:
        self.total, self.evicts, self.hold_back = total, evicts, hold_back
        self.evicted = 0
        self.live: dict[asyncio.Future[None], int] = {}
        self.most_live = 0
        self.most_used = 0
        self.some_live = asyncio.Event()
        self.readings = 0
        self.asked: list[Question] = []
        self.fail_after: int | None = None
        self.fail_once_at: int | None = None

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        if self.fail_after is not None and len(self.asked) > self.fail_after:
            return Answer(failure="HTTP 500: broken")
        if len(self.asked) == self.fail_once_at:
            return Answer(failure="HTTP 500: broken")
        if question.max_tokens > 50:
            ended = asyncio.get_running_loop().create_future()
            self.live[ended] = projected_blocks(LoadPlan(), question, 16)
            self.most_live = max(self.most_live, len(self.live))
            self.most_used = max(self.most_used, sum(self.live.values()))
            if self.most_live >= 3:
                self.some_live.set()
            await ended
        await asyncio.sleep(0)
        return Answer(text="ok", prompt_tokens=50, completion_tokens=question.max_tokens)

    async def next_pressure(self) -> Pressure:
        await asyncio.sleep(0)
        self.readings += 1
        used = sum(self.live.values())
        risk = 0.0 if self.hold_back else min(100.0, 100.0 * used / self.total)
        if risk >= 85 and self.evicts:
            self.evicted += 1
        if self.evicted and self.readings % 2 == 0 and self.live:
            ended, _ = self.live.popitem()
            ended.set_result(None)
        return Pressure(
            risk=risk,
            engines=1,
            total_blocks=self.total,
            block_tokens=16,
            running=len(self.live),
            waiting=0,
            shortfall_blocks=used - self.total,
            tokens_per_s=30.0,
            settled=self.evicted // 2,
        )


def ticking() -> Callable[[], float]:
    now = iter(range(10**9))
    return lambda: float(next(now)) / 10


async def test_the_load_drives_the_risk_up_and_down_and_stops_by_itself() -> None:
    pool = Pool()
    load = DemoLoad(pool, pool, LoadPlan(), ticking())
    finish = asyncio.create_task(drain_when_easing(load, pool))
    await asyncio.wait_for(load.run(), 30)
    finish.cancel()
    assert load.phase == "done"
    assert load.gave_up is None
    assert load.tally.failed == 0
    assert load.tally.ok == len(pool.asked)
    assert pool.evicted > 0
    assert not pool.live


async def drain_when_easing(load: DemoLoad, pool: Pool) -> None:
    while True:
        await asyncio.sleep(0)
        if load.phase == "easing off" and pool.live:
            pool.live.popitem()[0].set_result(None)


async def test_failures_are_counted_and_named_and_soon_enough_is_enough() -> None:
    pool = Pool()
    pool.fail_after = 3
    load = DemoLoad(pool, pool, LoadPlan(), ticking())
    await asyncio.wait_for(load.run(), 30)
    assert (load.tally.ok, load.tally.failed) == (3, 3)
    assert set(load.tally.failures) == {"HTTP 500: broken"}
    assert load.gave_up == "3 requests failed, the first because of: HTTP 500: broken"


async def test_one_failure_does_not_end_the_load() -> None:
    pool = Pool(hold_back=True)
    pool.fail_once_at = 2
    load = DemoLoad(pool, pool, LoadPlan(ramp_s=1), ticking())
    finish = asyncio.create_task(drain_when_easing(load, pool))
    await asyncio.wait_for(load.run(), 30)
    finish.cancel()
    assert load.tally.failed == 1
    assert load.tally.ok == len(pool.asked) - 1 > 2


async def test_a_load_that_cannot_reach_the_risk_gives_up_and_stays_within_the_pool() -> None:
    pool = Pool(hold_back=True)
    load = DemoLoad(pool, pool, LoadPlan(ramp_s=5), ticking())
    finish = asyncio.create_task(drain_when_easing(load, pool))
    await asyncio.wait_for(load.run(), 30)
    finish.cancel()
    assert load.gave_up == "risk stayed below 85 for 5 s"
    assert load.tally.failed == 0
    # it did press, and no harder than it may
    assert 0 < pool.most_used - pool.total <= LoadPlan().overcommit * pool.total


async def test_the_time_cap_counts_what_it_cuts_off() -> None:
    pool = Pool(evicts=False)
    load = DemoLoad(pool, pool, LoadPlan(total_s=0.3), ticking())
    await asyncio.wait_for(load.run(), 30)
    assert 0 < len(pool.live) <= load.tally.failed
    assert load.gave_up is not None
    assert load.gave_up.startswith("not done after 0.3 s")


async def test_cancelling_the_load_leaves_no_request() -> None:
    pool = Pool(evicts=False)
    load = DemoLoad(pool, pool, LoadPlan(), ticking())
    task = asyncio.create_task(load.run())
    await asyncio.wait_for(pool.some_live.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(future.cancelled() for future in pool.live)
    assert (load.tally.abandoned, load.tally.failed) == (len(pool.live), 0)
    assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("chat")]


def pressure(**changes: object) -> Pressure:
    values: dict[str, object] = {
        "risk": 10.0,
        "engines": 1,
        "total_blocks": 100,
        "block_tokens": 16,
        "running": 3,
        "waiting": 0,
        "shortfall_blocks": -50,
        "tokens_per_s": 10.0,
        "settled": 0,
    }
    return Pressure(**(values | changes))  # type: ignore[arg-type]


def test_more_is_wanted_only_while_it_fits() -> None:
    plan = LoadPlan(overcommit=0.1, max_in_flight=4)
    assert how_many_more(plan, pressure(), 3, 60) == 1
    assert how_many_more(plan, pressure(), 3, 61) == 0
    assert how_many_more(plan, pressure(shortfall_blocks=50), 3, 1) == 0
    assert how_many_more(plan, pressure(running=4), 4, 1) == 0
    assert how_many_more(plan, pressure(waiting=1), 3, 1) == 0
    assert how_many_more(plan, pressure(running=2), 3, 1) == 0  # the last one was not taken up yet
    assert how_many_more(plan, pressure(total_blocks=None), 3, 1) == 0
    assert how_many_more(plan, pressure(shortfall_blocks=None), 3, 1) == 0
    assert how_many_more(plan, pressure(running=None), 3, 1) == 0


def test_several_engines_are_filled_at_once() -> None:
    plan = LoadPlan(overcommit=0.1, max_in_flight=8)
    assert how_many_more(plan, pressure(engines=3), 3, 20) == 3
    assert how_many_more(plan, pressure(engines=3), 3, 30) == 2
    assert how_many_more(plan, pressure(engines=9), 3, 1) == 5


@pytest.mark.parametrize(("speed", "tokens"), [(0, 64), (20, 120), (1000, 480)])
def test_slow_machines_are_asked_for_shorter_answers(speed: float, tokens: int) -> None:
    assert long_answer_tokens(LoadPlan(), speed) == tokens


def test_long_prompts_differ() -> None:
    assert len({long_prompt(index) for index in range(48)}) == 48


@pytest.mark.parametrize(("shortfall", "tokens"), [(-1000, 160), (0, 120), (4, 64), (90, 64)])
def test_the_last_answers_are_as_long_as_there_is_room(shortfall: int, tokens: int) -> None:
    """Of 100 blocks of 16 ten may be missing: a prompt of 40 tokens then leaves 120 for the answer."""
    plan = LoadPlan(overcommit=0.1, long_tokens=(64, 160), tokens_per_character=0.2)
    question = Question(system="", user="x" * 200, max_tokens=160, seed=0)
    now = pressure(total_blocks=100, block_tokens=16, shortfall_blocks=shortfall)
    assert fitting_answer_tokens(plan, now, question) == tokens
    fitted = Question(system="", user="x" * 200, max_tokens=tokens, seed=0)
    room = 10 - shortfall
    assert projected_blocks(plan, fitted, 16) <= room or tokens == 64


def test_what_is_not_known_changes_no_answer() -> None:
    question = Question(system="", user="x", max_tokens=160, seed=0)
    assert fitting_answer_tokens(LoadPlan(), pressure(shortfall_blocks=None), question) == 160
