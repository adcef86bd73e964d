"""The agent's side of the admission gate: writes the small file that `ullage_agent.gate` reads in the engine."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from ullage_agent.clock import Clock
from ullage_agent.errors import EngineProtocolError, EngineUnreachable
from ullage_agent.gate import MAX_STATE_BYTES, VERSION, GateState, parse_state
from ullage_agent.wire import ActionRequest, Snapshot

DRAIN_TTL_S = 900.0
"""A drained server that nobody stops or releases opens again after this long."""


class GateFile:
    """One gate's file. Every write replaces it as a whole, so that the gate never reads half of one."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock

    def current(self) -> GateState | None:
        """The state in force now; None while the gate is open.

        Raises:
            EngineProtocolError: the file holds something else.
        """
        try:
            with self._path.open("rb") as file:
                state = parse_state(file.read(MAX_STATE_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise EngineProtocolError(f"gate file {self._path}: {error}") from error
        return state if state.closed(self._clock.wall()) else None

    def throttle(self, request: ActionRequest, supply_blocks: int | None, block_tokens: int | None) -> GateState:
        """Refuse prompts above the request's limit, and whatever needs more blocks than can be had now."""
        tokens = block_tokens or 16
        room = None
        if supply_blocks is not None and block_tokens and request.max_prompt_tokens is not None:
            room = max(supply_blocks, -(-request.max_prompt_tokens // tokens))
        state = GateState(
            max_prompt_tokens=request.max_prompt_tokens,
            max_total_blocks=room,
            block_tokens=tokens,
            expires_at=None if request.ttl_s is None else self._clock.wall() + request.ttl_s,
        )
        self._write(state)
        return state

    def drain(self) -> None:
        """Refuse every generation."""
        self._write(GateState(draining=True, expires_at=self._clock.wall() + DRAIN_TTL_S))

    def release(self) -> None:
        """Open the gate."""
        self._write(GateState())

    def _write(self, state: GateState) -> None:
        text = json.dumps({"version": VERSION, **asdict(state)})
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                Path(name).chmod(0o644)  # the engine may run as another user
                Path(name).replace(self._path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise EngineUnreachable(f"gate file {self._path}: {error.strerror}") from error


def admission_of(state: GateState | None, now: float) -> dict[str, int | float | bool | None]:
    """Fields of a snapshot that tell what the gate does at `now`."""
    if state is None:
        return {"admission_max_prompt_tokens": None, "admission_expires_in_s": None, "draining": False}
    rest = None if state.expires_at is None else max(0.0, state.expires_at - now)
    return {
        "admission_max_prompt_tokens": state.max_prompt_tokens,
        "admission_expires_in_s": rest,
        "draining": state.draining,
    }


def describe(state: GateState, ttl_s: float | None) -> str:
    """One line on a throttle in force."""
    blocks = "" if state.max_total_blocks is None else f" and requests of more than {state.max_total_blocks} blocks"
    return f"the gate refuses prompts above {state.max_prompt_tokens} tokens{blocks} for {ttl_s or 0:g} s"


def supply_of(snapshot: Snapshot) -> int | None:
    """Blocks to be had, of the tightest rank."""
    known = [
        rank.total_blocks - rank.hot_blocks
        for rank in snapshot.ranks
        if rank.total_blocks is not None and rank.hot_blocks is not None
    ]
    if known:
        return max(0, min(known))
    if snapshot.total_blocks is None or snapshot.hot_blocks is None:
        return None
    return max(0, snapshot.total_blocks - snapshot.hot_blocks)
