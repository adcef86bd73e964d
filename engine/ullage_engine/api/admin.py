"""The admin interface: what the agent beside the engine reads and asks for.

Purpose: the calls of `docs/contracts.md` under `/admin/v1`, with strict bodies and idempotent acts. Errors are
`{"error": {"field", "value", "message"}}` for a bad body and `{"error": {"message"}}` else. It has no
authentication of its own: `server` opens it on a Unix socket or a loopback address only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ullage_engine.api.body import read_body
from ullage_engine.api.core import EngineCore
from ullage_engine.api.drain import Door
from ullage_engine.api.errors import ApiError, shown
from ullage_engine.api.idempotency import AnswerStore, KeyReused, TooManyKeys
from ullage_engine.errors import LoopUnavailable
from ullage_engine.metrics import Latency
from ullage_engine.request import AdmissionLimit, Destination

MAX_BODY = 64 * 1024
MAX_KEY = 256
EVICT_SECONDS = 10.0
"""How long an eviction, a compaction or the end of a drain may wait for the step loop."""
MAX_COMPACT_MS = 10_000.0
"""All sequences wait while a compaction runs."""
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class EvictBody(BaseModel):
    """How much to evict, and where to."""

    model_config = _STRICT

    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    bytes: Annotated[int, Field(gt=0, le=1 << 60)] | None = None
    target_usage: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of all blocks that may stay occupied."""
    tiers: Annotated[list[Destination], Field(fail_fast=True, min_length=1, max_length=2)] = ["drop"]
    dry_run: bool = False

    @model_validator(mode="after")
    def _check(self) -> EvictBody:
        if [self.ratio, self.bytes, self.target_usage].count(None) != 2:
            raise PydanticCustomError("ratio", "give exactly one of ratio, bytes and target_usage")
        return self


class CompactBody(BaseModel):
    """How long a compaction may take."""

    model_config = _STRICT

    budget_ms: Annotated[float, Field(gt=0, le=MAX_COMPACT_MS)]


class AdmissionBody(BaseModel):
    """A limit on new requests; both null lifts it."""

    model_config = _STRICT

    max_prompt_tokens: Annotated[int, Field(gt=0, le=1 << 40)] | None = None
    max_total_blocks: Annotated[int, Field(gt=0, le=1 << 40)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=86_400)] | None = None

    @model_validator(mode="after")
    def _check(self) -> AdmissionBody:
        if self.limits and self.ttl_s is None:
            raise PydanticCustomError("ttl_s", "give ttl_s (seconds, up to a day): a limit must lift by itself")
        return self

    @property
    def limits(self) -> bool:
        """Whether there is a limit at all."""
        return self.max_prompt_tokens is not None or self.max_total_blocks is not None


class DrainBody(BaseModel):
    """How long to wait for requests in flight."""

    model_config = _STRICT

    timeout_s: Annotated[float, Field(ge=0, le=3600)] = 30.0


class ResumeBody(BaseModel):
    """Nothing to say."""

    model_config = _STRICT


BodyT = TypeVar("BodyT", EvictBody, CompactBody, AdmissionBody, DrainBody, ResumeBody)
Answer = dict[str, Any]


class AdminError(Exception):
    """A call refused or failed."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.status = status
        self.error = error


class Acts:
    """The acts themselves, without HTTP."""

    def __init__(self, core: EngineCore, door: Door, clock: Callable[[], float]) -> None:
        self._core = core
        self._door = door
        self._clock = clock

    async def evict(self, body: EvictBody) -> Answer:
        """Evict, off the event loop since the step loop may take its time."""
        if "host" in body.tiers and self._core.snapshot().host is None:
            raise _bad_body(
                "tiers", shown(body.tiers), "can only be drop: this engine has no host tier (--host-memory)"
            )
        report = await asyncio.to_thread(
            self._core.evict,
            ratio=body.ratio,
            bytes_=body.bytes,
            target_usage=body.target_usage,
            dry_run=body.dry_run,
            timeout_s=EVICT_SECONDS,
            tiers=tuple(body.tiers),
        )
        return asdict(report)

    async def compact(self, body: CompactBody) -> Answer:
        """Compact, off the event loop like an eviction."""
        report = await asyncio.to_thread(self._core.compact, budget_ms=body.budget_ms, timeout_s=EVICT_SECONDS)
        return asdict(report)

    async def admission(self, body: AdmissionBody) -> Answer:
        """Set or lift the limit."""
        limit = None
        if body.limits and body.ttl_s is not None:
            limit = AdmissionLimit(
                max_prompt_tokens=body.max_prompt_tokens,
                max_total_blocks=body.max_total_blocks,
                expires_at=self._clock() + body.ttl_s,
            )
        self._core.set_admission(limit)
        return {
            "max_prompt_tokens": body.max_prompt_tokens,
            "max_total_blocks": body.max_total_blocks,
            "expires_in_s": body.ttl_s if limit else None,
        }

    async def drain(self, body: DrainBody) -> Answer:
        """Stop admitting and wait."""
        return asdict(await self._door.drain(body.timeout_s))

    async def resume(self, body: ResumeBody) -> Answer:
        """Admit again, unless the server is stopping."""
        return {"draining": await self._door.resume(EVICT_SECONDS)}


def create_admin_app(
    core: EngineCore,
    door: Door,
    *,
    latency: Callable[[], Latency] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The admin application; `clock` is the core's, monotonic. Without `latency` the snapshot tells none."""
    app = FastAPI(title="Ullage engine admin", openapi_url=None)
    acts = Acts(core, door, clock)
    store: AnswerStore[Answer] = AnswerStore(clock)
    _add_errors(app)

    @app.get("/admin/v1/kv")
    async def kv() -> JSONResponse:
        snapshot = core.snapshot().to_json(clock())
        return JSONResponse(snapshot if latency is None else snapshot | {"latency": latency()})

    @app.get("/admin/v1/kv/blocks")
    async def blocks() -> JSONResponse:
        return JSONResponse((await asyncio.to_thread(core.block_map)).to_json())

    @app.post("/admin/v1/kv/evict")
    async def evict(request: Request) -> JSONResponse:
        return await _act(request, store, EvictBody, acts.evict)

    @app.post("/admin/v1/kv/compact")
    async def compact(request: Request) -> JSONResponse:
        return await _act(request, store, CompactBody, acts.compact)

    @app.post("/admin/v1/admission")
    async def admission(request: Request) -> JSONResponse:
        return await _act(request, store, AdmissionBody, acts.admission)

    @app.post("/admin/v1/drain")
    async def drain_(request: Request) -> JSONResponse:
        return await _act(request, store, DrainBody, acts.drain)

    @app.post("/admin/v1/resume")
    async def resume(request: Request) -> JSONResponse:
        return await _act(request, store, ResumeBody, acts.resume)

    return app


async def _act(
    request: Request,
    store: AnswerStore[Answer],
    kind: type[BodyT],
    act: Callable[[BodyT], Awaitable[Answer]],
) -> JSONResponse:
    body = _parse(await read_body(request, MAX_BODY), kind)
    key = request.headers.get("idempotency-key")
    if key is None:
        return JSONResponse(await act(body))
    if not 1 <= len(key) <= MAX_KEY:
        raise _bad_body("Idempotency-Key", shown(key), f"give 1 to {MAX_KEY} characters")
    fingerprint = f"{request.url.path} {body.model_dump_json()}"
    return JSONResponse(await store.run(key, fingerprint, lambda: act(body)))


def _parse(data: bytes, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        by_rule = first["type"] if first["type"] in kind.model_fields else "body"
        field = ".".join(map(str, first["loc"])) or by_rule
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            message = f"unknown field; known are {', '.join(kind.model_fields) or 'none'}"
        raise _bad_body(field, _wire(first["input"]), message) from error


def _wire(value: object) -> object:
    """A value at fault as JSON can carry it: itself if it is a plain number, else its spelling."""
    plain = value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
    return value if plain else shown(value)


def _bad_body(field: str, value: object, message: str) -> AdminError:
    return AdminError(422, {"field": field, "value": value, "message": message})


def _add_errors(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> JSONResponse:
        found = _translate(error)
        return JSONResponse({"error": found.error}, found.status)

    for kind in (AdminError, ApiError, LoopUnavailable, KeyReused, TooManyKeys, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _translate(error: Exception) -> AdminError:
    match error:
        case AdminError():
            return error
        case ApiError():
            return AdminError(error.status, {"message": error.message})
        case LoopUnavailable():
            return AdminError(503, {"message": str(error)})
        case KeyReused():
            message = "this Idempotency-Key came before with another call; use a new key for a new act"
            return AdminError(409, {"message": message})
        case TooManyKeys():
            return AdminError(503, {"message": "too many acts are under way; try again later"})
        case HTTPException():
            return AdminError(error.status_code, {"message": str(error.detail)})
    return AdminError(500, {"message": "internal error; the server's log says more"})
