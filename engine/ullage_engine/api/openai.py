"""The generating calls: `/v1/completions` and `/v1/chat/completions`.

Purpose: run a prepared call and answer it whole or as a stream. Everything that differs between the two is in
their shapes (`shapes`) and their preparation (`prepare`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ullage_engine.api.generation import Batch, Generations
from ullage_engine.api.prepare import Call, Preparer
from ullage_engine.api.schema import ChatBody, CompletionBody, GenerationBody, parse
from ullage_engine.api.shapes import ChatShape, CompletionShape, Shape, Whole
from ullage_engine.api.streaming import CLIENT_GONE, DONE, ClientGone, EventStream, event, until_gone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What every object of one answer needs."""

    shape: Shape
    call: Call
    body: GenerationBody
    created: int

    @property
    def logprobs(self) -> bool:
        return self.call.plans[0].request.sampling.logprobs is not None

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices."""
        return {
            "id": self.call.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
        }

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice. Where usage is asked for, all chunks but the last say null."""
        data = self.envelope(self.shape.chunk_object, [choice])
        return event(data | {"usage": None} if self.body.include_usage else data)


def routes(generations: Generations, preparer: Preparer, *, max_body_bytes: int) -> APIRouter:
    """The two routes."""
    router = APIRouter()
    chat_shape, completion_shape = ChatShape(), CompletionShape()

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await parse(request, ChatBody, max_bytes=max_body_bytes)
        call = await preparer.chat(_new_id(chat_shape), body)
        return await _respond(request, generations, _reply(chat_shape, call, body))

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await parse(request, CompletionBody, max_bytes=max_body_bytes)
        call = await preparer.completion(_new_id(completion_shape), body)
        return await _respond(request, generations, _reply(completion_shape, call, body))

    return router


def _new_id(shape: Shape) -> str:
    return shape.id_prefix + uuid.uuid4().hex


def _reply(shape: Shape, call: Call, body: GenerationBody) -> _Reply:
    return _Reply(shape=shape, call=call, body=body, created=int(time.time()))


async def _respond(request: Request, generations: Generations, reply: _Reply) -> Response:
    """Start the call, and answer when it is complete, or with a stream once its first token is there: until
    then a failure still has a status of its own."""
    with generations.start(reply.call.plans) as batch:
        try:
            if not reply.body.stream:
                return JSONResponse(await until_gone(request.receive, _whole(reply, batch)))
            events = _events(reply, batch)
            first = await until_gone(request.receive, anext(events))
            batch.keep()
            return EventStream(first, events)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)


async def _whole(reply: _Reply, batch: Batch) -> dict[str, Any]:
    choices = [Whole() for _ in batch.plans]
    while (step := await batch.next()) is not None:
        choices[step[0]].add(step[1])
    shaped = [reply.shape.whole(index, choice, logprobs=reply.logprobs) for index, choice in enumerate(choices)]
    return reply.envelope(reply.shape.whole_object, shaped) | {"usage": reply.call.usage}


async def _events(reply: _Reply, batch: Batch) -> AsyncGenerator[bytes, None]:
    """All events of a stream. Closing it closes the batch."""
    try:
        opened: set[int] = set()
        while (step := await batch.next()) is not None:
            index, piece = step
            opening = None if index in opened else reply.shape.opening(index)
            opened.add(index)
            if opening is not None:
                yield reply.chunk(opening)
            if piece.text or piece.details or piece.ending:
                yield reply.chunk(reply.shape.chunk(index, piece, logprobs=reply.logprobs))
        if reply.body.include_usage:
            usage = {"usage": reply.call.usage}
            yield event(reply.envelope(reply.shape.chunk_object, []) | usage)
        yield DONE
    finally:
        batch.close()
