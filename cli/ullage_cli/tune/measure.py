"""Ask engines, one after the other, what they predict behind the same words with each kind of cache.

Through the public API alone: the same prompts of growing length, one token each with its likeliest alternatives. An
engine of ours quantises on write and reads back from the blocks also while it prefills, so the cache's type is in every
figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from ullage_operator.arguments import engine_arguments
from ullage_operator.model import InferenceService

from .. import scratch
from ..errors import BrokenLoop, InputError
from ..launch import ENGINE_START_S, installed_programs
from ..plan.engine_client import read_facts
from ..preflight import HOST
from ..processes import ChildSpec, Supervisor
from ..stopping import Stopped, StopSignals
from .quality import Prediction, Quality, compare

TOP = 20
AT_ONCE = 4
STRIDE = 16
FIRST = 48
"""Tokens before the first position: at the very beginning there is little to get wrong."""
_TIMEOUT = aiohttp.ClientTimeout(total=600.0, sock_connect=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One kind of cache."""

    kind: str
    kept_layers: tuple[int, ...] = ()
    """Layers that stay in bf16."""

    @property
    def name(self) -> str:
        if not self.kept_layers:
            return self.kind
        return f"{self.kind}, layers {self.kept_layers[0]}-{self.kept_layers[-1]} in bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One kind of cache beside the reference."""

    candidate: Candidate
    token_bytes: float | None
    quality: Quality


REFERENCE = Candidate(kind="bf16")


def measure(
    service: InferenceService, candidates: Sequence[Candidate], text: str, positions: int
) -> tuple[float | None, list[Measured]]:
    """Bytes of a token in the reference's cache, and every candidate beside it.

    Raises:
        InputError: the text is too short, or an engine refused its settings.
        BrokenLoop: an engine broke.
    """
    return asyncio.run(_measure(service, candidates, text, positions))


async def _measure(
    service: InferenceService, candidates: Sequence[Candidate], text: str, positions: int
) -> tuple[float | None, list[Measured]]:
    with StopSignals() as stop:
        try:
            size, reference = await stop.or_finish(_asked(service, REFERENCE, text, positions))
            found = []
            for candidate in candidates:
                told, predictions = await stop.or_finish(_asked(service, candidate, text, positions))
                found.append(Measured(candidate=candidate, token_bytes=told, quality=compare(reference, predictions)))
        except Stopped as error:
            raise BrokenLoop("stopped before the measurement was done") from error
    return size, found


async def _asked(
    service: InferenceService, candidate: Candidate, text: str, positions: int
) -> tuple[float | None, list[Prediction]]:
    """Start an engine with a kind of cache, take its predictions, end it."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(scratch.scratch_folder())
        supervisor = await stack.enter_async_context(Supervisor())
        typed = with_type(service, candidate.kind)
        arguments = engine_arguments(typed, host=HOST, port=0, admin=f"unix:{folder / 'admin.sock'}")
        if candidate.kept_layers:
            arguments.append(f"--kv-bf16-layers={','.join(map(str, candidate.kept_layers))}")
        argv = (*installed_programs().engine, *arguments)
        child = supervisor.start(ChildSpec(name="engine", argv=argv, log=folder / "engine.log"))
        try:
            ready = await child.ready(ENGINE_START_S)
        except TimeoutError as error:
            raise BrokenLoop(str(error)) from error
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=_TIMEOUT))
        return await predictions(http, str(ready["public"]), text, positions)


async def predictions(
    http: aiohttp.ClientSession, url: str, text: str, positions: int
) -> tuple[float | None, list[Prediction]]:
    """What a running engine predicts at so many places of a text, and the bytes of a token in its cache."""
    try:
        async with http.get(f"{url}/v1/models") as reply:
            model = str((await reply.json())["data"][0]["id"])
        async with http.post(f"{url}/tokenize", json={"prompt": text}) as reply:
            tokens: list[int] = (await reply.json())["tokens"]
        async with http.get(f"{url}/metrics") as reply:
            facts = read_facts(model, await reply.text())
        places = [FIRST + STRIDE * index for index in range(positions)]
        if places[-1] > len(tokens):
            raise InputError(f"--text: has {len(tokens)} tokens; {positions} positions need {places[-1]}")
        found: list[Prediction] = []
        for start in range(0, positions, AT_ONCE):
            prompts = [tokens[:place] for place in places[start : start + AT_ONCE]]
            found += await _predict(http, url, model, prompts)
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, IndexError, ValueError) as error:
        raise BrokenLoop(f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error
    return facts.token_bytes, found


async def _predict(http: aiohttp.ClientSession, url: str, model: str, prompts: list[list[int]]) -> list[Prediction]:
    body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": TOP}
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise BrokenLoop(f"{url}: HTTP {reply.status}: {(await reply.text())[:200]}")
        choices: list[dict[str, Any]] = (await reply.json())["choices"]
    ordered = sorted(choices, key=lambda choice: int(choice["index"]))
    return [dict(choice["logprobs"]["top_logprobs"][0]) for choice in ordered]


def with_type(service: InferenceService, kind: str) -> InferenceService:
    """The same service with another cache type."""
    engine = service.spec.engine
    cache = engine.kv_cache.model_copy(update={"type": kind})
    spec = service.spec.model_copy(update={"engine": engine.model_copy(update={"kv_cache": cache})})
    return service.model_copy(update={"spec": spec})


def read_text(file: Path | None) -> str:
    """The text to predict: a file, or prose that comes with Python."""
    if file is None:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name] for name in sorted(topics))[:20_000]
    try:
        return file.read_text(encoding="utf-8")[:200_000]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text: {file}: {error}; give a text file") from error


def groups(layers: int, count: int) -> list[tuple[int, ...]]:
    """Layers in so many groups of neighbours."""
    bounds = [round(index * layers / count) for index in range(count + 1)]
    return [tuple(range(low, high)) for low, high in pairwise(bounds) if high > low]
