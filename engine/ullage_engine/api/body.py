"""Reads request bodies within bounds of size and time, for both interfaces."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from ullage_engine.api.errors import ApiError

READ_SECONDS = 30.0
"""How long a body may take to arrive."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 beyond `max_bytes`, 408 when it did not arrive in time, 400 when the client went away.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _collect(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the request body did not arrive within {READ_SECONDS:g} s") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client closed the connection before its request was complete") from error


async def _collect(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:  # uvicorn reads the rest and throws it away
            raise ApiError(
                413,
                f"the request body has more than {max_bytes} bytes; send less, or raise the server's --max-body",
                code="body_too_large",
            )
        parts.append(part)
    return b"".join(parts)
