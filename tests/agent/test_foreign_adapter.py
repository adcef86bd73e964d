"""What vLLM and SGLang can be made to do: routes found rather than assumed, answers judged rather than believed."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig
from ullage_agent.adapters.foreign import ForeignAdapter
from ullage_agent.clock import ManualClock
from ullage_agent.errors import EngineRefused, EngineTimeout
from ullage_agent.gate import parse_state
from ullage_agent.wire import ActionRequest


class Server:
    """Speaks as vLLM or SGLang does, with the routes it is told to have."""

    def __init__(self, *routes: str) -> None:
        self.routes = routes
        self.busy = False
        self.cached = 300
        self.running = 0
        self.start = 1.7e9
        self.calls: list[str] = []
        self.token_status = 200
        self.silent = False
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health_generate", self._complete)
        for route in self.routes:
            app.router.add_post(route, self._admin)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        free = 1000 - 400 - self.cached
        text = f"""process_start_time_seconds {self.start}
vllm:cache_config_info{{engine="0",num_gpu_blocks="101",block_size="16"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.4
vllm:num_requests_running{{engine="0",model_name="m"}} {self.running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0
sglang:max_total_num_tokens{{model_name="m"}} 1000
sglang:kv_used_tokens{{model_name="m"}} 400
sglang:kv_evictable_tokens{{model_name="m"}} {self.cached}
sglang:kv_available_tokens{{model_name="m"}} {free}
sglang:num_running_reqs{{model_name="m"}} {self.running}
sglang:num_queue_reqs{{model_name="m"}} 0
"""
        return web.Response(text=text)

    async def _admin(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        if request.path == "/reset_prefix_cache":
            return web.json_response({"success": not self.busy})
        if request.path == "/flush_cache":
            if self.busy:
                return web.Response(status=400, text="busy")
            self.cached = 0
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.Event().wait()
        self.calls.append(request.path)
        return web.json_response({}, status=self.token_status)


Make = Callable[..., Awaitable[tuple[ForeignAdapter, Server]]]
VLLM_ADMIN = ("/reset_prefix_cache", "/pause", "/resume")
SGLANG_ADMIN = ("/flush_cache", "/pause_generation", "/continue_generation")


@pytest.fixture
async def make(clock: ManualClock) -> AsyncIterator[Make]:
    closers: list[Callable[[], Awaitable[None]]] = []

    async def made(kind: str, *routes: str, gate_file: Path | None = None) -> tuple[ForeignAdapter, Server]:
        server = Server(*routes)
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        config = AdapterConfig(url=f"http://127.0.0.1:{port}", clock=clock, gate_file=gate_file)
        adapter = BUILTIN_ADAPTERS[kind](config)
        assert isinstance(adapter, ForeignAdapter)
        closers.extend([adapter.close, runner.cleanup])
        return adapter, server

    yield made
    for close in closers:
        await close()


async def test_development_routes_are_found_and_only_looked_for(make: Make) -> None:
    adapter, server = await make("vllm", *VLLM_ADMIN)
    assert adapter.capabilities() == ()
    await adapter.read()
    assert server.calls == []
    assert adapter.capabilities() == ("release", "drain")
    assert adapter.features() == ("pause", "reset_prefix_cache", "canary")


async def test_a_production_server_has_none(make: Make) -> None:
    adapter, _ = await make("vllm")
    await adapter.read()
    assert adapter.capabilities() == ()
    assert adapter.features() == ("canary",)


async def test_routes_are_looked_for_again_in_another_process(make: Make) -> None:
    adapter, server = await make("sglang", *SGLANG_ADMIN)
    await adapter.read()
    assert "evict" in adapter.capabilities()
    server.start += 60.0
    server.routes = ()
    await adapter.read()
    assert adapter.capabilities() == ("evict",)


@pytest.mark.parametrize(("busy", "words"), [(True, "success: false"), (False, "no block was seen")])
async def test_a_reset_of_vllm_frees_nothing_and_says_so(make: Make, busy: bool, words: str) -> None:
    adapter, server = await make("vllm", *VLLM_ADMIN)
    await adapter.read()
    server.busy = busy
    result = await adapter.act("evict", ActionRequest(ratio=0.2), "k")
    assert result.outcome == "Ineffective"
    assert words in result.message
    assert result.blocks_freed == 0


async def test_a_flush_of_sglang_is_measured(make: Make) -> None:
    adapter, server = await make("sglang", *SGLANG_ADMIN)
    await adapter.read()
    dry = await adapter.act("evict", ActionRequest(ratio=0.2, dry_run=True), "k0")
    assert (dry.outcome, dry.blocks_freed, server.cached) == ("Succeeded", 300, 300)
    server.busy = True
    refused = await adapter.act("evict", ActionRequest(ratio=0.2), "k1")
    assert (refused.outcome, refused.blocks_freed) == ("Ineffective", 0)
    server.busy = False
    result = await adapter.act("evict", ActionRequest(ratio=0.2), "k2")
    assert (result.outcome, result.blocks_freed) == ("Succeeded", 300)
    again = await adapter.act("evict", ActionRequest(ratio=0.2), "k3")
    assert again.outcome == "Ineffective"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_throttle_goes_through_the_gate(make: Make, tmp_path: Path, clock: ManualClock, kind: str) -> None:
    file = tmp_path / "gate.json"
    adapter, _ = await make(kind, gate_file=file)
    assert (await adapter.read()).snapshot.draining is False
    assert {"throttle", "release", "drain"} <= set(adapter.capabilities())
    result = await adapter.act("throttle", ActionRequest(max_prompt_tokens=48, ttl_s=30.0), "k")
    assert result.outcome == "Succeeded"
    state = parse_state(file.read_bytes())
    assert state.max_prompt_tokens == 48
    assert state.max_total_blocks == (60 if kind == "vllm" else 600)
    assert state.expires_at == clock.wall() + 30.0
    assert result.after is not None
    assert (result.after.admission_max_prompt_tokens, result.after.admission_expires_in_s) == (48, 30.0)
    clock.advance(31.0)
    assert (await adapter.read()).snapshot.admission_max_prompt_tokens is None
    await adapter.act("release", ActionRequest(), "k2")
    assert parse_state(file.read_bytes()).max_prompt_tokens is None


async def test_a_gate_file_that_makes_no_sense_spoils_no_reading(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    file.write_text("[]")
    adapter, _ = await make("vllm", gate_file=file)
    reading = await adapter.read()
    assert reading.snapshot.hot_blocks == 40
    assert reading.snapshot.draining is None
    assert "admission gate" in [violation.metric for violation in reading.violations]


async def test_a_gate_file_that_cannot_be_written_is_an_error(make: Make, tmp_path: Path) -> None:
    adapter, _ = await make("vllm", gate_file=tmp_path / "absent" / "gate.json")
    await adapter.read()
    with pytest.raises(Exception, match="gate file"):
        await adapter.act("throttle", ActionRequest(max_prompt_tokens=48, ttl_s=30.0), "k")


async def test_drain_pauses_vllm_and_release_resumes_it(make: Make) -> None:
    adapter, server = await make("vllm", *VLLM_ADMIN)
    await adapter.read()
    assert (await adapter.act("drain", ActionRequest(timeout_s=5.0), "k")).outcome == "Succeeded"
    assert (await adapter.act("release", ActionRequest(), "k2")).outcome == "Succeeded"
    assert server.calls == ["/pause?mode=wait", "/resume"]


async def test_drain_says_what_is_still_in_flight(make: Make, tmp_path: Path) -> None:
    adapter, server = await make("sglang", gate_file=tmp_path / "gate.json")
    await adapter.read()
    server.running = 3
    result = await adapter.act("drain", ActionRequest(timeout_s=0.5), "k")
    assert result.outcome == "Ineffective"
    assert "3 requests" in result.message
    assert json.loads((tmp_path / "gate.json").read_bytes())["draining"] is True


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/v1/completions"), ("sglang", "/health_generate")])
async def test_canaries(make: Make, kind: str, path: str) -> None:
    adapter, server = await make(kind)
    await adapter.read()
    assert await adapter.canary(2.0) is True
    assert server.calls == [path]
    server.token_status = 401
    assert await adapter.canary(2.0) is False
    server.token_status = 500
    with pytest.raises(EngineRefused):
        await adapter.canary(2.0)
    server.silent = True
    with pytest.raises(EngineTimeout):
        await adapter.canary(0.1)


async def test_what_is_not_offered_is_said_with_the_remedy(make: Make) -> None:
    adapter, _ = await make("vllm")
    await adapter.read()
    for action, words in (("throttle", "--gate-file"), ("compact", "nothing to compact"), ("evict", "/reset")):
        result: Any = await adapter.act(action, ActionRequest(), "k")  # type: ignore[arg-type]
        assert result.outcome == "Unsupported"
        assert words in result.message
