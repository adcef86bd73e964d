"""HTTP to one engine over a Unix socket or TCP, with every answer bounded in size and time.

Non-goals: following redirects, proxies, decompression, cookies: a pod-local peer needs none, and each is a way
for a broken peer to hurt the agent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ullage_agent.errors import ConfigError, EngineProtocolError, EngineTimeout, EngineUnreachable

CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an engine listens."""

    base: str
    """Scheme and authority for URLs, without a slash at the end."""
    socket_path: str | None = None
    """Unix socket to connect to instead of the authority."""

    def __str__(self) -> str:
        return self.base if self.socket_path is None else f"unix:{self.socket_path}"


def parse_endpoint(url: str) -> Endpoint:
    """Read `unix:PATH` or `http://HOST:PORT`.

    Raises:
        ConfigError: it is neither.
    """
    remedy = "give unix:PATH or http://HOST:PORT"
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"--engine-url {url!r} names no socket; {remedy}")
        return Endpoint(base="http://engine", socket_path=path)
    try:
        parts = urlsplit(url)
        has_authority = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ConfigError(f"--engine-url {url!r}: {error}; {remedy}") from error
    if parts.scheme not in ("http", "https") or not has_authority or parts.query or parts.path not in ("", "/"):
        raise ConfigError(f"--engine-url {url!r} is not understood; {remedy}")
    return Endpoint(base=f"{parts.scheme}://{parts.netloc}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status and whole body of an answer."""

    status: int
    body: bytes


class EngineHttp:
    """One session to one engine, opened at the first call. Calls may overlap."""

    def __init__(self, endpoint: Endpoint, *, max_bytes: int) -> None:
        self.endpoint = endpoint
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float) -> Answer:
        """Raises EngineUnreachable, EngineTimeout or EngineProtocolError (too long an answer)."""
        return await self._call("GET", path, None, {}, timeout_s)

    async def options(self, path: str, *, timeout_s: float) -> Answer:
        """Ask whether a route exists; acts on nothing. Raises as `get` does."""
        return await self._call("OPTIONS", path, None, {}, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], *, key: str, timeout_s: float) -> Answer:
        """Send JSON under an idempotency key. Raises as `get` does.

        A connection that the engine closed while it idled is opened anew once: the key makes that safe.
        """
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        try:
            return await self._call("POST", path, data, headers, timeout_s)
        except EngineUnreachable as error:
            if not isinstance(error.__cause__, aiohttp.ServerDisconnectedError):
                raise
            return await self._call("POST", path, data, headers, timeout_s)

    async def close(self) -> None:
        """Close the session; safe to call twice."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(
                    method, self.endpoint.base + path, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                return Answer(status=response.status, body=await self._read(response, path))
        except TimeoutError as error:
            raise EngineTimeout(f"{method} {path}: no whole answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnreachable(f"{method} {path} at {self.endpoint}: {_reason(error)}") from error

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            body += chunk
            if len(body) > self._max_bytes:
                raise EngineProtocolError(f"{path}: the answer is longer than {self._max_bytes} bytes")
        return bytes(body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self.endpoint.socket_path
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector() if path is None else aiohttp.UnixConnector(path),
                timeout=aiohttp.ClientTimeout(total=None),  # each call brings its own bound
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
            )
        return self._session


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
