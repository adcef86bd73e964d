"""One address for several replicas: a round-robin HTTP front of the engines' public interface.

It streams answers through unchanged, leaves out replicas that are not ready, and tries the next one only
while nothing of the request has reached a replica. Not a router: no queues, no cache affinity, no retries
of answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade")
)
_FRAMING = frozenset(("host", "content-length", "transfer-encoding"))
_MAX_BODY_BYTES = 16 * 2**20
_RETRY_AFTER_S = 1


@dataclass(slots=True)
class Replica:
    """An engine behind the front. `ready` is what its own `/ready` said last."""

    name: str
    url: str
    ready: bool = False


class Front:
    """Serves `/v1/*`, `/tokenize` and `/detokenize` from the ready replicas in turn."""

    def __init__(
        self, replicas: Sequence[Replica], session: aiohttp.ClientSession, *, check_seconds: float = 1.0
    ) -> None:
        self.replicas = tuple(replicas)
        self._session = session
        self._check_seconds = check_seconds
        self._turns = itertools.count()

    def application(self) -> web.Application:
        """The aiohttp application; its background task watches the replicas."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_route("*", "/v1/{rest:.*}", self._forward)
        app.router.add_route("*", "/tokenize", self._forward)
        app.router.add_route("*", "/detokenize", self._forward)
        app.cleanup_ctx.append(self._watch)
        return app

    async def check(self) -> None:
        """Ask every replica once whether it is ready."""
        await asyncio.gather(*(self._check(replica) for replica in self.replicas))

    def in_turn(self) -> list[Replica]:
        """The ready replicas, the one whose turn it is first."""
        turn = next(self._turns) % len(self.replicas)
        return [each for each in self.replicas[turn:] + self.replicas[:turn] if each.ready]

    async def _check(self, replica: Replica) -> None:
        timeout = aiohttp.ClientTimeout(total=max(2.0, self._check_seconds))
        try:
            async with self._session.get(f"{replica.url}/ready", timeout=timeout) as answer:
                replica.ready = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            replica.ready = False

    async def _watch(self, _: web.Application) -> AsyncIterator[None]:
        await self.check()
        task = asyncio.create_task(self._keep_checking(), name="front checks")
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(self._check_seconds)
            await self.check()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        states = {replica.name: replica.ready for replica in self.replicas}
        return web.json_response({"replicas": states}, status=200 if any(states.values()) else 503)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        for replica in self.in_turn():
            try:
                upstream = await self._session.request(
                    request.method,
                    replica.url + request.path_qs,
                    data=body,
                    headers=_passed_on(request.headers),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0),
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                replica.ready = False  # nothing was sent: the next one may have it
                continue
            except aiohttp.ClientError as error:
                return _refusal(502, f"replica {replica.name} broke off: {error}", "upstream_error")
            async with upstream:
                return await _stream_through(request, upstream)
        return _refusal(503, "no replica is ready; try again in a moment", "not_ready")


@asynccontextmanager
async def serving(replicas: Sequence[Replica], host: str, port: int) -> AsyncIterator[Front]:
    """Serve a front on `host:port` while the context lasts.

    Raises:
        OSError: the port cannot be bound.
    """
    # Compressed answers go through as they are.
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        front = Front(replicas, session)
        runner = web.AppRunner(front.application(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield front
        finally:
            await runner.cleanup()


async def _stream_through(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=_passed_on(upstream.headers))
    if "Content-Length" in upstream.headers:
        response.content_length = int(upstream.headers["Content-Length"])
    await response.prepare(request)
    try:
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
    except aiohttp.ClientError:
        # The client must not take half an answer for a whole one: break the connection without an ending.
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named_by_connection = {part.strip().lower() for part in headers.get("Connection", "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _HOP_BY_HOP | _FRAMING | named_by_connection:
            kept.add(name, value)
    return kept


def _refusal(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else {}
    return web.json_response({"error": error}, status=status, headers=headers)
