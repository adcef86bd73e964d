"""The operator's TLS side: `POST /validate` for the API server, `POST /v1/alerts` for Alertmanager.

Alerts need the bearer token; reviews do not: they change nothing and say nothing that the schema does not.
A standby answers alerts with 503, so that they are sent again and reach the leader.
"""

from __future__ import annotations

import hmac
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ullage_operator.admission import review
from ullage_operator.receiver import Told, read_alerts

MAX_BODY_BYTES = 3 * 1024 * 1024
"""Longest body: two copies of the largest object that the API server stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What the routes need."""

    token: Callable[[], str]
    """Present bearer token; empty: no alert is taken."""
    tell: Callable[[Told], bool] | None
    """Takes an alert in; False when its service is not kept. May be None: then there is no such route."""
    leading: Callable[[], bool]
    clock: Callable[[], float]

    async def validate(self, request: web.Request) -> web.Response:
        """Answer an AdmissionReview."""
        try:
            return web.json_response(review(await _json(request)))
        except ValueError as error:
            return _error(400, str(error))

    async def alerts(self, request: web.Request) -> web.Response:
        """Take Alertmanager's notification in."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        token = self.token()
        if not token or not hmac.compare_digest(given.encode(), token.encode()):
            return web.json_response({"error": "token"}, status=401, headers={"WWW-Authenticate": "Bearer"})
        if not self.leading() or self.tell is None:
            return web.json_response({"error": "standby"}, status=503, headers={"Retry-After": "1"})
        try:
            told = list(read_alerts(await _json(request), now=self.clock()))
        except ValueError as error:
            return _error(400, str(error))
        accepted = sum(1 for each in told if each is not None and self.tell(each))
        return web.json_response({"accepted": accepted, "ignored": len(told) - accepted})


@asynccontextmanager
async def serving(endpoint: Endpoint, host: str, port: int, context: ssl.SSLContext) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; gives the address really bound."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/validate", endpoint.validate), web.post("/v1/alerts", endpoint.alerts)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        bound = runner.addresses[0]
        yield bound[0], bound[1]
    finally:
        await runner.cleanup()


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(body, dict):
        raise ValueError("the body is not an object")
    return body


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
