"""What the HTTP side asks of the engine's core, as a contract.

`ullage_engine.loop.EngineLoop` and `ullage_engine.fake_core.FakeCore` implement it.
Non-goal: running a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ullage_engine.api.text import HfTokenizer
from ullage_engine.request import AdmissionLimit, Destination, GenerationRequest, Sink
from ullage_engine.snapshot import CompactionReport, EngineSnapshot, EvictionReport
from ullage_engine.steps import StepListener

BLOCK_MAP_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """State of every block, in the order of their ids: three columns of equal length."""

    sequence: int
    """The reading's number, as in `EngineSnapshot.sequence`."""
    block_tokens: int
    states: str
    """One letter a block: `F` free, `A` active, `C` cached, `S` storing, `L` loading."""
    filled: tuple[int, ...]
    """Slots that hold a token, 0..`block_tokens`; of split blocks the share of cells in use."""
    refs: tuple[int, ...]
    """Sequences that refer to the block."""

    def to_json(self) -> dict[str, Any]:
        """The body of `GET /admin/v1/kv/blocks`."""
        return {
            "version": BLOCK_MAP_VERSION,
            "sequence": self.sequence,
            "block_tokens": self.block_tokens,
            "states": self.states,
            "filled": list(self.filled),
            "refs": list(self.refs),
        }


class EngineCore(Protocol):
    """The step loop as seen from outside. Every method may be called from any thread."""

    @property
    def max_model_len(self) -> int:
        """Greatest prompt plus answer, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens by which the model says that it is done."""
        ...

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        ...

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request; returns at once. `sink` is called in the loop's thread, from then on until an
        output with a `finish_reason`, or until the request is aborted.

        Raises:
            RequestTooLong: it can never fit.
            Overloaded: refused for now: queue full, or a limit in force.
            Draining: nothing is admitted any more.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks within two steps. Idempotent; unknown ids are ignored.

        Raises:
            LoopUnavailable: the loop has ended, and all requests with it.
        """
        ...

    def queued(self, request_id: str) -> bool:
        """Whether a request still waits for the first step that works on it; never blocks. False for unknown ids
        and for those that were begun, preempted ones included.
        """
        ...

    def on_step(self, listener: StepListener) -> None:
        """Call `listener` after each working step, for good."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """The state last published; never blocks."""
        ...

    def block_map(self) -> BlockMap:
        """State of every block, read between two steps.

        Raises:
            LoopUnavailable: the loop did not come to it in time.
        """
        ...

    def evict(
        self,
        *,
        ratio: float | None,
        bytes_: int | None,
        dry_run: bool,
        timeout_s: float,
        target_usage: float | None = None,
        tiers: tuple[Destination, ...] = ("drop",),
    ) -> EvictionReport:
        """Evict cold blocks between two steps, waiting for the report. Exactly one is given of `ratio` (of the
        occupied blocks, 0 < ratio <= 1), `bytes_` (> 0) and `target_usage` (share of all that may stay occupied).
        `tiers` says where their content may go.

        Raises:
            LoopUnavailable: not begun within `timeout_s`; it has been cancelled and will not happen later.
        """
        ...

    def compact(self, *, budget_ms: float, timeout_s: float) -> CompactionReport:
        """Move cells between two steps so that split blocks become whole, for at most about `budget_ms`.

        Raises:
            LoopUnavailable: as in `evict`.
        """
        ...

    def set_admission(self, limit: AdmissionLimit | None) -> None:
        """Refuse requests beyond `limit` with Overloaded until it expires; None lifts it.

        Raises:
            LoopUnavailable: the loop has ended.
        """
        ...

    def set_draining(self, draining: bool) -> None:
        """Refuse (or admit again) all new requests; those admitted go on.

        Raises:
            LoopUnavailable: the loop has ended.
        """
        ...

    def step_age_s(self) -> float:
        """Seconds since the loop last completed a pass, working or idle."""
        ...


class LoadedEngine(Protocol):
    """What `ullage_engine.loop.build_engine` returns."""

    @property
    def core(self) -> EngineCore:
        """The running step loop."""
        ...

    @property
    def tokenizer(self) -> HfTokenizer:
        """The model's transformers tokenizer."""
        ...

    def close(self) -> None:
        """End the step loop and free its memory. Idempotent."""
        ...
