"""Metric contracts: what an engine promised to say, and what to make of it when it says something else.

A value that is missing, renamed, not finite, out of range or of the wrong type becomes a `Violation` and None
in the snapshot. It is never read as zero: a zero that means "unknown" has scaled real fleets down at their peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeGuard

from ullage_agent.wire import Rank, Snapshot, Violation

Scalar = int | float | bool | str
Kind = Literal["int", "float", "bool", "text"]
Problem = Literal["missing", "renamed", "not_finite", "out_of_range", "wrong_type", "stale"]

MAX_COUNT = 2**53
"""Greatest whole number that JSON peers and Prometheus carry exactly."""
MAX_TEXT = 256
"""Longest name taken from an engine: it becomes a label of every dashboard."""
STALE_STEP_S = 30.0
"""A step loop that has not passed for this long is stuck; idle loops pass too."""

_TYPES: dict[Kind, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "text": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One promised value."""

    attribute: str
    """Field of `Snapshot` (or of the engine's identity) that it fills."""
    source: str
    """Its present name in the engine's words."""
    kind: Kind = "int"
    low: float = 0
    high: float = MAX_COUNT
    nullable: bool = False
    """The engine may say null (or leave it out): None without a violation."""
    aliases: tuple[str, ...] = ()
    """Its names in other versions of the engine."""


class Ledger:
    """Judges values one by one and collects the violations. One ledger serves one reading."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(self._violations)

    def report(self, metric: str, problem: Problem, detail: str) -> None:
        """Enter a violation; the detail is cut to a readable length."""
        self._violations.append(Violation(metric=metric, problem=problem, detail=detail[:MAX_TEXT]))

    def accept(self, field: Field, raw: object) -> Scalar | None:
        """`raw` if it keeps the promise; otherwise None, with a violation entered."""
        if raw is None and field.nullable:
            return None
        if isinstance(raw, float) and not math.isfinite(raw):
            self.report(field.source, "not_finite", f"{raw} is no number")
            return None
        if not _has_kind(raw, field.kind):
            self.report(field.source, "wrong_type", f"{_short(raw)} is no {field.kind}")
            return None
        if not _in_range(raw, field):
            self.report(field.source, "out_of_range", f"{_short(raw)} is outside {_range_of(field)}")
            return None
        return raw

    def absent(self, field: Field, unknown_names: Iterable[str]) -> None:
        """Enter that a promised value is not there, guessing from the names that are whether it moved."""
        if field.nullable:
            return
        match = get_close_matches(field.source, list(unknown_names), n=1, cutoff=0.6)
        if match:
            self.report(field.source, "renamed", f"not there, but {match[0]!r} is")
        else:
            self.report(field.source, "missing", "not there")


def read_json(document: Mapping[str, Any], table: Iterable[Field], ledger: Ledger) -> dict[str, Scalar | None]:
    """Attributes of `table` found by their dotted paths in a JSON document."""
    table = tuple(table)
    known = {field.source for field in table}
    return {field.attribute: _read_path(document, field, known, ledger) for field in table}


def build_snapshot(
    values: Mapping[str, Scalar | None],
    *,
    sampled_at: float,
    in_flight: int | None,
    ledger: Ledger,
    ranks: tuple[Rank, ...] = (),
) -> Snapshot:
    """Check values against each other, then make the snapshot. Those that disagree become None.

    `in_flight` counts blocks that are neither hot, reclaimable nor free at the moment; None if unknown.
    """
    checked: dict[str, Any] = dict(values)
    _check_sum(checked, in_flight, ledger)
    _check_allocation(checked, ledger)
    for lesser, greater in _ORDERED:
        _check_order(checked, lesser, greater, ledger)
    age = checked.get("step_age_s")
    if age is not None and age > STALE_STEP_S:
        ledger.report("step_age_s", "stale", f"the step loop last passed {age:.0f} s ago")
    return Snapshot(sampled_at=sampled_at, ranks=ranks, **checked)


_ORDERED = (
    ("largest_free_run_blocks", "free_blocks"),
    ("compactable_blocks", "hot_blocks"),
    ("filled_slots", "allocated_slots"),
    ("allocator_allocated_bytes", "allocator_reserved_bytes"),
    ("host_used_bytes", "host_total_bytes"),
    ("prefix_hit_tokens_total", "prefix_query_tokens_total"),
)
"""Pairs of which the first can never exceed the second."""

_CATEGORIES = ("hot_blocks", "reclaimable_blocks", "free_blocks")


def _check_sum(values: dict[str, Any], in_flight: int | None, ledger: Ledger) -> None:
    total, parts = values.get("total_blocks"), [values.get(name) for name in _CATEGORIES]
    known = sum(part for part in parts if part is not None) + (in_flight or 0)
    complete = in_flight is not None and None not in parts
    if total is None or known == total or (known < total and not complete):
        return
    ledger.report("blocks", "out_of_range", f"hot, reclaimable, free, in flight make {known}, the total is {total}")
    for name in (*_CATEGORIES, "largest_free_run_blocks", "largest_allocation_blocks"):
        values[name] = None


def _check_allocation(values: dict[str, Any], ledger: Ledger) -> None:
    """Nobody can have more than there is to be had."""
    largest, free = values.get("largest_allocation_blocks"), values.get("free_blocks")
    cached = values.get("reclaimable_blocks")
    if largest is None or free is None or cached is None or largest <= free + cached:
        return
    ledger.report(
        "largest_allocation_blocks", "out_of_range", f"{largest} exceeds free + reclaimable = {free + cached}"
    )
    values["largest_allocation_blocks"] = None


def _check_order(values: dict[str, Any], lesser: str, greater: str, ledger: Ledger) -> None:
    low, high = values.get(lesser), values.get(greater)
    if low is not None and high is not None and low > high:
        ledger.report(lesser, "out_of_range", f"{low} exceeds {greater} = {high}")
        values[lesser] = None


def _read_path(document: Mapping[str, Any], field: Field, known: set[str], ledger: Ledger) -> Scalar | None:
    place: Any = document
    walked: list[str] = []
    for key in field.source.split("."):
        if place is None and field.nullable:
            return None
        if not isinstance(place, dict):
            ledger.report(field.source, "wrong_type", f"{'.'.join(walked) or 'the answer'} is {_short(place)}")
            return None
        if key not in place:
            siblings = (".".join([*walked, str(name)]) for name in place)
            ledger.absent(field, [name for name in siblings if name not in known])
            return None
        place = place[key]
        walked.append(key)
    return ledger.accept(field, place)


def _has_kind(raw: object, kind: Kind) -> TypeGuard[Scalar]:
    if isinstance(raw, bool):
        return kind == "bool"  # Python counts True as a number, the contract does not
    return isinstance(raw, _TYPES[kind])


def _in_range(raw: Scalar, field: Field) -> bool:
    if isinstance(raw, str):
        return field.low <= len(raw) <= MAX_TEXT
    return field.low <= raw <= field.high


def _range_of(field: Field) -> str:
    if field.kind == "text":
        return f"{field.low:g}..{MAX_TEXT} characters"
    return f"{field.low:g}..{'2^53' if field.high == MAX_COUNT else f'{field.high:g}'}"


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        return "a number beyond 2^53"  # printing it could cost minutes
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "…"
