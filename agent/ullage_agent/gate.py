"""Admission gate: ASGI middleware that refuses requests too large for the KV cache while the engine is throttled.

Loaded into the engine's own server, so no proxy stands in the data path and the engine's image stays as it is:

    vllm serve … --middleware ullage_agent.gate.AdmissionGate

needs this file alone, as `ullage_agent/gate.py` somewhere on PYTHONPATH (a mounted volume), and `ULLAGE_GATE_FILE`
where the state is not at the default place. Standard library only, Python 3.9 or newer.

The state is a small JSON file that the agent replaces as a whole (`--gate-file`):

    {"version": 1, "max_prompt_tokens": 512, "max_total_blocks": 90, "block_tokens": 16,
     "expires_at": 1700000000.0, "draining": false}

A request is refused with 429 and `Retry-After` when its prompt is longer than `max_prompt_tokens`, or when prompt
and answer together would need more than `max_total_blocks` blocks. While draining, every generation is refused
with 503. After `expires_at` (Unix seconds), without the file, or when it can't be understood, everything is
admitted: a dead agent never closes a server.

Prompts are text here, so their tokens are estimated at `CHARS_PER_TOKEN`; prompts given as token ids are counted.

Non-goals: queueing, fairness, authentication.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("ullage.gate")

FILE_VARIABLE = "ULLAGE_GATE_FILE"
DEFAULT_FILE = "/run/ullage/gate.json"
VERSION = 1
CHARS_PER_TOKEN = 4.0
"""Usual for English text; a fixed figure, since loading the tokenizer would double the engine's work."""
DEFAULT_ANSWER_TOKENS = 256
"""Assumed where a request bounds its answer nowhere: engines then allow up to the model's length."""
LOOK_EVERY_S = 0.25
"""Pace of looking whether the file has changed."""
MAX_BODY_BYTES = 8 * 1024 * 1024
"""A longer body is refused while throttled instead of being held in memory."""
MAX_STATE_BYTES = 64 * 1024
GUARDED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
)
"""Routes that take KV cache."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class GateState:
    """What is in force. Tokens, blocks, Unix seconds; None: no limit, no end."""

    max_prompt_tokens: int | None = None
    max_total_blocks: int | None = None
    block_tokens: int = 16
    expires_at: float | None = None
    draining: bool = False

    def closed(self, now: float) -> bool:
        """Whether any request may have to be refused."""
        limited = self.max_prompt_tokens is not None or self.max_total_blocks is not None
        return (limited or self.draining) and (self.expires_at is None or now < self.expires_at)


OPEN = GateState()


@dataclass(frozen=True)
class Refusal:
    """Status and words of a refusal."""

    status: int
    message: str
    code: str


@dataclass(frozen=True)
class Projection:
    """What a request is expected to take."""

    prompt_tokens: int
    answer_tokens: int
    sequences: int

    def blocks(self, block_tokens: int) -> int:
        """Blocks at its end: the prompt is shared by the sequences of a request, as engines do; answers are not."""
        own = math.ceil((self.prompt_tokens + self.answer_tokens) / block_tokens)
        shared = self.prompt_tokens // block_tokens
        return shared + self.sequences * (own - shared)


class AdmissionGate:
    """The middleware. One instance serves one application; it never waits for the file."""

    def __init__(self, app: App, path: str | None = None) -> None:
        self._app = app
        self._file = StateFile(path or os.environ.get(FILE_VARIABLE, DEFAULT_FILE))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _guarded(scope):
            await self._app(scope, receive, send)
            return
        state, now = self._file.current(), time.time()
        if not state.closed(now):
            await self._app(scope, receive, send)
            return
        body, replay = await _read_body(scope, receive)
        refusal = judge(state, body)
        if refusal is None:
            await self._app(scope, replay, send)
        else:
            await _refuse(refusal, retry_after(state, now), send)


class StateFile:
    """The file as last understood; looked at no more often than `LOOK_EVERY_S`."""

    def __init__(self, path: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._monotonic = monotonic
        self._looked_at = -math.inf
        self._stamp: tuple[int, int, int] | None = None
        self._state = OPEN

    def current(self) -> GateState:
        """The state in force; `OPEN` without a file that can be understood."""
        now = self._monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._state

    def _look(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp == self._stamp:
                return
            with self._path.open("rb") as file:
                self._state = parse_state(file.read(MAX_STATE_BYTES))
            self._stamp = stamp
        except FileNotFoundError:
            self._state, self._stamp = OPEN, None
        except (OSError, ValueError) as error:
            if self._state is not OPEN or self._stamp is not None:
                log.warning("%s cannot be used (%s); every request is admitted", self._path, error)
            self._state, self._stamp = OPEN, None


def parse_state(data: bytes) -> GateState:
    """Read the file's bytes. Raises ValueError where they are not a state of this version."""
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise ValueError(f"not a gate state of version {VERSION}")
    return GateState(
        max_prompt_tokens=_count(document, "max_prompt_tokens"),
        max_total_blocks=_count(document, "max_total_blocks"),
        block_tokens=_count(document, "block_tokens") or 16,
        expires_at=_moment(document.get("expires_at")),
        draining=document.get("draining") is True,
    )


def judge(state: GateState, body: bytes | None) -> Refusal | None:
    """The refusal of a request under a closed gate; None admits it. `body` None: too long to look at."""
    if state.draining:
        return Refusal(503, "the server is draining; send the request to another one", "draining")
    if body is None:
        return Refusal(429, f"the request's body is longer than {MAX_BODY_BYTES} bytes", "throttled")
    projection = project(body)
    if projection is None:
        return None  # not for the gate to judge: the engine says what is wrong with it
    limit, asked = state.max_prompt_tokens, projection.prompt_tokens
    if limit is not None and asked > limit:
        why = f"the prompt has about {asked} tokens; while KV cache is short, {limit} are admitted"
        return Refusal(429, why, "throttled")
    room, blocks = state.max_total_blocks, projection.blocks(state.block_tokens)
    if room is not None and blocks > room:
        why = f"the request needs about {blocks} KV blocks; while they are short, {room} are given"
        return Refusal(429, why, "throttled")
    return None


def project(body: bytes) -> Projection | None:
    """What a request's JSON asks for; None where it is no request."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    prompts = _prompts(request)
    if not prompts:
        return None
    sampling = request.get("sampling_params")
    nested = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    asked = [*(request.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")), nested]
    return Projection(
        prompt_tokens=max(prompts),
        answer_tokens=next(iter(_counts(asked)), DEFAULT_ANSWER_TOKENS),
        sequences=len(prompts) * max(_counts([request.get("n"), request.get("best_of")]), default=1),
    )


def retry_after(state: GateState, now: float) -> int:
    """Seconds after which it may be worth trying again, 1 to 60."""
    rest = 5.0 if state.expires_at is None else state.expires_at - now
    return int(min(60.0, max(1.0, math.ceil(rest))))


def _prompts(request: dict[str, Any]) -> list[int]:
    """Tokens of each prompt of a request."""
    for name in ("prompt", "input_ids", "text", "input"):
        if name in request:
            given = request[name]
            if isinstance(given, list) and given and not all(isinstance(item, (int, bool)) for item in given):
                return [_tokens(item) for item in given] if name != "input" else [_tokens(given)]
            return [_tokens(given)]
    if "messages" in request:
        return [_tokens([request["messages"], request.get("tools"), request.get("system")])]
    return []


def _tokens(given: Any) -> int:
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        return len(given)
    return math.ceil(_characters(given, 0) / CHARS_PER_TOKEN)


def _characters(given: Any, depth: int) -> int:
    if isinstance(given, str):
        return len(given)
    if depth > 32:
        return 0
    if isinstance(given, dict):
        return sum(_characters(item, depth + 1) for name, item in given.items() if name != "image_url")
    if isinstance(given, list):
        return sum(_characters(item, depth + 1) for item in given)
    return 0


def _guarded(scope: Scope) -> bool:
    if scope.get("type") != "http" or scope.get("method") != "POST":
        return False
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", "")).rstrip("/")
    return (path[len(root) :] if root and path.startswith(root) else path).rstrip("/") in GUARDED


async def _read_body(scope: Scope, receive: Receive) -> tuple[bytes | None, Receive]:
    """The body and a `receive` that gives it again; None for one that is too long, which is then not read on."""
    parts: list[bytes] = []
    size, more, gone = 0, True, False
    while more and size <= MAX_BODY_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            gone = True
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
    body = b"".join(parts)
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.disconnect"} if gone else {"type": "http.request", "body": body, "more_body": False}

    return (None if size > MAX_BODY_BYTES else body), replay


async def _refuse(refusal: Refusal, seconds: int, send: Send) -> None:
    error = {"message": refusal.message, "type": "overloaded_error", "param": None, "code": refusal.code}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(seconds).encode()),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _count(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if not _is_count(value) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a count above 0")
    return int(value)


def _moment(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expires_at is {value!r}, not a time")
    return float(value)


def _counts(values: list[Any]) -> list[int]:
    return [value for value in values if _is_count(value)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
