"""The operator's plain HTTP side: `/metrics`, `/healthz` (every sweep ends), `/readyz` (watching, or standing by)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST


@asynccontextmanager
async def serve(
    host: str,
    port: int,
    *,
    registry: CollectorRegistry,
    ready: Callable[[], bool],
    healthy: Callable[[], bool],
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; gives the address really bound."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if healthy() else web.Response(status=503, text="a sweep is stuck\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready() else web.Response(status=503, text="not watching yet\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        yield bound[0], bound[1]
    finally:
        await runner.cleanup()
