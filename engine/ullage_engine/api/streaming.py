"""Server-sent events, and noticing that a client went away.

A client that closes its connection ends its work at once, streamed or not. After a stream has begun, an error
can only be told as an event: `data: {"error": …}`, after which the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ullage_engine.api.errors import translate

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status of answers that nobody reads; seen in metrics only."""


class ClientGone(Exception):
    """The client closed its connection."""


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, or cancel it when the client goes away. The request's body must have been read.

    Raises:
        ClientGone: the client went away first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """A response of events: the first, which is known already, and the rest as they come."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, unless the client goes away."""
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGone:
            return
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, self._first)
        try:
            async for part in self._rest:
                await _send_part(send, part)
        except Exception as error:  # noqa: BLE001 - the status is sent, so the error goes into the stream
            await _send_part(send, event(_told(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
    # Parts that are ready would else be sent in one go: others wait, and a lost connection is not noticed meanwhile.
    await asyncio.sleep(0)


def _told(error: Exception) -> dict[str, Any]:
    found = translate(error)
    if found.code == "internal_error":
        log.error("a streamed request failed", exc_info=error)
    return found.body()
