"""What a step would have brought, estimated: the recorded data knows nothing of steps that were not taken. Pure.

An eviction takes cached blocks first and then hot ones, and what it took is missing from the readings that follow for
as long as the sequences concerned would have run (their mean stay, by Little's law). A compaction frees what the
engine says it would, or joins the free blocks, for as long. A throttle is shown as in force; whom it would have kept
out cannot be known, so it frees nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ullage_agent.adapters.base import Reading
from ullage_agent.wire import Action, ActionResult, Snapshot
from ullage_operator.model import Remediation

KEPT_SHARE = 0.2
"""Of the hot blocks, at least so many stay whatever is asked: first and recent tokens are protected."""
STAY_S = 30.0
"""Mean stay of a sequence where the data does not tell."""
MIN_STAY_S, MAX_STAY_S = 2.0, 600.0


@dataclass(slots=True)
class Effects:
    """What is missing from the readings by what was done. One policy's own."""

    hot: float = 0.0
    """Blocks."""
    cached: float = 0.0
    joined_until: float = -math.inf
    limit: int | None = None
    limit_until: float = -math.inf
    at: float | None = None
    stay_s: float = STAY_S
    finished: int | None = None
    pace: float | None = None
    """Requests that end in a second, smoothed."""

    def apply(self, reading: Reading, at: float) -> Reading:
        """The reading as it would have been."""
        state = reading.snapshot
        self._pass_time(state, at)
        changed = self._taken_out(state)
        if at < self.joined_until and changed.free_blocks is not None:
            changed = _compacted(changed)
        if at < self.limit_until:
            changed = replace(
                changed, admission_max_prompt_tokens=self.limit, admission_expires_in_s=self.limit_until - at
            )
        return replace(reading, snapshot=changed)

    def act(self, record: Remediation, state: Snapshot, at: float) -> ActionResult:
        """Take a step on what the reading `state`, which `apply` gave, shows."""
        match record.spec.action:
            case "evict":
                return self._evict(record.spec.parameters.ratio or 0.0, state)
            case "compact":
                self.joined_until = at + self.stay_s
                spare = state.compactable_blocks
                if spare is None:
                    return _result("compact", "the free blocks are one run")
                return _freeing("compact", spare, state)
            case "throttle":
                parameters = record.spec.parameters
                self.limit, self.limit_until = parameters.max_prompt_tokens, at + (parameters.ttl_seconds or 0.0)
                return _result("throttle", f"prompts above {self.limit} tokens are refused")
            case "release":
                self.limit_until = -math.inf
                return _result("release", "long prompts are admitted")
        raise ValueError(f"{record.spec.action} is not an engine's action")

    def _evict(self, ratio: float, state: Snapshot) -> ActionResult:
        hot, cached = state.hot_blocks or 0, state.reclaimable_blocks or 0
        wanted = ratio * (hot + cached)
        from_cache = min(cached, wanted)
        from_hot = min(hot * (1 - KEPT_SHARE), wanted - from_cache)
        self.cached += from_cache
        self.hot += from_hot
        freed = round(from_cache + from_hot)
        return _freeing("evict", freed, state)

    def _taken_out(self, state: Snapshot) -> Snapshot:
        if state.hot_blocks is None:
            return state
        hot = min(round(self.hot), state.hot_blocks)
        cached = min(round(self.cached), state.reclaimable_blocks or 0)
        if hot + cached == 0:
            return state
        free, run = state.free_blocks, state.largest_free_run_blocks
        return replace(
            state,
            hot_blocks=state.hot_blocks - hot,
            reclaimable_blocks=None if state.reclaimable_blocks is None else state.reclaimable_blocks - cached,
            free_blocks=None if free is None else free + hot + cached,
            # what one eviction frees lies together as often as not: half of it is taken to lengthen the longest run
            largest_free_run_blocks=None if run is None else run + (hot + cached) // 2,
        )

    def _pass_time(self, state: Snapshot, at: float) -> None:
        if self.at is not None and at > self.at:
            passed = at - self.at
            if state.finished_total is not None and self.finished is not None and state.finished_total >= self.finished:
                rate = (state.finished_total - self.finished) / passed
                weight = min(1.0, passed / STAY_S)
                self.pace = rate if self.pace is None else self.pace + weight * (rate - self.pace)
            if self.pace and state.running:
                self.stay_s = min(MAX_STAY_S, max(MIN_STAY_S, state.running / self.pace))
            left = math.exp(-passed / self.stay_s)
            self.hot, self.cached = self.hot * left, self.cached * left
        self.at, self.finished = at, state.finished_total


def _compacted(state: Snapshot) -> Snapshot:
    """A reading as it would be after compaction: spare blocks are free, or free ones one run."""
    if state.compactable_blocks is None or state.hot_blocks is None:
        return replace(state, largest_free_run_blocks=state.free_blocks)
    spare, free = min(state.compactable_blocks, state.hot_blocks), state.free_blocks or 0
    return replace(state, hot_blocks=state.hot_blocks - spare, free_blocks=free + spare, compactable_blocks=0)


def _freeing(action: Action, blocks: int, state: Snapshot) -> ActionResult:
    return replace(
        _result(action, f"about {blocks} blocks freed"),
        outcome="Succeeded" if blocks else "Ineffective",
        blocks_freed=blocks,
        bytes_freed=blocks * (state.block_bytes or 1),
    )


def _result(action: Action, message: str) -> ActionResult:
    return ActionResult(action=action, outcome="Succeeded", message=f"{message} (estimated)")
