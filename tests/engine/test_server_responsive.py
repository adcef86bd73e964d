"""The server beside a busy step loop: it answers during a long prefill, ends calls that waited too long, shows a stuck
loop, and exports what the loop's steps cost.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ullage_engine.build import assemble
from ullage_engine.config import EngineConfig, ServerConfig, TcpAddress
from ullage_engine.fake_core import FakeCore, Gate
from ullage_engine.fake_engine import running
from ullage_engine.layout import CacheLayout
from ullage_engine.loop import EngineLoop, LoopLimits
from ullage_engine.metrics import PREFIX
from ullage_engine.models import shape_of
from ullage_engine.request import GenerationRequest, TokenOutput
from ullage_engine.runner import ModelRunner
from ullage_engine.store import BlockStore

Open = Callable[..., Any]
WAIT_S = 60.0
LOCAL = TcpAddress("127.0.0.1", 0)


class Held:
    """Holds the loop in a forward pass until released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def asleep(self, _: object) -> None:
        """As a device does that computes elsewhere."""
        self.entered.set()
        assert self.released.wait(WAIT_S)

    def spinning(self, _: object) -> None:
        """As Python code does that computes here, never giving the interpreter away by itself."""
        self.entered.set()
        end = time.monotonic() + WAIT_S
        while not self.released.is_set():
            assert time.monotonic() < end

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)


@dataclass(frozen=True)
class Loaded:
    """A `LoadedEngine` around the real step loop."""

    core: EngineLoop
    tokenizer: Any

    def close(self) -> None:
        self.core.close()


Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serve(fake_engine: Any, tokenizer: Any) -> Serve:
    """Serves the real loop over a runner without a model; `fail` is called in each forward pass."""

    @asynccontextmanager
    async def opened(
        fail: Any, *, clock: Callable[[], float] = time.monotonic, max_queue: int = 8, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        engine, _ = fake_engine(
            blocks=64, block_tokens=16, vocabulary=len(tokenizer), budget=64, sequences=1, fail=fail, clock=clock
        )
        limits = LoopLimits(max_model_len=1024, max_queue=max_queue, max_sequences=1)
        loop = EngineLoop(engine, limits, frozenset(), clock=clock)
        loop.start()
        config = ServerConfig(public=LOCAL, admin=None, drain_seconds=5.0, **settings)
        try:
            async with client(Loaded(loop, tokenizer), config) as http:
                yield http
        finally:
            await asyncio.to_thread(loop.close)

    return opened


@asynccontextmanager
async def client(engine: Any, config: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(engine, config) as addresses,
        httpx.AsyncClient(base_url=addresses["public"], timeout=WAIT_S) as http,
    ):
        yield http


def ask(http: httpx.AsyncClient, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "fake", "prompt": [65] * 9, "max_tokens": 2, "temperature": 0} | fields
    return asyncio.create_task(http.post("/v1/completions", json=body))


async def answers_meanwhile(http: httpx.AsyncClient) -> None:
    """Probes, metrics and a refusal, each over a connection of its own; times are shown, not judged."""
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/nothing"):
        async with httpx.AsyncClient(base_url=http.base_url, timeout=WAIT_S) as fresh:
            began = time.perf_counter()
            answer = await fresh.get(path)
            print(f"{path}: {(time.perf_counter() - began) * 1e3:.1f} ms")
            assert answer.status_code == (404 if path == "/v1/nothing" else 200), answer.text


@pytest.mark.parametrize("how", ["asleep", "spinning"])
async def test_the_server_answers_during_a_step(serve: Serve, how: str) -> None:
    held = Held()
    async with serve(getattr(held, how)) as http:
        answer = ask(http)
        await held.until_entered()
        await answers_meanwhile(http)
        assert not held.released.is_set()
        assert not answer.done()
        held.released.set()
        assert (await answer).status_code == 200


class Repeating:
    """A real runner that computes the same chunks over and over until released: a prefill of any length."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.held = Held()
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, chunks: Any) -> torch.Tensor:
        self.held.entered.set()
        while True:
            released = self.held.released.is_set()
            logits: torch.Tensor = self._inner.forward(chunks)
            self.passes += 1
            if released:
                return logits


@pytest.mark.model
async def test_the_server_answers_during_a_long_prefill_of_the_real_model(smollm2: Any) -> None:
    config = EngineConfig(model="smollm2", max_batch_tokens=512)
    shape = shape_of(smollm2.config)
    store = BlockStore(CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 16, "fp8"), 64)
    loop = assemble(config, smollm2, ModelRunner(smollm2.model, store, torch.device("cpu")))
    runner = Repeating(loop._engine._compute._runner)
    loop._engine._compute._runner = runner
    loop.start()
    try:
        async with client(Loaded(loop, smollm2.tokenizer), ServerConfig(public=LOCAL)) as http:
            prompt = smollm2.tokenizer("the lazy dog " * 160).input_ids[:480]
            answer = ask(http, model=loop.model_name, prompt=prompt, max_tokens=1)
            await asyncio.to_thread(runner.held.entered.wait, WAIT_S)
            await answers_meanwhile(http)
            assert loop.snapshot().step == 0
            assert loop._engine.scheduler.running[0].computed == 0
            runner.held.released.set()
            body = (await answer).json()
        assert body["usage"] == {
            "prompt_tokens": 480,
            "completion_tokens": 1,
            "total_tokens": 481,
            "prompt_tokens_details": {"cached_tokens": 0},
            "kv_cache": {"kept_tokens": 480, "dropped_tokens": 0},
        }
    finally:
        runner.held.released.set()
        await asyncio.to_thread(loop.close)


async def test_a_stuck_loop_turns_ready_and_then_health_red(serve: Serve) -> None:
    held, now = Held(), [100.0]
    async with serve(held.asleep, clock=lambda: now[0]) as http:
        answer = ask(http)
        await held.until_entered()
        for age, ready, health in ((0.0, 200, 200), (11.0, 503, 200), (61.0, 503, 503)):
            now[0] = 100.0 + age
            codes = [(await http.get(path)).status_code for path in ("/ready", "/health")]
            assert codes == [ready, health], age
        reason = (await http.get("/health")).json()["reason"]
        assert reason == "the step loop has not moved for 61.0 s (limit 60 s)"
        held.released.set()
        assert (await answer).status_code == 200
        while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - until another thread's next pass
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
async def test_waiting_too_long_has_an_answer_of_its_own(core: FakeCore, open_engine: Open, stream: bool) -> None:
    core.busy = True
    async with (
        open_engine(max_wait_s=0.05) as addresses,
        httpx.AsyncClient(base_url=addresses["public"]) as http,
    ):
        answer = await ask(http, prompt="x", stream=stream, n=2)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "queue_timeout")
        assert error["message"] == "the request waited 0.05 s in the queue and was not begun; try again later"
        assert answer.headers["Retry-After"] == "5"
        assert sorted(core.aborted) == sorted(request.request_id for request in core.submitted)
        core.queue_full = True
        full = await ask(http, prompt="x", stream=stream)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        core.queue_full = core.busy = False
        assert (await ask(http, prompt="x", stream=stream)).status_code == 200
        assert (await figures(http))[PREFIX + "queue_timeouts_total"] == 1


async def test_a_request_that_was_begun_may_take_longer(core: FakeCore, open_engine: Open) -> None:
    gate = core.gate()

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        yield gate
        yield TokenOutput(request_id=request.request_id, token=65, finish_reason="length")

    core.script = script
    async with (
        open_engine(max_wait_s=1.0) as addresses,
        httpx.AsyncClient(base_url=addresses["public"]) as http,
    ):
        begun = ask(http, prompt="x")
        assert await asyncio.to_thread(core.wait_for, lambda core: core.snapshot().running == 1)
        core.busy = True
        assert (await ask(http, prompt="x")).status_code == 503  # its time began later and is over
        assert not begun.done()
        gate.open()
        assert (await begun).status_code == 200


async def test_the_wait_is_bounded_even_while_the_loop_is_stuck(serve: Serve) -> None:
    held = Held()
    async with serve(held.asleep, max_wait_s=1.0, max_queue=1) as http:
        begun = ask(http)
        await held.until_entered()
        waited = await ask(http)
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "queue_timeout")
        assert not begun.done()
        held.released.set()
        assert (await begun).json()["usage"]["completion_tokens"] == 2
        found = await figures_once(http, "requests_aborted_total", 1)
    assert found[PREFIX + "requests_aborted_total"] == 1
    assert found[PREFIX + "requests_finished_total"] == 1


async def figures_once(http: httpx.AsyncClient, name: str, least: float) -> dict[str, float]:
    """Figures from when one has reached a value: what a pass did is published at its end, after the answers."""
    async with asyncio.timeout(WAIT_S):
        while (found := await figures(http))[PREFIX + name] < least:
            pass
    return found


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    """Samples without labels, and labelled ones as `name{value}`."""
    text = (await http.get("/metrics")).text
    return {
        sample.name + (f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


WHAT_THE_ENGINE_EXPORTS = (
    *(f"kv_blocks{{{state}}}" for state in ("free", "active", "cached", "in_flight")),
    "kv_pinned_blocks",
    "kv_slots{allocated}",
    "kv_slots{filled}",
    "kv_largest_free_run_blocks",
    "allocator_reserved_bytes",
    "allocator_allocated_bytes",
    "prefix_query_tokens_total",
    "prefix_hit_tokens_total",
    "preemptions_total",
    "recomputed_tokens_total",
    "requests_running",
    "requests_waiting",
    "queue_seconds_count",
    "queue_timeouts_total",
    "time_to_first_token_seconds_count",
    "inter_token_seconds_count",
    "request_seconds_count",
    "step_seconds_count",
    "step_tokens_sum",
    "step_sequences_sum",
)


async def test_figures_of_the_real_loop(serve: Serve) -> None:
    now = [0.0]

    def pass_time(_: object) -> None:
        now[0] += 0.25

    async with serve(pass_time, clock=lambda: now[0]) as http:
        for _ in range(2):
            assert (await ask(http, prompt=[65] * 100, max_tokens=3)).status_code == 200
        found = await figures_once(http, "step_seconds_count", 7)
    missing = [name for name in WHAT_THE_ENGINE_EXPORTS if PREFIX + name not in found]
    assert not missing
    read = {name: found[PREFIX + name] for name in WHAT_THE_ENGINE_EXPORTS}
    # 64 + 36 prompt tokens and two decode steps; then 96 tokens are reused and 4 + two decode steps are left
    assert read["step_seconds_count"] == 7
    assert found[PREFIX + "step_seconds_sum"] == 7 * 0.25
    assert read["step_tokens_sum"] == 102 + 6
    assert read["step_sequences_sum"] == 7
    assert read["queue_seconds_count"] == 2
    assert (read["prefix_query_tokens_total"], read["prefix_hit_tokens_total"]) == (200, 96)
    assert read["inter_token_seconds_count"] == 4
