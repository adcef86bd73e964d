"""A simulated block pool: hot blocks grow with time, and actions change them as a real engine's would.

Pure of IO; the caller brings the time. It obeys the laws that a snapshot must obey, nothing finer: no
sequences, no tokens, no policy.
"""

from __future__ import annotations

import math

import msgspec

from ullage_agent.errors import ConfigError
from ullage_agent.wire import Action, ActionRequest, ActionResult, Outcome, Snapshot


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the pool starts and behaves. Counts are blocks."""

    total: int = 256
    hot: int = 0
    cached: int = 0
    growth_per_s: float = 0.0
    """Blocks by which hot grows each second until it reaches `peak`."""
    peak: int | None = None
    """Hot blocks that admitted work will need in the end; above `total` it does not fit. None: `total`."""
    protected: int = 0
    """Hot blocks that no eviction takes."""
    free_runs: int = 1
    """Runs that the free blocks lie in, until compaction makes them one; an allocation can have one run alone."""
    block_tokens: int = 16
    block_bytes: int = 195_840


class SimulatedPool:
    """State of a simulated pool. Every call first lets it grow up to `now` (monotonic seconds)."""

    def __init__(self, spec: PoolSpec, now: float) -> None:
        _check(spec)
        self.spec = spec
        self._now = now
        self._hot = float(spec.hot)
        self._cached = spec.cached
        self._free_runs = spec.free_runs
        self._limit: int | None = None
        self._limit_until = math.inf
        self._draining = False

    @property
    def hot(self) -> int:
        return int(self._hot)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def free(self) -> int:
        return self.spec.total - self.hot - self._cached

    def snapshot(self, now: float, wall: float, sequence: int) -> Snapshot:
        """The pool as an engine would report it."""
        self._grow(now)
        slots = self.hot * self.spec.block_tokens
        throttled = self._limit is not None
        outstanding = 0 if self._draining else max(0, self._peak - self.hot)
        return Snapshot(
            sampled_at=wall,
            sequence=sequence,
            step=sequence,
            step_age_s=0.0,
            block_tokens=self.spec.block_tokens,
            block_bytes=self.spec.block_bytes,
            total_blocks=self.spec.total,
            hot_blocks=self.hot,
            reclaimable_blocks=self.cached,
            free_blocks=self.free,
            largest_free_run_blocks=math.ceil(self.free / self._free_runs),
            largest_allocation_blocks=math.ceil((self.free + self.cached) / self._free_runs),
            allocated_slots=slots,
            filled_slots=slots,
            allocator_reserved_bytes=self.spec.total * self.spec.block_bytes,
            allocator_allocated_bytes=self.spec.total * self.spec.block_bytes,
            running=1 if self.hot or outstanding else 0,
            waiting=0,
            outstanding_blocks=outstanding,
            admission_max_prompt_tokens=self._limit,
            admission_expires_in_s=self._limit_until - now if throttled else None,
            draining=self._draining,
        )

    def act(self, action: Action, request: ActionRequest, now: float) -> ActionResult:
        """Do an action at once and say what it did."""
        self._grow(now)
        if action == "evict":
            return self._evict(request)
        if action == "compact":
            return self._compact()
        if action == "throttle":
            self._limit = request.max_prompt_tokens
            self._limit_until = now + (request.ttl_s or math.inf)
            return _done(action, "Succeeded", f"prompts above {self._limit} tokens are refused")
        if action == "release":
            self._limit, self._limit_until, self._draining = None, math.inf, False
            return _done(action, "Succeeded", "prompts of any length are admitted")
        self._draining = True
        self._cached += self.hot
        self._hot = 0.0
        return _done(action, "Succeeded", "no request is in flight; none is admitted")

    @property
    def _peak(self) -> int:
        return self.spec.total if self.spec.peak is None else self.spec.peak

    def _grow(self, now: float) -> None:
        passed, self._now = max(0.0, now - self._now), now
        if self._limit is not None and now >= self._limit_until:
            self._limit, self._limit_until = None, math.inf
        if self._limit is None and not self._draining:
            roof = max(self._hot, min(self._peak, self.spec.total))
            self._hot = min(roof, self._hot + passed * self.spec.growth_per_s)
        self._cached = min(self._cached, self.spec.total - self.hot)

    def _evict(self, request: ActionRequest) -> ActionResult:
        occupied = self.hot + self._cached
        if request.bytes is not None:
            wanted = math.ceil(request.bytes / self.spec.block_bytes)
        else:
            wanted = math.ceil((request.ratio or 0.0) * occupied)
        from_cache = min(wanted, self._cached)
        from_hot = min(wanted - from_cache, max(0, self.hot - self.spec.protected))
        freed = from_cache + from_hot
        if not request.dry_run:
            self._cached -= from_cache
            self._hot -= from_hot
        return ActionResult(
            action="evict",
            outcome="Succeeded" if freed else "Ineffective",
            message=f"{'would free' if request.dry_run else 'freed'} {freed} of {wanted} blocks",
            blocks_freed=freed,
            bytes_freed=freed * self.spec.block_bytes,
            dropped_blocks=freed,
            sequences_touched=1 if from_hot else 0,
            dry_run=request.dry_run,
        )

    def _compact(self) -> ActionResult:
        improved = self._free_runs > 1 and self.free > 1
        self._free_runs = 1
        outcome: Outcome = "Succeeded" if improved else "Ineffective"
        return _done("compact", outcome, f"{self.free} free blocks lie in one run")


def _done(action: Action, outcome: Outcome, message: str) -> ActionResult:
    return ActionResult(action=action, outcome=outcome, message=message)


def _check(spec: PoolSpec) -> None:
    rules = (
        (spec.total >= 1, "total", "at least 1"),
        (spec.hot >= 0 and spec.cached >= 0, "hot and cached", "at least 0"),
        (spec.hot + spec.cached <= spec.total, "hot + cached", "at most total"),
        (spec.free_runs >= 1, "free_runs", "at least 1"),
        (spec.protected >= 0, "protected", "at least 0"),
        (spec.block_tokens >= 1 and spec.block_bytes >= 1, "block_tokens and block_bytes", "at least 1"),
        (math.isfinite(spec.growth_per_s) and spec.growth_per_s >= 0, "growth_per_s", "at least 0"),
    )
    for holds, name, bound in rules:
        if not holds:
            raise ConfigError(f"fake engine's pool: {name} must be {bound}")
