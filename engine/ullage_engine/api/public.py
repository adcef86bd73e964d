"""The public interface: the OpenAI calls, tokenizing, probes and metrics.

Purpose: put the parts together as one ASGI application. Without an API key everything is open; with keys all but
the probes and metrics ask for one. Non-goal: sockets (`server`).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ullage_engine.api import openai
from ullage_engine.api.core import EngineCore
from ullage_engine.api.errors import ApiError, install, invalid
from ullage_engine.api.generation import Generations
from ullage_engine.api.prepare import Preparer
from ullage_engine.api.schema import DetokenizeBody, TokenizeBody, parse
from ullage_engine.api.text import HfTokenizer, TextCodec
from ullage_engine.config import ServerConfig
from ullage_engine.metrics import HttpMetrics, make_registry

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What kubelets and Prometheus ask for, without a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicApp:
    """The application, and what the server needs to stop it well and to tell the agent of it."""

    app: FastAPI
    generations: Generations
    preparer: Preparer
    metrics: HttpMetrics


def create_public_app(
    core: EngineCore,
    tokenizer: HfTokenizer,
    config: ServerConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> PublicApp:
    """Everything under the public port."""
    codec = TextCodec(tokenizer)
    registry, metrics = make_registry(core)
    generations = Generations(core, metrics, max_wait_s=config.max_wait_s, clock=clock)
    preparer = Preparer(core, codec)
    app = FastAPI(title="Ullage engine", openapi_url=None)
    install(app)
    app.add_middleware(_CountResponses, metrics=metrics)
    if config.api_keys:
        app.add_middleware(_RequireKey, keys=config.api_keys)
    app.include_router(openai.routes(generations, preparer, max_body_bytes=config.max_body_bytes))
    _add_models(app, core)
    _add_tokenizing(app, core, codec, preparer, config.max_body_bytes)
    _add_probes(app, core, config)
    _add_metrics(app, registry)
    return PublicApp(app=app, generations=generations, preparer=preparer, metrics=metrics)


def _add_models(app: FastAPI, core: EngineCore) -> None:
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {
            "id": core.model_name,
            "object": "model",
            "created": created,
            "owned_by": "ullage",
            "max_model_len": core.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request) -> JSONResponse:
        name = str(request.path_params["name"])
        if name != core.model_name:
            raise ApiError(404, f"model {name[:200]!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(model())


def _add_tokenizing(app: FastAPI, core: EngineCore, codec: TextCodec, preparer: Preparer, max_body_bytes: int) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        body = await parse(request, TokenizeBody, max_bytes=max_body_bytes)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give exactly one of prompt and messages", param="prompt")
        if body.messages is not None:
            ids = await preparer.encode_chat(body.messages)
        else:
            ids = await preparer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
        return JSONResponse({"tokens": list(ids), "count": len(ids), "max_model_len": core.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        body = await parse(request, DetokenizeBody, max_bytes=max_body_bytes)
        ids = preparer.check_ids(body.tokens, param="tokens")
        return JSONResponse({"prompt": codec.decode(ids, skip_special_tokens=False)})


def _add_probes(app: FastAPI, core: EngineCore, config: ServerConfig) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        age = core.step_age_s()
        if age > config.health_step_age_s:
            reason = f"the step loop has not moved for {age:.1f} s (limit {config.health_step_age_s:g} s)"
            return JSONResponse({"status": "stuck", "reason": reason, "step_age_s": age}, 503)
        return JSONResponse({"status": "ok", "step_age_s": age})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        age = core.step_age_s()
        reason = None
        if core.snapshot().draining:
            reason = "draining"
        elif age > config.ready_step_age_s:
            reason = f"the step loop has not moved for {age:.1f} s (limit {config.ready_step_age_s:g} s)"
        if reason is not None:
            return JSONResponse({"status": "unready", "reason": reason}, 503)
        return JSONResponse({"status": "ready", "model": core.model_name})


def _add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=None, headers={"Content-Type": content_type})


class _RequireKey:
    """Refuses every call without a key, but for `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed; send Authorization: Bearer KEY",
            type_="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")
        known = [hmac.compare_digest(key, one) for one in self._keys]
        return scheme.lower() == "bearer" and any(known)


class _CountResponses:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._responses = metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._responses.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
