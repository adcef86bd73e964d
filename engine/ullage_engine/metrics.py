"""Every metric that the engine exports, in one place.

Three sources: the core's last snapshot, read when Prometheus scrapes (`SnapshotCollector`), what each step cost
(`StepMetrics`), and what only the HTTP side sees (`HttpMetrics`), both counted as it happens. Base units in names;
block counts are blocks. A value that the engine cannot know is absent, never zero. Non-goal: risk and forecasts, which
the agent computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ullage_engine.api.core import EngineCore
from ullage_engine.snapshot import EngineSnapshot
from ullage_engine.steps import StepStats

PREFIX = "ullage_engine_"

Samples = Iterable[tuple[str, float]]
"""Pairs of a label's value and a number."""

Latency = dict[str, list[tuple[float | None, int]]]
"""Cumulative buckets by name: upper bound in seconds, None for +Inf, and how many were observed up to it."""

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DRAFT_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class _Plain:
    """A metric without labels; `read` answers None when there is no value now."""

    name: str
    text: str
    read: Callable[[EngineSnapshot], float | None]
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A metric with one label."""

    name: str
    text: str
    label: str
    read: Callable[[EngineSnapshot], Samples]
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily


def _tiers(snapshot: EngineSnapshot, part: str) -> Samples:
    tiers = (("host", snapshot.host), ("disk", snapshot.disk))
    return [(name, getattr(tier, part)) for name, tier in tiers if tier is not None]


TIER_COUNTERS = {
    "stored_blocks": "Blocks copied into a lower tier.",
    "loaded_blocks": "Blocks copied out of a lower tier, towards the pool.",
    "evicted_blocks": "Blocks that a lower tier pushed out to make room.",
    "failed_copies": "Copies of a block to or from a lower tier that failed or were late.",
    "hit_tokens": "Tokens that sequences needn't compute because a lower tier had them.",
}
"""Fields of `snapshot.TierState`, each with its metric's text."""

PLAIN = (
    _Plain("kv_pinned_blocks", "Active blocks that a copy to a lower tier reads.", lambda s: s.blocks.pinned),
    _Plain("kv_split_blocks", "Active blocks split into cells for what eviction kept.", lambda s: s.cells.split_blocks),
    _Plain("kv_block_bytes", "Bytes of one block, all layers and scales.", lambda s: s.block_bytes),
    _Plain("kv_block_tokens", "Token slots of one block.", lambda s: s.block_tokens),
    _Plain("kv_largest_free_run_blocks", "Longest run of adjacent free blocks.", lambda s: s.largest_free_run),
    _Plain("requests_running", "Sequences in the running batch.", lambda s: s.running),
    _Plain("requests_waiting", "Sequences queued or preempted.", lambda s: s.waiting),
    _Plain("outstanding_blocks", "Blocks that admitted requests may still ask for.", lambda s: s.outstanding_blocks),
    _Plain("allocator_reserved_bytes", "Bytes the allocator took.", lambda s: s.allocator_reserved_bytes),
    _Plain("allocator_allocated_bytes", "Of those, bytes in use.", lambda s: s.allocator_allocated_bytes),
    _Plain("admission_limit_prompt_tokens", "Longest prompt admitted while throttled.", lambda s: s.max_prompt_tokens),
    _Plain("admission_limit_blocks", "Most blocks a request may need while throttled.", lambda s: s.max_total_blocks),
    _Plain("draining", "1 while nothing is admitted.", lambda s: float(s.draining)),
    _Plain("steps", "Passes of the step loop.", lambda s: s.step, CounterMetricFamily),
)

COUNTERS = {
    "admitted": ("requests_admitted", "Requests admitted."),
    "finished": ("requests_finished", "Requests that ended with stop or length."),
    "failed": ("requests_failed", "Requests that ended with an error."),
    "aborted": ("requests_aborted", "Requests ended by their client."),
    "preemptions": ("preemptions", "Running sequences put back into the queue."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens prefilled again after a preemption."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "prefix_query_tokens": ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("prefix_hit_tokens", "Of those, tokens found."),
    "evicted_blocks": ("evicted_blocks", "Blocks freed by eviction."),
    "evicted_tokens": ("evicted_tokens", "Tokens of live sequences dropped by eviction."),
    "drafted_tokens": ("drafted_tokens", "Tokens proposed by speculation and verified."),
    "accepted_tokens": ("accepted_tokens", "Of those, tokens that stood."),
}
"""Fields of `snapshot.Counters`, each with its metric's name and text."""

LABELLED = (
    _Labelled(
        "kv_blocks",
        "Blocks by state; the sum is the pool.",
        "state",
        lambda s: [(state, getattr(s.blocks, state)) for state in ("free", "active", "cached", "in_flight")],
    ),
    _Labelled(
        "kv_slots",
        "Token slots of active blocks.",
        "state",
        lambda s: [("allocated", s.slots_allocated), ("filled", s.slots_filled)],
    ),
    _Labelled(
        "kv_cells",
        "Cells of split blocks; compaction makes whole blocks of free ones.",
        "state",
        lambda s: [("used", s.cells.used), ("free", s.cells.total - s.cells.used)],
    ),
    _Labelled(
        "evicted_tokens_by_policy",
        "Tokens that budgets dropped, by eviction policy.",
        "policy",
        lambda s: list(s.dropped_tokens.items()),
        CounterMetricFamily,
    ),
    _Labelled("kv_tier_bytes", "Size of a lower tier.", "tier", lambda s: _tiers(s, "total_bytes")),
    _Labelled("kv_tier_used_bytes", "Bytes used in a lower tier.", "tier", lambda s: _tiers(s, "used_bytes")),
    *(
        _Labelled(f"kv_tier_{part}", text, "tier", partial(_tiers, part=part), CounterMetricFamily)
        for part, text in TIER_COUNTERS.items()
    ),
)


class SnapshotCollector(Collector):
    """Reads the core's last snapshot at each scrape."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def describe(self) -> Iterable[Metric]:
        """None beforehand: registering must not ask the core."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics of one snapshot, so that they fit each other."""
        snapshot = self._core.snapshot()
        yield InfoMetricFamily(
            PREFIX.rstrip("_"),
            "The engine process.",
            {"instance_id": snapshot.instance, "model": snapshot.model, "version": snapshot.engine_version},
        )
        yield GaugeMetricFamily(
            PREFIX + "step_age_seconds", "Since the loop last completed a pass.", self._core.step_age_s()
        )
        yield from _plain(snapshot)
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, getattr(snapshot.counters, field))
        for metric in LABELLED:
            family = metric.kind(PREFIX + metric.name, metric.text, labels=[metric.label])
            for label, value in metric.read(snapshot):
                family.add_metric([label], value)
            yield family


def _plain(snapshot: EngineSnapshot) -> Iterator[Metric]:
    for metric in PLAIN:
        value = metric.read(snapshot)
        if value is not None:
            yield metric.kind(PREFIX + metric.name, metric.text, value)


class StepMetrics:
    """What the step loop's steps cost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.duration = Histogram(
            PREFIX + "step_seconds",
            "One step that computed something.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.tokens = Histogram(
            PREFIX + "step_tokens",
            "Tokens computed in a step: prefill, decode and drafts.",
            buckets=_COUNT_BUCKETS,
            registry=registry,
        )
        self.sequences = Histogram(
            PREFIX + "step_sequences", "Sequences worked on in a step.", buckets=_COUNT_BUCKETS, registry=registry
        )
        self.accepted = Histogram(
            PREFIX + "draft_accepted_length_tokens",
            "Tokens of a verified draft that stood.",
            buckets=_DRAFT_BUCKETS,
            registry=registry,
        )
        self.queued = Histogram(
            PREFIX + "queue_seconds",
            "From a request's submission to the first step that works on it.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

    def observe(self, stats: StepStats) -> None:
        """Take one step in; called in the step loop's thread."""
        self.duration.observe(stats.duration_s)
        self.tokens.observe(stats.tokens)
        self.sequences.observe(stats.sequences)
        for length in stats.accepted:
            self.accepted.observe(length)
        for seconds in stats.queued_s:
            self.queued.observe(seconds)


class HttpMetrics:
    """What the HTTP side counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From a request's arrival in the queue to its first token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            PREFIX + "inter_token_seconds",
            "Between two tokens of a sequence.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.end_to_end = Histogram(
            PREFIX + "request_seconds",
            "From a request's arrival in the queue to its last token.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.queue_timeouts = Counter(
            PREFIX + "queue_timeouts",
            "Calls ended because they had waited in the queue for --max-wait-seconds.",
            registry=registry,
        )
        self.responses = Counter(
            PREFIX + "http_responses",
            "Answers by route and status; 499: the client went away.",
            ["route", "status"],
            registry=registry,
        )

    def latency(self) -> Latency:
        """What `GET /admin/v1/kv` tells of latencies; counts since the process started."""
        told = {"ttft": self.first_token, "inter_token": self.inter_token, "end_to_end": self.end_to_end}
        return {name: _buckets(histogram) for name, histogram in told.items()}


def _buckets(histogram: Histogram) -> list[tuple[float | None, int]]:
    samples = [sample for family in histogram.collect() for sample in family.samples]
    pairs = [(float(sample.labels["le"]), int(sample.value)) for sample in samples if sample.name.endswith("_bucket")]
    return [(None if bound == inf else bound, count) for bound, count in pairs]


def make_registry(core: EngineCore) -> tuple[CollectorRegistry, HttpMetrics]:
    """A registry of all of the engine's metrics, and the part that the HTTP side feeds."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(core))
    core.on_step(StepMetrics(registry).observe)
    return registry, HttpMetrics(registry)
