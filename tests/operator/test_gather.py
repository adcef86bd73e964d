"""Reading agents that are slow, hostile, dead or impostors: always an observation, never an exception."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ullage_agent.wire import ActionRequest, EngineIdentity, RiskReport, encode
from ullage_operator import gather as gather_module
from ullage_operator.certificates import Credentials, client_context, issue
from ullage_operator.errors import AgentRefused, AgentUnreachable
from ullage_operator.gather import AgentClient, gather
from ullage_operator.observation import AgentTarget

DNS_NAME = "web.prod.agents.ullage.dev"
REPORT = RiskReport(
    engine=EngineIdentity(type="fake", instance="i"), generated_at=0, sample_age_s=0.1, score=1.0, winner="classic"
)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def server(folder: Path, credentials: Credentials, answer: Answer) -> AsyncIterator[AgentTarget]:
    (folder / "cert.pem").write_text(credentials.certificate)
    (folder / "key.pem").write_text(credentials.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        port = runner.addresses[0][1]
        yield AgentTarget(pod="p", uid="u", url=f"https://127.0.0.1:{port}", server_name=DNS_NAME)
    finally:
        await runner.cleanup()


@pytest.fixture
def credentials() -> Credentials:
    return issue(DNS_NAME, now=time.time())


def client(session: aiohttp.ClientSession, credentials: Credentials) -> AgentClient:
    return AgentClient(session, credentials.token, client_context(credentials))


async def good(_: web.Request) -> web.Response:
    return web.Response(body=encode(REPORT))


async def huge(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * (2 * gather_module.MAX_ANSWER_BYTES))


async def garbage(_: web.Request) -> web.Response:
    return web.Response(body=b'{"score": ')


async def out_of_range(_: web.Request) -> web.Response:
    return web.Response(body=encode(REPORT).replace(b'"score":1.0', b'"score":101.0'))


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("https://127.0.0.1:1/")


async def unauthorized(_: web.Request) -> web.Response:
    return web.Response(status=401, text='{"error": "no"}')


async def broken(_: web.Request) -> web.Response:
    return web.Response(status=502, text='{"error": "engine"}')


async def hangs_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def test_a_good_answer(session: Any, credentials: Credentials, tmp_path: Path) -> None:
    async with server(tmp_path, credentials, good) as target:
        (observation,) = await gather(client(session, credentials), [target], clock=lambda: 5.0)
    assert observation.report == REPORT
    assert observation.received_at == 5.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (huge, "more than 1048576 bytes"),
        (garbage, "unreadable report"),
        (out_of_range, "score is 101.0"),
        (elsewhere, "HTTP 302"),
        (unauthorized, "HTTP 401"),
        (broken, "HTTP 502"),
        (hangs_up, "Disconnected"),
    ],
)
async def test_a_bad_answer(
    session: Any, credentials: Credentials, tmp_path: Path, answer: Answer, expected: str
) -> None:
    async with server(tmp_path, credentials, answer) as target:
        (observation,) = await gather(client(session, credentials), [target], clock=time.time)
    assert observation.report is None
    assert expected in (observation.error or "")


async def test_nobody_listens(session: Any, credentials: Credentials) -> None:
    target = AgentTarget(pod="p", uid="u", url="https://127.0.0.1:1", server_name=DNS_NAME)
    (observation,) = await gather(client(session, credentials), [target], clock=time.time)
    assert "ClientConnectorError" in (observation.error or "")


async def test_a_hanging_agent_does_not_hold_up_the_others(
    session: Any, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "READ_TIMEOUT_S", 0.3)
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    async with (
        server(tmp_path / "slow", credentials, hang) as slow,
        server(tmp_path / "fast", credentials, good) as fast,
    ):
        first, second = await gather(client(session, credentials), [slow, fast], clock=time.time)
        released.set()
    assert "no answer within" in (first.error or "")
    assert second.report == REPORT


async def test_only_so_many_at_once(session: Any, credentials: Credentials, tmp_path: Path) -> None:
    inside, most = 0, 0

    async def count(_: web.Request) -> web.Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.005)
        inside -= 1
        return web.Response(body=encode(REPORT))

    async with server(tmp_path, credentials, count) as target:
        seen = await gather(client(session, credentials), [target] * 40, clock=time.time, limiter=asyncio.Semaphore(4))
    assert len(seen) == 40
    assert all(o.report for o in seen)
    assert most <= 4


async def test_an_impostor_gets_no_token(session: Any, credentials: Credentials, tmp_path: Path) -> None:
    """Another certificate for the right name, and the right certificate under another name: both fail the handshake."""
    asked: list[str] = []

    async def listen(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization", ""))
        return web.Response(body=encode(REPORT))

    impostor = issue(DNS_NAME, now=time.time())
    async with server(tmp_path, impostor, listen) as target:
        (first,) = await gather(client(session, credentials), [target], clock=time.time)
    async with server(tmp_path, credentials, listen) as target:
        renamed = AgentTarget(pod="p", uid="u", url=target.url, server_name="other.prod.agents.ullage.dev")
        (second,) = await gather(client(session, credentials), [renamed], clock=time.time)
    assert "Certificate" in (first.error or "")
    assert "Certificate" in (second.error or "")
    assert asked == []


@pytest.mark.parametrize(
    ("status", "error"), [(400, AgentRefused), (401, AgentRefused), (409, AgentRefused), (502, AgentUnreachable)]
)
async def test_an_action_is_refused_or_unknown(
    session: Any, credentials: Credentials, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    keys: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers["Idempotency-Key"])
        return web.Response(status=status, text="{}")

    async with server(tmp_path, credentials, answer) as target:
        with pytest.raises(error):
            await client(session, credentials).act(target, "evict", ActionRequest(ratio=0.2), key="k-1")
    assert keys == ["k-1"]


async def test_agents_that_were_silent_do_not_hold_up_the_others(build: Any) -> None:
    """One place for those that answer, held by none that did not the last time."""
    release = asyncio.Event()

    class Agents:
        async def risk(self, target: AgentTarget) -> Any:
            if target.pod == "dead":
                await release.wait()
                raise AgentUnreachable("no answer within 2 s")
            if target.pod == "last":
                release.set()
            return build.observation().report

    targets = [build.target(pod) for pod in ("dead", "a", "last")]
    async with asyncio.timeout(20):
        found = await gather(
            Agents(),  # type: ignore[arg-type]
            targets,
            clock=lambda: 0.0,
            limiter=asyncio.Semaphore(1),
            silent={"uid-dead"},
            silent_limiter=asyncio.Semaphore(1),
        )
    assert [o.report is not None for o in found] == [False, True, True]
