"""What our own engine promised to say: the JSON of `docs/contracts.md`, judged value by value. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from ullage_agent.adapters.base import Reading
from ullage_agent.adapters.contract import Field, Ledger, build_snapshot, read_json
from ullage_agent.errors import EngineProtocolError
from ullage_agent.histogram import Histogram, from_cumulative
from ullage_agent.wire import EngineIdentity

SNAPSHOT_VERSION = 1

FIELDS: tuple[Field, ...] = (
    Field(attribute="sequence", source="sequence"),
    Field(attribute="step", source="step.number"),
    Field(attribute="step_age_s", source="step.age_s", kind="float"),
    Field(attribute="block_tokens", source="block_tokens", low=1),
    Field(attribute="block_bytes", source="block_bytes", low=1),
    Field(attribute="total_blocks", source="blocks.total", low=1),
    Field(attribute="hot_blocks", source="blocks.active"),
    Field(attribute="reclaimable_blocks", source="blocks.cached"),
    Field(attribute="free_blocks", source="blocks.free"),
    Field(attribute="largest_free_run_blocks", source="largest_free_run"),
    Field(attribute="largest_allocation_blocks", source="largest_allocation", nullable=True),
    Field(attribute="compactable_blocks", source="cells.spare_blocks", nullable=True),
    Field(attribute="allocated_slots", source="slots.allocated"),
    Field(attribute="filled_slots", source="slots.filled"),
    Field(attribute="allocator_reserved_bytes", source="allocator.reserved_bytes"),
    Field(attribute="allocator_allocated_bytes", source="allocator.allocated_bytes"),
    Field(attribute="running", source="requests.running"),
    Field(attribute="waiting", source="requests.waiting"),
    Field(attribute="outstanding_blocks", source="requests.outstanding_blocks"),
    Field(attribute="admitted_total", source="counters.admitted"),
    Field(attribute="finished_total", source="counters.finished"),
    Field(attribute="preemptions_total", source="counters.preemptions"),
    Field(attribute="recomputed_tokens_total", source="counters.recomputed_tokens"),
    Field(attribute="prompt_tokens_total", source="counters.prompt_tokens"),
    Field(attribute="generated_tokens_total", source="counters.generated_tokens"),
    Field(attribute="prefix_query_tokens_total", source="counters.prefix_query_tokens"),
    Field(attribute="prefix_hit_tokens_total", source="counters.prefix_hit_tokens"),
    Field(attribute="host_total_bytes", source="host.total_bytes", nullable=True),
    Field(attribute="host_used_bytes", source="host.used_bytes", nullable=True),
    Field(attribute="admission_max_prompt_tokens", source="admission.max_prompt_tokens", nullable=True),
    Field(attribute="admission_expires_in_s", source="admission.expires_in_s", kind="float", nullable=True),
    Field(attribute="draining", source="admission.draining", kind="bool"),
)
"""The metric contract: every value of a snapshot, by its path in the engine's JSON."""

IN_FLIGHT = Field(attribute="in_flight", source="blocks.in_flight")

IDENTITY_FIELDS: tuple[Field, ...] = (
    Field(attribute="instance", source="instance", kind="text", low=1),
    Field(attribute="version", source="engine_version", kind="text"),
    Field(attribute="model", source="model", kind="text"),
)

LATENCIES = ("ttft", "inter_token", "end_to_end")
"""Names below `latency`, all optional: older engines tell none."""
MAX_BUCKETS = 256
"""Most buckets that a histogram may have: one is kept for every second of the service window."""

EVICTION_COUNTS: tuple[Field, ...] = (
    Field(attribute="blocks_freed", source="blocks_freed"),
    Field(attribute="bytes_freed", source="bytes_freed"),
    Field(attribute="dropped_blocks", source="dropped"),
    Field(attribute="demoted_blocks", source="demoted"),
    Field(attribute="sequences_touched", source="sequences_touched"),
    Field(attribute="duration_ms", source="duration_ms", kind="float"),
)
"""What an eviction must say it did; attributes of `ActionResult`."""

COMPACTION_COUNTS: tuple[Field, ...] = (
    Field(attribute="blocks_freed", source="blocks_freed"),
    Field(attribute="bytes_freed", source="bytes_freed"),
    Field(attribute="duration_ms", source="duration_ms", kind="float"),
    Field(attribute="cells_moved", source="cells_moved"),
    Field(attribute="remaining_blocks", source="remaining_blocks"),
    Field(attribute="before", source="before.external", kind="float", high=1),
    Field(attribute="after", source="after.external", kind="float", high=1),
)
"""What a compaction must say it did: the first three are attributes of `ActionResult`."""

DRAIN_STATE: tuple[Field, ...] = (
    Field(attribute="drained", source="drained", kind="bool"),
    Field(attribute="in_flight", source="in_flight"),
)

RESUME_STATE: tuple[Field, ...] = (Field(attribute="draining", source="draining", kind="bool"),)


def parse_snapshot(body: bytes, path: str, sampled_at: float) -> Reading:
    """Judge the answer of `GET /admin/v1/kv` against the metric contract. Pure.

    Raises:
        EngineProtocolError: not a JSON object, or of another version.
    """
    document = parse_object(body, path)
    if document.get("version") != SNAPSHOT_VERSION:
        version = document.get("version")
        raise EngineProtocolError(f"{path}: version {version!r} is not {SNAPSHOT_VERSION}; upgrade the agent")
    ledger = Ledger()
    values = read_json(document, FIELDS, ledger)
    in_flight: Any = read_json(document, (IN_FLIGHT,), ledger)["in_flight"]
    identity: Any = read_json(document, IDENTITY_FIELDS, ledger)
    snapshot = build_snapshot(values, sampled_at=sampled_at, in_flight=in_flight, ledger=ledger)
    histograms = _read_latencies(document.get("latency"), ledger)
    return Reading(
        snapshot=snapshot,
        identity=EngineIdentity(type="ullage", **{**identity, "instance": identity["instance"] or "unknown"}),
        violations=ledger.violations,
        histograms=histograms,
    )


def _read_latencies(told: object, ledger: Ledger) -> dict[str, Histogram]:
    """The histograms that are there. One that is no cumulative histogram is a violation; the others count."""
    if told is None:
        return {}
    if not isinstance(told, dict):
        ledger.report("latency", "wrong_type", f"a {type(told).__name__}, not an object")
        return {}
    given = {name: told[name] for name in LATENCIES if told.get(name) is not None}
    read = {name: _read_buckets(f"latency.{name}", raw, ledger) for name, raw in given.items()}
    return {name: histogram for name, histogram in read.items() if histogram is not None}


def _read_buckets(source: str, raw: object, ledger: Ledger) -> Histogram | None:
    if not isinstance(raw, list) or len(raw) > MAX_BUCKETS:
        ledger.report(source, "wrong_type", f"not a list of at most {MAX_BUCKETS} buckets")
        return None
    pairs: list[tuple[float, float]] = []
    for bucket in raw:
        pair = _read_bucket(source, bucket, ledger)
        if pair is None:
            return None  # one violation a histogram says enough
        pairs.append(pair)
    histogram = from_cumulative(pairs)
    if histogram is None:
        ledger.report(source, "out_of_range", "its buckets are no cumulative histogram")
    return histogram


def _read_bucket(source: str, raw: object, ledger: Ledger) -> tuple[float, float] | None:
    if not isinstance(raw, list) or len(raw) != 2:
        ledger.report(source, "wrong_type", "a bucket is no pair of upper bound and count")
        return None
    bound = math.inf if raw[0] is None else ledger.accept(Field(attribute="", source=source, kind="float"), raw[0])
    if bound is None:
        return None
    count = ledger.accept(Field(attribute="", source=source), raw[1])
    return None if count is None else (float(bound), float(count))


def parse_object(body: bytes, path: str) -> dict[str, Any]:
    """Read a JSON object. NaN and infinity pass, to be judged value by value.

    Raises:
        EngineProtocolError: it is none.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineProtocolError(f"{path}: the answer is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise EngineProtocolError(f"{path}: the answer is a {type(document).__name__}, not an object")
    return document


def require(document: dict[str, Any], table: tuple[Field, ...], path: str) -> dict[str, Any]:
    """All values of `table`.

    Raises:
        EngineProtocolError: one is bad; what an action did must not be guessed.
    """
    ledger = Ledger()
    values = read_json(document, table, ledger)
    for violation in ledger.violations:
        raise EngineProtocolError(f"{path}: {violation.metric}: {violation.problem}, {violation.detail}")
    return values
