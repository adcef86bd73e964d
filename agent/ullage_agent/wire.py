"""What agent and operator say to each other: versioned, engine-neutral, standard dataclasses.

Everything that crosses the wire is here and nothing else is; the operator imports this module alone of the
agent. `None` always means "the engine cannot say", never zero. Encoding is JSON; decoding is strict about
types and ranges and lenient about unknown fields, so that a newer peer may add some.

Errors:
    WireError (ValueError): a message that cannot be read; names the field's path and what is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

import msgspec

WIRE_VERSION = "ullage.dev/wire/v1"

Action = Literal["evict", "compact", "throttle", "release", "drain"]
Outcome = Literal["Succeeded", "Ineffective", "Failed", "Unsupported"]

ACTIONS: tuple[Action, ...] = ("evict", "compact", "throttle", "release", "drain")


class WireError(ValueError):
    """A message from the peer that cannot be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Which engine process a report is about."""

    type: str
    """Adapter that read it: `ullage`, `vllm`, `sglang` or `fake`."""
    instance: str
    """Opaque; changes when the engine process is replaced, so that counters may restart."""
    version: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One data-parallel rank of an engine that has several: each has a pool and a queue of its own."""

    name: str
    total_blocks: int | None = None
    hot_blocks: int | None = None
    reclaimable_blocks: int | None = None
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of an engine's KV cache and queue. Counts are blocks unless a name says otherwise."""

    sampled_at: float
    """Unix seconds by the agent's clock when the reading began."""
    sequence: int | None = None
    """The engine's own reading number; it never repeats within one instance."""
    step: int | None = None
    """The engine's step clock."""
    step_age_s: float | None = None
    """Seconds since the step loop last completed a pass (working or idle)."""

    block_tokens: int | None = None
    block_bytes: int | None = None
    total_blocks: int | None = None
    hot_blocks: int | None = None
    """Blocks that running sequences hold: pressure."""
    reclaimable_blocks: int | None = None
    """Blocks kept only as prefix cache: supply, not pressure."""
    free_blocks: int | None = None
    largest_free_run_blocks: int | None = None
    largest_allocation_blocks: int | None = None
    """Most blocks that one allocation can have now, of free and reclaimable ones."""
    compactable_blocks: int | None = None
    """Hot blocks that compaction would free: what their holders use would fit into the others. None: the engine doesn't
    say, which one without compaction never does."""
    allocated_slots: int | None = None
    """Token slots in hot blocks."""
    filled_slots: int | None = None
    """Token slots in hot blocks that hold a token."""
    allocator_reserved_bytes: int | None = None
    allocator_allocated_bytes: int | None = None

    running: int | None = None
    waiting: int | None = None
    outstanding_blocks: int | None = None
    """Further blocks that admitted and waiting requests may still ask for (bounded by max_tokens)."""

    admitted_total: int | None = None
    finished_total: int | None = None
    preemptions_total: int | None = None
    recomputed_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    generated_tokens_total: int | None = None
    prefix_query_tokens_total: int | None = None
    prefix_hit_tokens_total: int | None = None

    host_total_bytes: int | None = None
    host_used_bytes: int | None = None

    admission_max_prompt_tokens: int | None = None
    """Limit in force while throttled, None when any length is admitted."""
    admission_expires_in_s: float | None = None
    draining: bool | None = None

    ranks: tuple[Rank, ...] = ()
    """The parts of an engine with several ranks, whose sums the counts above are; empty for an engine with one.
    A full rank beside idle ones preempts as a full engine does, so risk looks at the worst of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Three figures in 0..1, kept apart: they have different causes and different remedies."""

    external: float | None = None
    """`1 - largest_free_run / free`; 1.0 when nothing is free."""
    internal: float | None = None
    """`1 - filled_slots / allocated_slots`; 0.0 when nothing is allocated."""
    allocator: float | None = None
    """`1 - allocated_bytes / reserved_bytes`; 0.0 when nothing is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When the pool can no longer serve demand already admitted. Seconds; None: not in sight."""

    exhaustion_p10_s: float | None = None
    exhaustion_p50_s: float | None = None
    exhaustion_p90_s: float | None = None
    growth_blocks_per_s: float | None = None
    demand_blocks: int | None = None
    supply_blocks: int | None = None
    projected_peak_blocks: int | None = None
    """Most hot blocks that present work and arrivals at the present pace will hold within two minutes, by the
    lengths learned from finished requests; None until enough have finished."""
    exhaustion_chance: float | None = None
    """0..1, of exhaustion within half a minute by the same; None until enough have finished."""
    rank: str | None = None
    """Which rank this is about, where the engine has several: the one that runs out first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How the engine served over the last `window_s` seconds. Rates are per second; None: cannot be told."""

    window_s: float
    admissions_per_s: float | None = None
    """Requests that began to run."""
    arrivals_per_s: float | None = None
    """Requests that came in, running or waiting."""
    finishes_per_s: float | None = None
    preemptions_per_s: float | None = None
    """By the engine's own counter, which may lag (vLLM's moves when the request runs again)."""
    inferred_preemptions_per_s: float | None = None
    """Requests that stopped running without having finished; an engine's counter says so later or never."""
    recomputed_share: float | None = None
    """Recomputed tokens as a share of all tokens computed, 0..1."""
    generated_tokens_per_s: float | None = None
    prefix_hit_ratio: float | None = None
    """Prompt tokens found in the prefix cache, 0..1 of those looked up."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p90_s: float | None = None
    inter_token_p99_s: float | None = None
    end_to_end_p50_s: float | None = None
    end_to_end_p90_s: float | None = None
    end_to_end_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Whether the engine gets on with its work, whatever its health route says."""

    state: Literal["working", "idle", "stalled", "dead", "unknown"]
    """stalled: work is in flight and no counter moves; dead: a canary request got no answer; idle: nothing to do,
    which a dead output thread can look like unless canaries are on; unknown: too little is said to tell."""
    quiet_s: float
    """Seconds since a counter last moved, or the engine was first seen."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory of one accelerator as its driver tells it."""

    index: int
    name: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    engine_bytes: int | None = None
    """Used by the engine's processes; None where it cannot be attributed."""
    other_bytes: int | None = None
    """Used by other processes on a shared device."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    last_xid: int | None = None
    """Last fault that the driver reported while the agent ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory of the engine's control group."""

    limit_bytes: int | None = None
    """None: unlimited, or not known."""
    used_bytes: int | None = None
    """Without file pages that can be dropped at once."""
    psi_some_avg10: float | None = None
    """Share of the last ten seconds, 0..1, in which some task waited for memory."""
    psi_full_avg10: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken promise of an engine's metric contract."""

    metric: str
    problem: Literal["missing", "renamed", "not_finite", "out_of_range", "wrong_type", "stale"]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskReport:
    """The agent's answer to `GET /v1/risk`."""

    engine: EngineIdentity
    generated_at: float
    """Unix seconds by the agent's clock."""
    sample_age_s: float | None
    """Age of the snapshot when the report was made; None when the engine was never read."""
    score: float | None
    """Out-of-memory risk 0..100, the greatest of `terms`; None without a usable snapshot."""
    winner: str | None
    """Name of the greatest term."""
    terms: dict[str, float] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    fragmentation: Fragmentation | None = None
    forecast: Forecast | None = None
    service: Service | None = None
    liveness: Liveness | None = None
    devices: tuple[Device, ...] = ()
    """Empty without a driver, which is a normal state."""
    host: Host | None = None
    capabilities: tuple[Action, ...] = ()
    features: tuple[str, ...] = ()
    """What else the engine was found to offer: `demote`, `pause`, `reset_prefix_cache`, `canary`."""
    violations: tuple[Violation, ...] = ()
    error: str | None = None
    """Why the engine could not be read at the last attempt."""
    version: str = WIRE_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequest:
    """Body of `POST /v1/actions/{action}`. Which parameters apply depends on the action.

    evict: exactly one of `ratio` (0..1, share of occupied blocks) and `bytes`; `dry_run`.
    throttle: `max_prompt_tokens` and `ttl_s`. compact: `budget_ms`. drain: `timeout_s` bounds the wait.
    release, which lifts a limit and ends a drain: none.
    """

    ratio: float | None = None
    bytes: int | None = None
    max_prompt_tokens: int | None = None
    ttl_s: float | None = None
    budget_ms: int | None = None
    dry_run: bool = False
    timeout_s: float = 10.0
    """Bound on the whole action; the answer comes before it ends."""
    reason: str = ""
    version: str = WIRE_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """What an action really did. Nothing freed by an eviction is `Ineffective`, never `Succeeded`."""

    action: Action
    outcome: Outcome
    message: str
    blocks_freed: int = 0
    bytes_freed: int = 0
    dropped_blocks: int = 0
    demoted_blocks: int = 0
    sequences_touched: int = 0
    duration_ms: float = 0.0
    dry_run: bool = False
    before: Snapshot | None = None
    after: Snapshot | None = None
    version: str = WIRE_VERSION


T = TypeVar("T", RiskReport, ActionRequest, ActionResult)


def encode(message: RiskReport | ActionRequest | ActionResult) -> bytes:
    """JSON bytes of a message.

    Raises:
        WireError: a number in it is NaN or infinite.
    """
    _require_finite(message, "$")
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Read JSON bytes as `kind`.

    Raises:
        WireError: not JSON, a field missing or of the wrong type, a number out of range, another major version.
    """
    try:
        message = msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"{kind.__name__}: {error}") from error
    if message.version != WIRE_VERSION:
        raise WireError(f"{kind.__name__}: version {message.version!r} is not {WIRE_VERSION!r}; upgrade the older peer")
    problem = _range_problem(message)
    if problem:
        raise WireError(f"{kind.__name__}: {problem}")
    return message


def _require_finite(value: object, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{path} is {value!r}, which JSON cannot carry")
    if is_dataclass(value):
        for part in fields(value):
            _require_finite(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_finite(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            _require_finite(item, f"{path}[{index}]")


def _range_problem(message: object) -> str | None:
    if isinstance(message, RiskReport):
        scores = {"score": message.score, **message.terms}
        for name, score in scores.items():
            if score is not None and not 0.0 <= score <= 100.0:
                return f"{name} is {score}, outside 0..100"
    if isinstance(message, ActionRequest):
        if message.ratio is not None and not 0.0 < message.ratio <= 1.0:
            return f"ratio is {message.ratio}, outside (0, 1]"
        for name in ("bytes", "max_prompt_tokens", "ttl_s", "budget_ms", "timeout_s"):
            amount = getattr(message, name)
            if amount is not None and amount <= 0:
                return f"{name} is {amount}; it must be above 0"
    return _amount_problem(message, "$")


_MAY_FALL = frozenset({"growth_blocks_per_s"})
"""The only numbers that may be negative."""

_SHARES = frozenset({"recomputed_share", "prefix_hit_ratio", "psi_some_avg10", "psi_full_avg10", "exhaustion_chance"})
"""Numbers that are shares of a whole."""


def _amount_problem(value: Any, path: str) -> str | None:
    """The first number of a message, nested ones included, that no peer can have meant."""
    for name, lowest, highest in _bounds(type(value)):
        item = getattr(value, name)
        if item is None or isinstance(item, str):
            continue
        if isinstance(item, (int, float)):
            if not lowest <= item <= highest:
                return f"{path}.{name} is {item}, outside {lowest:g}..{highest:g}"
        elif isinstance(item, tuple):
            parts = (_amount_problem(entry, f"{path}.{name}[{index}]") for index, entry in enumerate(item))
            if problem := next((found for found in parts if found), None):
                return problem
        elif problem := _amount_problem(item, f"{path}.{name}"):
            return problem
    return None


_BOUNDS: dict[type, tuple[tuple[str, float, float], ...]] = {}


def _bounds(kind: type) -> tuple[tuple[str, float, float], ...]:
    """Fields of a message's part, each with what a number in it may be; none of what is not one."""
    if kind not in _BOUNDS:
        _BOUNDS[kind] = _look_up_bounds(kind) if is_dataclass(kind) else ()
    return _BOUNDS[kind]


def _look_up_bounds(kind: Any) -> tuple[tuple[str, float, float], ...]:
    shares = {part.name for part in fields(kind)} if kind is Fragmentation else _SHARES
    return tuple(
        (part.name, -math.inf if part.name in _MAY_FALL else 0.0, 1.0 if part.name in shares else math.inf)
        for part in fields(kind)
    )
