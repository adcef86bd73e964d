"""HTTP of the agent: a plain port for metrics and probes, a TLS port for risk and actions.

Handlers translate between HTTP and `board`, `actions`; they decide nothing. Every answer of the TLS port is
JSON, errors as `{"error": "…"}`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ullage_agent import wire
from ullage_agent.actions import ActionRunner
from ullage_agent.board import Board
from ullage_agent.credentials import Credentials
from ullage_agent.errors import (
    AgentError,
    BadAction,
    Busy,
    ConfigError,
    EngineError,
    EngineRefused,
    KeyReused,
)
from ullage_agent.page import Page

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 5.0
LINGER_S = 0.5
"""How long an unread body may still arrive after the answer: enough for the client to see the answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def metrics_app(
    board: Board, registry: CollectorRegistry, *, fresh_s: float, page: Page | None = None
) -> web.Application:
    """The plain port: `/metrics`, `/healthz`, `/readyz`, and the page at `/`."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        age = board.sample_age_s()
        if age is not None and age <= fresh_s:
            return web.Response(text="ok\n")
        state = "no sample yet" if age is None else f"the last sample is {age:.1f} s old"
        return web.Response(status=503, text=f"{state}: {board.error or 'the first reading is under way'}\n")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    if page is not None:
        page.add_to(app)
    return app


def action_app(
    board: Board,
    runner: ActionRunner,
    credentials: Credentials,
    *,
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> web.Application:
    """The TLS port: `/v1/risk` and `/v1/actions/{action}`, both behind the bearer token."""

    async def risk(_: web.Request) -> web.Response:
        report = board.report()
        if report is None:
            return _error(503, f"no sample yet: {board.error or 'the first reading is under way'}")
        return web.Response(body=wire.encode(report), content_type="application/json")

    async def act(request: web.Request) -> web.Response:
        name = request.match_info["action"]
        if name not in wire.ACTIONS:
            return _error(404, f"there is no action {name[:40]!r}; there are {', '.join(wire.ACTIONS)}")
        async with asyncio.timeout(body_timeout_s):
            body = await request.read()
        parameters = wire.decode(body or b"{}", wire.ActionRequest)
        key = request.headers.get("Idempotency-Key")
        result = await runner.run(name, parameters, key)
        return web.Response(body=wire.encode(result), content_type="application/json")

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not credentials.accepts(request.headers.get("Authorization")):
            return _error(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        return await handler(request)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json, guard])
    app.router.add_get("/v1/risk", risk)
    app.router.add_post("/v1/actions/{action}", act)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _error(error.status, error.reason or "error", allowed)
    except TimeoutError:
        return _error(408, "the body did not arrive in time")
    except Busy as error:
        return _error(429, str(error), {"Retry-After": str(math.ceil(error.retry_after_s))})
    except (wire.WireError, AgentError) as error:
        return _error(status_of(error), str(error))
    except Exception:
        log.exception("%s %s failed in an unforeseen way", request.method, request.path)
        return _error(500, "unforeseen failure; see the agent's log")


def status_of(error: wire.WireError | AgentError) -> int:
    """HTTP status of an error. What the engine finds wrong with a request is the caller's error."""
    if isinstance(error, EngineRefused) and error.status in (400, 422):
        return 400
    if isinstance(error, KeyReused) or (isinstance(error, EngineRefused) and error.status == 409):
        return 409
    if isinstance(error, wire.WireError | BadAction):
        return 400
    return 502 if isinstance(error, EngineError) else 500


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)


class Listener:
    """One bound port serving one application."""

    def __init__(self, app: web.Application, option: str) -> None:
        self._option = option
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S, lingering_time=LINGER_S)

    async def open(self, host: str, port: int, context: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Bind and serve; the address really bound.

        Raises:
            ConfigError: the address cannot be bound; the message names option, port and remedy. Nothing is
                left open.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=context).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(bind_problem(self._option, host, port, error)) from error
        address: Any = self._runner.addresses[0]
        return str(address[0]), int(address[1])

    async def close(self) -> None:
        """Accept nothing more, let running handlers end within a bound. Safe to call twice."""
        await self._runner.cleanup()


def bind_problem(option: str, host: str, port: int, error: OSError) -> str:
    """One line on why an address cannot be bound and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"{option} {port} is in use on {host}; stop what listens there or give another (0: any free one)"
    if error.errno == errno.EACCES:
        return f"{option} {port} on {host} needs more rights; give a port above 1023 (0: any free one)"
    host_option = option.replace("-port", "-host")
    return f"{host_option} {host} cannot be bound ({error.strerror or error}); give an address of this machine"
