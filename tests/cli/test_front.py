"""The front: in turn, streaming, around what is not ready, and never a half answer passed off as a whole one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from ullage_cli.front import Front, Replica, serving


@dataclass
class Upstream:
    """A small engine: says who it is, streams on demand, can be made unready or to break off."""

    name: str
    ready: bool = True
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Upstream]:
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/v1/name", self._name)
        app.router.add_post("/v1/stream", self._stream)
        app.router.add_post("/v1/half", self._half)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _name(self, request: web.Request) -> web.Response:
        self.seen.append(dict(request.headers))
        return web.json_response(
            {"name": self.name, "sent": (await request.read()).decode(), "query": request.query_string},
            headers={"X-Engine": self.name},
            status=418,
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b"data: 1\n\n")
            await self.go_on.wait()
            await response.write(b"data: 2\n\n")
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.set()
            raise
        return response

    async def _half(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await self.go_on.wait()
        assert request.transport is not None
        request.transport.abort()
        return response


@dataclass
class Setup:
    upstreams: list[Upstream]
    front: Front
    url: str
    session: aiohttp.ClientSession

    async def name(self) -> str:
        async with self.session.post(f"{self.url}/v1/name") as answer:
            return str((await answer.json())["name"])


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(name).served()) for name in "abc"]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        replicas = [Replica(each.name, each.url) for each in upstreams]
        port = free_port()
        front = await stack.enter_async_context(serving(replicas, "127.0.0.1", port))
        yield Setup(upstreams, front, f"http://127.0.0.1:{port}", session)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_replicas_take_turns(setup: Setup) -> None:
    assert [await setup.name() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


async def test_request_and_answer_go_through_unchanged(setup: Setup) -> None:
    async with setup.session.post(
        f"{setup.url}/v1/name?x=1",
        data="body",
        headers={"Authorization": "Bearer t", "Connection": "X-Hop", "X-Hop": "1"},
    ) as answer:
        assert answer.status == 418
        assert answer.headers["X-Engine"] == "a"
        assert await answer.json() == {"name": "a", "sent": "body", "query": "x=1"}
    headers = setup.upstreams[0].seen[0]
    assert headers["Authorization"] == "Bearer t"
    assert "X-Hop" not in headers


async def test_an_unready_replica_is_left_out_until_it_is_ready_again(setup: Setup) -> None:
    setup.upstreams[1].ready = False
    await setup.front.check()
    assert "b" not in [await setup.name() for _ in range(6)]
    setup.upstreams[1].ready = True
    await setup.front.check()
    assert "b" in [await setup.name() for _ in range(3)]


async def test_a_dead_replica_costs_no_request(setup: Setup) -> None:
    dead = Replica("dead", f"http://127.0.0.1:{free_port()}", ready=True)
    setup.front.replicas = (dead, *setup.front.replicas)
    assert [await setup.name() for _ in range(4)].count("dead") == 0
    assert not dead.ready


async def test_nobody_ready_is_an_openai_error_to_try_again(setup: Setup) -> None:
    for upstream in setup.upstreams:
        upstream.ready = False
    await setup.front.check()
    async with setup.session.post(f"{setup.url}/v1/name") as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert (await answer.json())["error"]["code"] == "not_ready"
    async with setup.session.get(f"{setup.url}/ready") as answer:
        assert answer.status == 503
    async with setup.session.get(f"{setup.url}/health") as answer:
        assert answer.status == 200


async def test_streams_arrive_piece_by_piece(setup: Setup) -> None:
    async with setup.session.post(f"{setup.url}/v1/stream") as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
        setup.upstreams[0].go_on.set()  # the first piece was here before the second was made
        assert await answer.content.readuntil(b"\n\n") == b"data: 2\n\n"


async def test_a_client_that_leaves_frees_the_engine(setup: Setup) -> None:
    answer = await setup.session.post(f"{setup.url}/v1/stream")
    await answer.content.readuntil(b"\n\n")
    answer.close()
    await asyncio.wait_for(setup.upstreams[0].cancelled.wait(), 30)


async def test_an_engine_that_dies_mid_answer_is_seen_by_the_client(setup: Setup) -> None:
    async with setup.session.post(f"{setup.url}/v1/half") as answer:
        assert await answer.content.readexactly(4) == b"half"
        setup.upstreams[0].go_on.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()


async def test_only_the_public_interface_is_forwarded(setup: Setup) -> None:
    for path in ("/admin/v1/kv", "/metrics", "/"):
        async with setup.session.get(setup.url + path) as answer:
            assert answer.status == 404
