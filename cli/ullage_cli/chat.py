"""A small streaming client of the OpenAI chat API that reports honestly.

A refusal for now (429 with `Retry-After`) is waited for and tried again: one request in the end. Everything
else that is not a complete answer is a failure with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

_MAX_RETRY_AFTER_S = 30.0
_MAX_EVENT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One chat request. `seed` makes the answer repeatable on an unchanged engine."""

    system: str
    user: str
    max_tokens: int
    seed: int
    temperature: float = 0.8

    @property
    def characters(self) -> int:
        """Length of the prompt's text."""
        return len(self.system) + len(self.user)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a request ended. `failure` is None exactly when a complete answer came."""

    failure: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusals: int = 0
    """Times it was told to come back later."""


class _Failure(Exception):
    pass


class _ComeBackLater(Exception):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class ChatClient:
    """Asks one server. `sleep` is injected so that tests need not wait."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        *,
        silence_s: float = 60.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=silence_s)
        self._sleep = sleep

    async def ask(self, question: Question) -> Answer:
        """Send a question until it is answered or fails; never raises for what a server can do."""
        refusals = 0
        while True:
            try:
                text, usage = await self._once(question)
            except _ComeBackLater as later:
                refusals += 1
                await self._sleep(later.seconds)
            except _Failure as failure:
                return Answer(failure=str(failure), refusals=refusals)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return Answer(failure=f"{type(error).__name__}: {error}".rstrip(": "), refusals=refusals)
            else:
                return Answer(
                    text=text,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    refusals=refusals,
                )

    async def _once(self, question: Question) -> tuple[str, _Usage]:
        async with self._session.post(self._url, json=_body(self._model, question), timeout=self._timeout) as reply:
            if reply.status == 429:
                raise _later_or_failure(reply)
            if reply.status != 200:
                raise _Failure(f"HTTP {reply.status}: {(await reply.text())[:200]}")
            return await _read_stream(reply)


def _body(model: str, question: Question) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": question.system},
            {"role": "user", "content": question.user},
        ],
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _later_or_failure(reply: aiohttp.ClientResponse) -> Exception:
    value = reply.headers.get("Retry-After")
    try:
        seconds = float(value or "")
    except ValueError:
        return _Failure(f"HTTP 429 with Retry-After {value!r}, which is not a number of seconds")
    return _ComeBackLater(min(max(seconds, 0.1), _MAX_RETRY_AFTER_S))


async def _read_stream(reply: aiohttp.ClientResponse) -> tuple[str, _Usage]:
    parts: list[str] = []
    usage: _Usage | None = None
    finished = False
    async for data in _events(reply):
        if data == b"[DONE]":
            if not finished or usage is None:
                raise _Failure("the stream ended without a finish reason and usage")
            return "".join(parts), usage
        event = _parsed(data)
        if event.error is not None:
            raise _Failure(f"error in the stream: {event.error.message}")
        if event.usage is not None:
            usage = event.usage
        for choice in event.choices:
            parts.append(choice.delta.content or "")
            if choice.finish_reason in ("stop", "length"):
                finished = True
            elif choice.finish_reason is not None:
                raise _Failure(f"the answer ended with finish reason {choice.finish_reason!r}")
    raise _Failure("the connection ended before the answer did")


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    buffered = b""
    async for chunk in reply.content.iter_any():
        *lines, buffered = (buffered + chunk).split(b"\n")
        if len(buffered) > _MAX_EVENT_BYTES:
            raise _Failure("an event of the stream is longer than 1 MiB")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


def _parsed(data: bytes) -> _Event:
    try:
        return msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError as error:
        raise _Failure(f"an event of the stream cannot be read: {error}") from error
