"""Adapter of our own engine: the admin JSON of `docs/contracts.md`.

`compact` is offered only by engines that have the route; the adapter looks once per engine instance, with a GET
that such an engine refuses by method (405) and others by path (404).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ullage_agent.adapters.base import AdapterConfig, Reading
from ullage_agent.adapters.transport import EngineHttp, parse_endpoint
from ullage_agent.adapters.ullage_contract import (
    COMPACTION_COUNTS,
    DRAIN_STATE,
    EVICTION_COUNTS,
    RESUME_STATE,
    parse_object,
    parse_snapshot,
    require,
)
from ullage_agent.clock import Clock
from ullage_agent.errors import EngineError, EngineProtocolError, EngineRefused, EngineTimeout
from ullage_agent.wire import Action, ActionRequest, ActionResult, Outcome, Snapshot

SNAPSHOT_PATH = "/admin/v1/kv"
BLOCKS_PATH = "/admin/v1/kv/blocks"
EVICT_PATH = "/admin/v1/kv/evict"
COMPACT_PATH = "/admin/v1/kv/compact"
ADMISSION_PATH = "/admin/v1/admission"
DRAIN_PATH = "/admin/v1/drain"
RESUME_PATH = "/admin/v1/resume"

MAX_ANSWER_BYTES = 1 << 20
PROBE_SHARE = 0.25
"""Share of the read timeout that looking for an optional route may take."""
DRAIN_SHARE = 0.8
"""Share of an action's time that the engine may wait for its requests; the rest is for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one admin call did, before snapshots are put beside it."""

    outcome: Outcome
    message: str
    counts: dict[str, Any]


class UllageAdapter:
    """Reads and steers one Ullage engine. Implements `EngineAdapter`."""

    def __init__(self, http: EngineHttp, clock: Clock, *, read_timeout_s: float = 2.0) -> None:
        self._http = http
        self._clock = clock
        self._read_timeout_s = read_timeout_s
        self._probed_instance: str | None = None
        self._features: tuple[str, ...] = ()
        self._capabilities: tuple[Action, ...] = ("evict", "throttle", "release", "drain")
        self._calls: dict[Action, Callable[[ActionRequest, str], Awaitable[Effect]]] = {
            "evict": self._evict,
            "compact": self._compact,
            "throttle": self._throttle,
            "release": self._release,
            "drain": self._drain,
        }

    @classmethod
    def from_config(cls, config: AdapterConfig) -> UllageAdapter:
        http = EngineHttp(parse_endpoint(config.url), max_bytes=MAX_ANSWER_BYTES)
        return cls(http, config.clock, read_timeout_s=config.read_timeout_s)

    async def read(self) -> Reading:
        reading = await self._read_snapshot()
        if reading.identity.instance != self._probed_instance:
            await self._probe_compact(reading.identity.instance)
        return reading

    async def act(self, action: Action, request: ActionRequest, idempotency_key: str) -> ActionResult:
        if action not in self._capabilities:
            return ActionResult(action=action, outcome="Unsupported", message=f"this engine does not offer {action}")
        before = (await self._read_snapshot()).snapshot
        effect = await self._calls[action](request, idempotency_key)
        after = await self._snapshot_or_none()
        return ActionResult(
            action=action,
            outcome=effect.outcome,
            message=effect.message,
            dry_run=request.dry_run,
            before=before,
            after=after,
            **effect.counts,
        )

    def capabilities(self) -> tuple[Action, ...]:
        return self._capabilities

    def features(self) -> tuple[str, ...]:
        return self._features

    async def block_map(self) -> str | None:
        answer = await self._http.get(BLOCKS_PATH, timeout_s=self._read_timeout_s)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise EngineRefused(f"GET {BLOCKS_PATH} answered {answer.status}", status=answer.status)
        states = parse_object(answer.body, BLOCKS_PATH).get("states")
        if not isinstance(states, str):
            raise EngineProtocolError(f"{BLOCKS_PATH}: states is no text")
        return states

    async def close(self) -> None:
        await self._http.close()

    async def _read_snapshot(self) -> Reading:
        sampled_at = self._clock.wall()
        answer = await self._http.get(SNAPSHOT_PATH, timeout_s=self._read_timeout_s)
        if answer.status != 200:
            raise EngineRefused(
                f"GET {SNAPSHOT_PATH} answered {answer.status}: {_excerpt(answer.body)}", status=answer.status
            )
        reading = parse_snapshot(answer.body, SNAPSHOT_PATH, sampled_at)
        self._features = () if reading.snapshot.host_total_bytes is None else ("demote",)
        return reading

    async def _snapshot_or_none(self) -> Snapshot | None:
        """The state after an action; its loss must not make a done action look failed."""
        try:
            return (await self._read_snapshot()).snapshot
        except EngineError:
            return None

    async def _probe_compact(self, instance: str) -> None:
        try:
            answer = await self._http.get(COMPACT_PATH, timeout_s=self._read_timeout_s * PROBE_SHARE)
            offered = answer.status == 405
        except EngineTimeout:
            offered = False  # looking again at every reading would make each of them late
        except EngineError:
            return  # unknown: the next reading looks again
        self._probed_instance = instance
        others = tuple(action for action in self._capabilities if action != "compact")
        self._capabilities = (*others, "compact") if offered else others

    async def _post(self, path: str, body: dict[str, Any], request: ActionRequest, key: str) -> dict[str, Any]:
        answer = await self._http.post(path, body, key=key, timeout_s=request.timeout_s)
        if answer.status != 200:
            raise EngineRefused(f"POST {path} answered {answer.status}: {_excerpt(answer.body)}", status=answer.status)
        return parse_object(answer.body, path)

    async def _evict(self, request: ActionRequest, key: str) -> Effect:
        amount = {"ratio": request.ratio} if request.bytes is None else {"bytes": request.bytes}
        tiers = ["host", "drop"] if "demote" in self._features else ["drop"]
        body = {**amount, "tiers": tiers, "dry_run": request.dry_run}
        report = await self._post(EVICT_PATH, body, request, key)
        counts = require(report, EVICTION_COUNTS, EVICT_PATH)
        freed, size = counts["blocks_freed"], counts["bytes_freed"]
        if freed == 0:
            return Effect(outcome="Ineffective", message="no block could be freed", counts=counts)
        verb = "would free" if request.dry_run else "freed"
        kept = f", {counts['demoted_blocks']} of them kept in the host tier" if counts["demoted_blocks"] else ""
        return Effect(outcome="Succeeded", message=f"{verb} {freed} blocks, {size} bytes{kept}", counts=counts)

    async def _compact(self, request: ActionRequest, key: str) -> Effect:
        report = await self._post(COMPACT_PATH, {"budget_ms": request.budget_ms}, request, key)
        done = require(report, COMPACTION_COUNTS, COMPACT_PATH)
        freed, moved, left = done["blocks_freed"], done.pop("cells_moved"), done.pop("remaining_blocks")
        before, after = done.pop("before"), done.pop("after")
        if freed == 0:
            return Effect(outcome="Ineffective", message=f"no block could be freed, {left} are left", counts=done)
        message = (
            f"freed {freed} blocks by moving {moved} cells, {left} are left; unused cells {before:.0%}, now {after:.0%}"
        )
        return Effect(outcome="Succeeded", message=message, counts=done)

    async def _throttle(self, request: ActionRequest, key: str) -> Effect:
        body = {"max_prompt_tokens": request.max_prompt_tokens, "max_total_blocks": None, "ttl_s": request.ttl_s}
        answer = await self._post(ADMISSION_PATH, body, request, key)
        limit = answer.get("max_prompt_tokens")
        if limit != request.max_prompt_tokens:
            raise EngineProtocolError(f"POST {ADMISSION_PATH}: the limit in force is {limit!r} after throttling")
        message = f"prompts above {limit} tokens are refused for {request.ttl_s:g} s"
        return Effect(outcome="Succeeded", message=message, counts={})

    async def _release(self, request: ActionRequest, key: str) -> Effect:
        body = {"max_prompt_tokens": None, "max_total_blocks": None, "ttl_s": None}
        answer = await self._post(ADMISSION_PATH, body, request, key)
        if answer.get("max_prompt_tokens") is not None:
            raise EngineProtocolError(f"POST {ADMISSION_PATH}: a limit is still in force after release")
        if why_closed := await self._resume(request, key):
            return Effect(outcome="Ineffective", message=f"the engine still admits nothing: {why_closed}", counts={})
        return Effect(outcome="Succeeded", message="prompts of any length are admitted", counts={})

    async def _resume(self, request: ActionRequest, key: str) -> str | None:
        """End a drain; why the engine is closed even so, by what it reads afterwards.

        An engine without the route is open all the same, unless it drains. The key is one of its own: the engine
        refuses one that came with another call.
        """
        resume_key = f"{key}-resume"
        answer = await self._http.post(RESUME_PATH, {}, key=resume_key, timeout_s=request.timeout_s)
        if answer.status not in (200, 404):
            raise EngineRefused(
                f"POST {RESUME_PATH} answered {answer.status}: {_excerpt(answer.body)}", status=answer.status
            )
        offered = answer.status == 200
        stopping = offered and require(parse_object(answer.body, RESUME_PATH), RESUME_STATE, RESUME_PATH)["draining"]
        draining = (await self._read_snapshot()).snapshot.draining
        if not (draining or stopping):
            return None
        return "it is stopping" if offered else f"it drains, and this version has no {RESUME_PATH}; restart it"

    async def _drain(self, request: ActionRequest, key: str) -> Effect:
        # The wait follows from the request alone, so that a repeated key carries the same body.
        answer = await self._post(DRAIN_PATH, {"timeout_s": request.timeout_s * DRAIN_SHARE}, request, key)
        state = require(answer, DRAIN_STATE, DRAIN_PATH)
        if state["drained"]:
            return Effect(outcome="Succeeded", message="no request is in flight; none is admitted", counts={})
        message = f"{state['in_flight']} requests are still in flight; none is admitted"
        return Effect(outcome="Ineffective", message=message, counts={})


def _excerpt(body: bytes) -> str:
    text = body[:200].decode(errors="replace")
    return " ".join(text.split())
