"""Asks an engine for its facts and for answers of a known length, and notes when each token came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from ..errors import BrokenLoop, InputError

_SILENCE_S = 120.0
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an engine says of itself; None: it does not say."""

    model: str
    token_bytes: float | None
    pool_bytes: int | None


class EngineClient:
    """One engine's public interface."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
        self._asked = 0
        self._model = ""

    async def facts(self) -> Facts:
        """Its model, and of Ullage's engine the size of a token and of the pool.

        Raises:
            InputError: nothing there that speaks the OpenAI API.
        """
        try:
            async with self._session.get(f"{self.url}/v1/models", timeout=self._timeout) as reply:
                models = await reply.json(content_type=None)
            self._model = str(models["data"][0]["id"])
            async with self._session.get(f"{self.url}/metrics", timeout=self._timeout) as reply:
                metrics = await reply.text() if reply.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise InputError(f"--measure: {self.url} does not answer as an engine ({reason}); check the URL") from error
        return read_facts(self._model, metrics)

    async def answer(self, count: int, tokens: int, clock: Callable[[], float]) -> list[list[float]]:
        """Times at which the tokens of `count` simultaneous answers came.

        Raises:
            BrokenLoop: an answer failed.
        """
        return list(await asyncio.gather(*(self._one(tokens, clock) for _ in range(count))))

    async def _one(self, tokens: int, clock: Callable[[], float]) -> list[float]:
        self._asked += 1
        # different from its first words on, so that no prefix is shared
        prompt = f"{self._asked}: " + " ".join(_WORDS[(self._asked + i) % len(_WORDS)] for i in range(24))
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": self._asked,
                "stream": True, "ignore_eos": True}  # fmt: skip
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=self._timeout) as reply:
                if reply.status != 200:
                    raise BrokenLoop(f"{self.url}: HTTP {reply.status}: {(await reply.text())[:200]}")
                return [clock() async for line in reply.content if _is_token(line)]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise BrokenLoop(f"{self.url}: an answer broke off ({reason})") from error


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


def _is_token(line: bytes) -> bool:
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return False
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError:
        return False
    if event.error is not None:
        raise BrokenLoop(f"the engine failed: {event.error.get('message')}")
    return bool(event.choices)


def read_facts(model: str, metrics: str) -> Facts:
    """Facts out of Ullage's own metrics; other engines tell none of this."""
    found: dict[str, float] = {}
    blocks = 0.0
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("ullage_engine_kv_blocks{"):
            blocks += float(value)
        elif name in ("ullage_engine_kv_block_bytes", "ullage_engine_kv_block_tokens"):
            found[name.rpartition("_")[2]] = float(value)
    size, tokens = found.get("bytes"), found.get("tokens")
    if not size or not tokens:
        return Facts(model=model, token_bytes=None, pool_bytes=None)
    return Facts(model=model, token_bytes=size / tokens, pool_bytes=round(blocks * size) or None)
