"""What goes wrong around an agent: it stays up, says so, and never acts on it. Cases that real users met."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ullage_agent.adapters import BUILTIN_ADAPTERS
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.sglang import parse_metrics as parse_sglang
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.adapters.vllm import parse_metrics as parse_vllm
from ullage_agent.analysis import Analysis, Surroundings
from ullage_agent.app import Agent
from ullage_agent.clock import ManualClock
from ullage_agent.config import AgentConfig
from ullage_agent.wire import ACTIONS, Device, Host


class Moody:
    """A vLLM whose answer can be spoiled in any way."""

    def __init__(self) -> None:
        self.mood = "well"
        self.usage = 0.2
        self.acts = 0

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        text = (
            'vllm:cache_config_info{engine="0",num_gpu_blocks="101",block_size="16"} 1.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.usage}\n'
            'vllm:num_requests_running{engine="0"} 1.0\n'
        )
        if self.mood == "slow":
            await asyncio.Event().wait()
        if self.mood == "half":
            return web.Response(body=text.encode(), headers={"Content-Length": "100000"})
        if self.mood == "huge":
            return web.Response(text="# " + "x" * 10_000_000)
        if self.mood == "chunks stop":
            answer = web.StreamResponse()
            await answer.prepare(request)
            await answer.write(text[:40].encode())
            assert request.transport is not None
            request.transport.abort()
            return answer
        return web.Response(status=500 if self.mood == "error" else 200, text=text)

    async def act(self, _: web.Request) -> web.Response:
        self.acts += 1
        return web.json_response({"success": True})


class Rig:
    def __init__(self, agent: Agent, engine: Moody, runner: web.AppRunner, clock: ManualClock) -> None:
        self.agent, self.engine, self.runner, self.clock = agent, engine, runner, clock

    async def get(self, path: str) -> tuple[int, str]:
        assert self.agent.metrics_address is not None
        target = f"http://127.0.0.1:{self.agent.metrics_address[1]}{path}"
        async with aiohttp.ClientSession() as session, session.get(target) as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def rig(clock: ManualClock) -> AsyncIterator[Rig]:
    engine = Moody()
    app = web.Application()
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_post("/reset_prefix_cache", engine.act)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = AgentConfig(
        engine="vllm", engine_url=f"http://127.0.0.1:{runner.addresses[0][1]}", metrics_host="127.0.0.1",
        metrics_port=0, watch_devices=False, reflex_seconds=5.0, poll_seconds=60.0,
    )  # fmt: skip
    adapters = {"vllm": lambda given: BUILTIN_ADAPTERS["vllm"](_hasty(given))}
    async with Agent(config, adapters=adapters, clock=clock) as agent:
        await agent.poller.poll_once()
        yield Rig(agent, engine, runner, clock)
    await runner.cleanup()


def _hasty(given: Any) -> Any:
    return type(given)(url=given.url, clock=given.clock, read_timeout_s=1.0)


@pytest.mark.parametrize("mood", ["slow", "half", "huge", "chunks stop", "error", "down"])
async def test_the_agent_stays_up_says_so_and_does_not_act(rig: Rig, mood: str) -> None:
    assert rig.agent.board.error is None
    rig.engine.mood, rig.engine.usage = mood, 1.0
    if mood == "down":
        await rig.runner.cleanup()
    for _ in range(2):
        rig.clock.advance(6.0)
        await rig.agent.poller.poll_once()
    status, text = await rig.get("/metrics")
    assert status == 200
    assert 'ullage_agent_source_up{source="engine"} 0.0' in text
    assert rig.agent.board.error
    report = rig.agent.board.report()
    assert report is not None and report.snapshot is not None
    assert report.snapshot.hot_blocks == 20  # the last good sample, with its age
    assert (report.sample_age_s or 0.0) >= 12.0
    assert rig.engine.acts == 0
    assert (await rig.get("/healthz"))[0] == 200
    rig.clock.advance(300.0)
    assert (await rig.get("/readyz"))[0] == 503


async def test_an_engine_that_recovers_is_read_again(rig: Rig) -> None:
    rig.engine.mood = "half"
    await rig.agent.poller.poll_once()
    rig.engine.mood = "well"
    rig.clock.advance(1.0)
    await rig.agent.poller.poll_once()
    assert rig.agent.board.error is None
    assert (await rig.get("/readyz"))[0] == 200


async def test_a_clock_that_steps_back_breaks_nothing(rig: Rig) -> None:
    for step in (1.0, 1.0, -500.0, 1.0, 1.0):
        rig.clock.advance(step)
        await rig.agent.poller.poll_once()
        report = rig.agent.board.report()
        assert report is not None
        assert (report.sample_age_s or 0.0) >= 0.0
        assert (await rig.get("/page.json"))[0] == 200
    assert rig.agent.board.error is None


async def test_an_expired_certificate_is_said(
    tls: Any, make_pair: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    make_pair(tls.cert, tls.key, "old", expired=True)
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    config = AgentConfig(
        engine="fake", engine_url="-", metrics_host="127.0.0.1", action_host="127.0.0.1", metrics_port=0,
        action_port=0, tls_cert=tls.cert, tls_key=tls.key, token_file=tls.token, watch_devices=False,
        poll_seconds=60.0,
    )  # fmt: skip
    with caplog.at_level(logging.ERROR):
        async with Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent:
            assert agent.credentials is not None
            assert agent.credentials.problem == "certificate has expired"
            await agent.poller.poll_once()
            async with aiohttp.ClientSession() as session:
                assert agent.metrics_address is not None and agent.action_address is not None
                async with session.get(f"http://127.0.0.1:{agent.metrics_address[1]}/metrics") as answer:
                    assert "ullage_agent_certificate_valid 0.0" in await answer.text()
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await session.get(f"https://127.0.0.1:{agent.action_address[1]}/v1/risk", ssl=tls.client())
            make_pair(tls.cert, tls.key, "new")
            assert agent.credentials.refresh()
            assert agent.credentials.problem is None
    assert "certificate has expired; renew it" in caplog.text


async def test_an_engine_with_an_expired_certificate_is_unreachable(
    tmp_path: Path, make_pair: Any, clock: ManualClock
) -> None:
    cert, key = tmp_path / "c", tmp_path / "k"
    make_pair(cert, key, "old", expired=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    config = AgentConfig(
        engine="vllm", engine_url=f"https://127.0.0.1:{runner.addresses[0][1]}", metrics_host="127.0.0.1",
        metrics_port=0, watch_devices=False, poll_seconds=60.0,
    )  # fmt: skip
    async with Agent(config, clock=clock) as agent:
        await agent.poller.poll_once()
        assert "certificate" in (agent.board.error or "").lower()
    await runner.cleanup()


async def test_no_action_without_the_token(tls: Any, clock: ManualClock) -> None:
    """Case: routes that were open although a key was set."""
    adapter = FakeAdapter.simulated(PoolSpec(total=10, cached=10), clock)
    config = AgentConfig(
        engine="fake", engine_url="-", metrics_host="127.0.0.1", action_host="127.0.0.1", metrics_port=0,
        action_port=0, tls_cert=tls.cert, tls_key=tls.key, token_file=tls.token, watch_devices=False,
        poll_seconds=60.0,
    )  # fmt: skip
    async with (
        Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent,
        aiohttp.ClientSession() as session,
    ):
        assert agent.action_address is not None
        base = f"https://127.0.0.1:{agent.action_address[1]}"
        for headers in ({}, {"Authorization": "Bearer wrong-wrong-wrong"}, {"Authorization": tls.secret}):
            for action in ACTIONS:
                async with session.post(
                    f"{base}/v1/actions/{action}", ssl=tls.client(), headers=headers, json={"ratio": 0.5}
                ) as answer:
                    assert answer.status == 401
    assert adapter.acts == []


@pytest.mark.parametrize("parse", [parse_vllm, parse_sglang])
def test_an_empty_answer_is_no_idle_engine(parse: Any) -> None:
    """Case: an empty result was read as zero, and the fleet shrank at its peak."""
    found = Analysis().take(parse(b"", 0.0), 0.0)
    assert found.risk.score is None
    assert found.liveness.state == "unknown"


@pytest.mark.parametrize("poll", [0.2, 1.0, 10.0, 60.0])
def test_freshness_follows_the_sampling_interval(poll: float) -> None:
    """Case: a fixed limit of staleness made healthy pods look dead."""
    config = AgentConfig(engine="fake", engine_url="-", poll_seconds=poll)
    assert config.fresh_s > 2 * poll + 1.0
    assert config.stale_after_s > config.fresh_s or poll == 60.0
    assert config.forecast_horizon_s >= 6 * poll


def vllm_at(usage: float, running: int, finished: int, start: float = 1.0) -> bytes:
    return (
        f"process_start_time_seconds {start}\n"
        'vllm:cache_config_info{engine="0",num_gpu_blocks="1001",block_size="16"} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        'vllm:num_requests_waiting{engine="0"} 0\n'
        f'vllm:request_success_total{{engine="0"}} {finished}\n'
    ).encode()


def test_a_cold_start_is_no_alarm() -> None:
    """Case: samples of the warm-up caused overscaling. Every pool that begins to serve fills fast at first."""
    analysis = Analysis()
    for second in range(20):
        usage = min(0.4, 0.02 * second)
        found = analysis.take(parse_vllm(vllm_at(usage, 5, 0), float(second)), float(second))
        assert (found.risk.score or 0.0) < 85


def test_another_process_starts_with_a_clean_slate() -> None:
    """Case: values of a dead process still counted."""
    analysis = Analysis()
    for second in range(20):
        found = analysis.take(parse_vllm(vllm_at(0.5 + 0.025 * second, 9, 0), 0.0), float(second))
    assert (found.risk.score or 0.0) >= 85
    fresh = analysis.take(parse_vllm(vllm_at(0.1, 1, 0, start=2.0), 0.0), 21.0)
    assert fresh.risk.score is None or fresh.risk.score < 50
    assert fresh.service is None


def test_a_pool_full_of_cache_is_not_under_pressure() -> None:
    """Case: offload keeps a pool at 95 to 100 % and it looked saturated."""
    analysis = Analysis()
    for second in range(60):
        text = (
            "sglang:max_total_num_tokens 1000\nsglang:kv_used_tokens 200\nsglang:kv_evictable_tokens 800\n"
            "sglang:kv_available_tokens 0\nsglang:token_usage 0.2\nsglang:num_running_reqs 3\n"
            f"sglang:num_queue_reqs 0\nsglang:num_requests_total {second}\n"
        )
        found = analysis.take(parse_sglang(text.encode(), 0.0), float(second))
    assert (found.risk.score or 0.0) < 50


def test_a_neighbour_on_the_device_is_seen_coming() -> None:
    gib = 1 << 30
    analysis = Analysis()
    scores = []
    for second in range(40):
        device = Device(index=0, total_bytes=80 * gib, used_bytes=(60 + second // 2) * gib)
        found = analysis.take(parse_vllm(vllm_at(0.2, 1, 0), 0.0), float(second), Surroundings(devices=(device,)))
        scores.append(found.risk.score or 0.0)
    assert scores[0] < 50
    assert scores[-1] >= 85
    assert found.risk.winner == "device"


def test_a_leak_in_the_control_group_is_seen_coming() -> None:
    analysis = Analysis()
    for second in range(60):
        host = Host(limit_bytes=1000, used_bytes=800 + 3 * second)
        found = analysis.take(parse_vllm(vllm_at(0.2, 1, 0), 0.0), float(second), Surroundings(host=host))
        if (found.risk.score or 0.0) >= 85:
            break
    assert found.risk.winner == "host"
    assert host.used_bytes is not None and host.used_bytes < 950  # by its growth, before it is nearly full


def test_one_full_rank_is_not_hidden_by_idle_ones() -> None:
    analysis = Analysis()
    for second in range(20):
        text = ""
        for rank, usage in (("0", 0.05), ("1", min(1.0, 0.6 + 0.02 * second))):
            text += (
                f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="1001",block_size="16"}} 1.0\n'
                f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}\n'
                f'vllm:num_requests_running{{engine="{rank}"}} 3\n'
            )
        found = analysis.take(parse_vllm(text.encode(), 0.0), float(second))
    assert found.forecast.rank == "1"
    assert (found.risk.score or 0.0) >= 85
