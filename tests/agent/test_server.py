"""Both ports of a whole agent, over real sockets: probes, token, TLS, bodies, errors."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from ullage_agent import wire
from ullage_agent.actions import ActionLimits
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.app import Agent
from ullage_agent.clock import ManualClock
from ullage_agent.config import AgentConfig
from ullage_agent.errors import ConfigError, EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from ullage_agent.server import Listener, action_app, metrics_app

EVICT = {"ratio": 0.1}


class Failing(FakeAdapter):
    """Fails an action in the way it is told to."""

    error: EngineError | Exception | None = None
    gate: asyncio.Event | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.entered = asyncio.Event()

    async def act(self, action: Any, request: Any, idempotency_key: str) -> wire.ActionResult:
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().act(action, request, idempotency_key)


class Rig:
    """One agent with a simulated engine, and a client that trusts its certificate."""

    def __init__(self, agent: Agent, adapter: Failing, session: aiohttp.ClientSession, tls: Any) -> None:
        self.agent, self.adapter, self.session, self.tls = agent, adapter, session, tls
        assert agent.metrics_address is not None and agent.action_address is not None
        self.plain = f"http://127.0.0.1:{agent.metrics_address[1]}"
        self.secure = f"https://127.0.0.1:{agent.action_address[1]}"

    async def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, Any], Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        names = {"Authorization": f"Bearer {self.tls.secret}", **names}
        async with self.session.request(method, self.secure + path, data=body, headers=names) as answer:
            return answer.status, await answer.json(), answer.headers

    async def act(self, action: str, body: Any, key: str = "key-1") -> tuple[int, dict[str, Any], Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", f"/v1/actions/{action}", data, Idempotency_Key=key)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.plain + path) as answer:
            return answer.status, await answer.text()


def config(tls: Any, **changes: Any) -> AgentConfig:
    settings = {
        "engine": "sim",
        "engine_url": "-",
        "metrics_host": "127.0.0.1",
        "action_host": "127.0.0.1",
        "metrics_port": 0,
        "action_port": 0,
        "tls_cert": tls.cert,
        "tls_key": tls.key,
        "token_file": tls.token,
        "poll_seconds": 60.0,  # tests poll by hand
    }
    return AgentConfig(**{**settings, **changes})


@pytest.fixture
async def rig(tls: Any, clock: ManualClock) -> AsyncIterator[Rig]:
    adapter = Failing.simulated(PoolSpec(total=256, hot=200, cached=46), clock)
    assert isinstance(adapter, Failing)
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock)
    async with agent, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client())) as session:
        await agent.poller.poll_once()
        yield Rig(agent, adapter, session, tls)


async def test_plain_port(rig: Rig, clock: ManualClock) -> None:
    assert await rig.get("/healthz") == (200, "ok\n")
    assert await rig.get("/readyz") == (200, "ok\n")
    status, text = await rig.get("/metrics")
    assert status == 200
    assert "llm_oom_risk_score" in text
    clock.advance(1000.0)
    status, text = await rig.get("/readyz")
    assert status == 503
    assert "1000.0 s old" in text
    assert (await rig.get("/healthz"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/risk", "/v1/actions/evict", "/page"])
async def test_plain_port_offers_nothing_else(rig: Rig, path: str) -> None:
    assert (await rig.get(path))[0] == 404


async def test_openmetrics_on_demand(rig: Rig) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with rig.session.get(rig.plain + "/metrics", headers=accept) as answer:
        assert answer.content_type == "application/openmetrics-text"
        assert (await answer.text()).endswith("# EOF\n")


async def test_risk_report_is_the_wire_type(rig: Rig, clock: ManualClock) -> None:
    clock.advance(2.0)
    status, body, _ = await rig.call("GET", "/v1/risk")
    assert status == 200
    report = wire.decode(json.dumps(body).encode(), wire.RiskReport)
    assert report.sample_age_s == 2.0
    assert report.snapshot is not None
    assert report.snapshot.hot_blocks == 200
    assert report.engine.type == "fake"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer 0123456789abcdef-secre",
        "Bearer 0123456789abcdef-secret2",
        "Basic 0123456789abcdef-secret",
        "0123456789abcdef-secret",
    ],
)
@pytest.mark.parametrize("path", ["/v1/risk", "/v1/actions/evict", "/v1/actions/nonsense", "/nonsense"])
async def test_every_path_needs_the_token(rig: Rig, header: str, path: str) -> None:
    for method in ("GET", "POST"):
        status, body, headers = await rig.call(method, path, Authorization=header)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "error" in body
    assert rig.adapter.acts == []


async def test_an_untrusted_client_and_plain_http_get_nothing(rig: Rig) -> None:
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        async with aiohttp.ClientSession() as stranger, stranger.get(rig.secure + "/v1/risk"):
            pass
    with pytest.raises(aiohttp.ClientError):
        async with rig.session.get(rig.secure.replace("https", "http") + "/v1/risk"):
            pass


async def test_old_tls_is_refused(rig: Rig) -> None:
    context = rig.tls.client()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    address = rig.agent.action_address
    assert address is not None
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(*address, ssl=context)


async def test_an_eviction_end_to_end(rig: Rig) -> None:
    status, body, _ = await rig.act("evict", EVICT)
    assert status == 200
    result = wire.decode(json.dumps(body).encode(), wire.ActionResult)
    assert (result.outcome, result.blocks_freed) == ("Succeeded", 25)
    assert result.before is not None and result.after is not None
    assert result.before.free_blocks is not None
    assert result.after.free_blocks == result.before.free_blocks + 25
    assert (await rig.act("evict", EVICT))[1] == body
    assert rig.adapter.acts == ["evict"]
    assert 'ullage_agent_actions_total{action="evict",outcome="Succeeded"} 1.0' in (await rig.get("/metrics"))[1]


async def test_an_empty_body_means_defaults(rig: Rig) -> None:
    assert (await rig.act("release", b""))[0] == 200


@pytest.mark.parametrize(
    ("action", "body", "status", "named"),
    [
        ("explode", {}, 404, "explode"),
        ("evict", {}, 400, "ratio"),
        ("evict", {"ratio": 1.5}, 400, "ratio"),
        ("evict", {"ratio": "0.1"}, 400, "ratio"),
        ("evict", {"ratio": True}, 400, "ratio"),
        ("evict", {"ratio": 0.1, "timeout_s": 1e9}, 400, "timeout_s"),
        ("evict", {"ratio": 0.1, "version": "v9"}, 400, "v9"),
        ("evict", b'{"ratio": NaN}', 400, "ActionRequest"),
        ("evict", b"{", 400, "ActionRequest"),
        ("evict", b"[]", 400, "ActionRequest"),
        ("evict", b"\xff", 400, "ActionRequest"),
        ("evict", b"[" * 60_000, 400, "ActionRequest"),
        ("evict", b" " * 70_000, 413, ""),
        ("throttle", {"ttl_s": 5}, 400, "max_prompt_tokens"),
    ],
)
async def test_bad_requests(rig: Rig, action: str, body: Any, status: int, named: str) -> None:
    got, answer, _ = await rig.act(action, body)
    assert got == status
    assert named in answer["error"]
    assert rig.adapter.acts == []


async def test_wrong_methods_and_paths_are_json_too(rig: Rig) -> None:
    status, body, headers = await rig.call("GET", "/v1/actions/evict")
    assert (status, headers["Allow"]) == (405, "POST")
    assert "error" in body
    assert (await rig.call("GET", "/v2"))[0] == 404


async def test_a_reused_key_is_a_conflict(rig: Rig) -> None:
    await rig.act("evict", EVICT)
    status, body, _ = await rig.act("evict", {"ratio": 0.2})
    assert status == 409
    assert "key-1" in body["error"]
    assert (await rig.act("evict", {"ratio": 0.1, "dry_run": False}, "key-1"))[0] == 200  # same meaning


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnreachable("gone"), 502),
        (EngineTimeout("late"), 502),
        (EngineRefused("loop stuck", status=503), 502),
        (EngineRefused("no such field", status=422), 400),
        (EngineRefused("key known", status=409), 409),
        (RuntimeError("a mistake"), 500),
    ],
)
async def test_engine_errors(rig: Rig, error: Exception, status: int) -> None:
    rig.adapter.error = error
    got, body, _ = await rig.act("evict", EVICT)
    assert got == status
    assert (str(error) in body["error"]) == (status != 500)


async def test_busy_says_when_to_come_back(rig: Rig) -> None:
    rig.adapter.gate = asyncio.Event()
    first = asyncio.create_task(rig.act("drain", {}))
    await rig.adapter.entered.wait()
    status, body, headers = await rig.act("evict", EVICT, "key-2")
    assert (status, headers["Retry-After"]) == (429, "1")
    assert "drain is still running" in body["error"]
    rig.adapter.gate.set()
    assert (await first)[0] == 200


async def test_rate_limit(tls: Any, clock: ManualClock) -> None:
    adapter = Failing.simulated(PoolSpec(total=256, hot=200), clock)
    limits = ActionLimits(per_minute=1.0, burst=1)
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock, limits=limits)
    async with agent, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client())) as session:
        assert isinstance(adapter, Failing)
        rig = Rig(agent, adapter, session, tls)
        assert (await rig.act("evict", EVICT, "key-1"))[0] == 200
        status, _, headers = await rig.act("evict", EVICT, "key-2")
        assert (status, headers["Retry-After"]) == (429, "60")
        assert (await rig.act("evict", EVICT, "key-1"))[0] == 200


async def test_no_sample_yet_is_503_with_the_reason(tls: Any, clock: ManualClock) -> None:
    adapter = FakeAdapter.scripted([RuntimeError("connection refused")], clock)
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock)
    async with agent, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client())) as session:
        await agent.poller.poll_once()
        assert agent.action_address is not None
        url = f"https://127.0.0.1:{agent.action_address[1]}/v1/risk"
        async with session.get(url, headers={"Authorization": f"Bearer {tls.secret}"}) as answer:
            assert answer.status == 503
            assert "connection refused" in (await answer.json())["error"]


async def test_a_body_that_never_comes_is_not_waited_for(tls: Any, clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock)
    assert agent.credentials is not None
    app = action_app(agent.board, agent.actions, agent.credentials, body_timeout_s=0.05)
    listener = Listener(app, "--action-port")
    reader, writer = await asyncio.open_connection(*await listener.open("127.0.0.1", 0))
    head = f"POST /v1/actions/evict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tls.secret}\r\n"
    writer.write(f"{head}Content-Length: 50\r\n\r\n{{".encode())
    assert b"408" in await reader.readline()
    writer.close()
    await listener.close()
    await agent.stop()


async def test_a_renewed_certificate_and_token_are_used(rig: Rig, make_pair: Any) -> None:
    make_pair(rig.tls.cert, rig.tls.key, "second")
    rig.tls.token.write_text("another-token-of-length")
    assert rig.agent.credentials is not None
    assert rig.agent.credentials.refresh()
    connector = aiohttp.TCPConnector(ssl=rig.tls.client())  # trusts the second certificate only
    async with aiohttp.ClientSession(connector=connector) as session:
        for token, status in ((rig.tls.secret, 401), ("another-token-of-length", 200)):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(rig.secure + "/v1/risk", headers=headers) as answer:
                assert answer.status == status


async def test_a_taken_port_is_one_line_and_nothing_stays_open(rig: Rig, tls: Any, clock: ManualClock) -> None:
    assert rig.agent.metrics_address is not None and rig.agent.action_address is not None
    taken = rig.agent.action_address[1]
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    second = Agent(config(tls, action_port=taken), adapters={"sim": lambda _: adapter}, clock=clock)
    with pytest.raises(ConfigError, match=rf"--action-port {taken} is in use on 127\.0\.0\.1; .*another"):
        await second.start()
    assert second.metrics_address is not None
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*second.metrics_address)


async def test_a_foreign_address_names_the_host_option(tls: Any, clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    agent = Agent(config(tls, metrics_host="192.0.2.1"), adapters={"sim": lambda _: adapter}, clock=clock)
    with pytest.raises(ConfigError, match=r"--metrics-host 192\.0\.2\.1"):
        await agent.start()


async def test_without_credentials_there_is_no_action_port(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    settings = AgentConfig(engine="sim", engine_url="-", metrics_host="127.0.0.1", metrics_port=0)
    async with Agent(settings, adapters={"sim": lambda _: adapter}, clock=clock) as agent:
        assert agent.action_address is None
        assert agent.metrics_address is not None
    await agent.stop()


async def test_stopping_lets_a_running_action_end(tls: Any, clock: ManualClock) -> None:
    adapter = Failing.simulated(PoolSpec(total=256, hot=200), clock)
    assert isinstance(adapter, Failing)
    adapter.gate = asyncio.Event()
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock)
    await agent.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client())) as session:
        call = asyncio.create_task(Rig(agent, adapter, session, tls).act("evict", EVICT))
        await adapter.entered.wait()
        stopping = asyncio.create_task(agent.stop())
        adapter.gate.set()
        assert (await call)[0] == 200
        await stopping
    assert adapter.acts == ["evict"]


def test_apps_need_no_running_loop(tls: Any, clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(), clock)
    agent = Agent(config(tls), adapters={"sim": lambda _: adapter}, clock=clock)
    assert metrics_app(agent.board, agent.registry, fresh_s=1.0).router is not None
