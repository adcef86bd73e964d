"""Bad values become violations and None, never zero."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters.contract import MAX_TEXT, Field, Ledger, build_snapshot, read_json

COUNT = Field(attribute="hot_blocks", source="blocks.active")
AGE = Field(attribute="step_age_s", source="step.age_s", kind="float")
FLAG = Field(attribute="draining", source="draining", kind="bool")
NAME = Field(attribute="model", source="model", kind="text", low=1)
LIMIT = Field(attribute="limit", source="admission.limit", nullable=True)


@pytest.mark.parametrize("raw", [0, 1, 2**53])
def test_counts_accepted(raw: int) -> None:
    ledger = Ledger()
    assert ledger.accept(COUNT, raw) == raw
    assert ledger.violations == ()


@pytest.mark.parametrize(
    ("field", "raw", "problem"),
    [
        (COUNT, -1, "out_of_range"),
        (COUNT, 2**53 + 1, "out_of_range"),
        pytest.param(COUNT, 10**5000, "out_of_range", id="too long even to print"),
        (COUNT, 1.0, "wrong_type"),
        (COUNT, True, "wrong_type"),
        (COUNT, "12", "wrong_type"),
        (COUNT, None, "wrong_type"),
        (COUNT, [1], "wrong_type"),
        (AGE, float("nan"), "not_finite"),
        (AGE, float("inf"), "not_finite"),
        (AGE, -0.1, "out_of_range"),
        pytest.param(AGE, 10**400, "out_of_range", id="beyond any float"),
        (FLAG, 1, "wrong_type"),
        (NAME, "", "out_of_range"),
        (NAME, "x" * (MAX_TEXT + 1), "out_of_range"),
        (NAME, 5, "wrong_type"),
    ],
)
def test_bad_values(field: Field, raw: object, problem: str) -> None:
    ledger = Ledger()
    assert ledger.accept(field, raw) is None
    (violation,) = ledger.violations
    assert (violation.metric, violation.problem) == (field.source, problem)
    assert len(violation.detail) <= MAX_TEXT


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "missing"),
        ({"blocks": {}}, "missing"),
        ({"blocks": {"total": 5}}, "missing"),
        ({"blocks": {"active_blocks": 5}}, "renamed"),
        ({"blocks": None}, "wrong_type"),
        ({"blocks": []}, "wrong_type"),
    ],
)
def test_absent_values(document: dict[str, Any], problem: str) -> None:
    ledger = Ledger()
    total = Field(attribute="total_blocks", source="blocks.total", nullable=True)
    assert read_json(document, (COUNT, total), ledger)["hot_blocks"] is None
    assert (ledger.violations[0].metric, ledger.violations[0].problem) == ("blocks.active", problem)


@pytest.mark.parametrize("document", [{}, {"admission": None}, {"admission": {}}, {"admission": {"limit": None}}])
def test_null_is_an_answer_where_it_was_promised(document: dict[str, Any]) -> None:
    ledger = Ledger()
    assert read_json(document, (LIMIT,), ledger) == {"limit": None}
    assert ledger.violations == ()


BLOCKS = {"total_blocks": 10, "hot_blocks": 3, "reclaimable_blocks": 4, "free_blocks": 2}


def test_blocks_that_sum_with_those_in_flight() -> None:
    ledger = Ledger()
    snapshot = build_snapshot(BLOCKS, sampled_at=0, in_flight=1, ledger=ledger)
    assert snapshot.free_blocks == 2
    assert ledger.violations == ()


@pytest.mark.parametrize("in_flight", [0, 2])
def test_blocks_that_do_not_sum_are_all_unknown(in_flight: int) -> None:
    ledger = Ledger()
    values = {**BLOCKS, "largest_free_run_blocks": 1}
    snapshot = build_snapshot(values, sampled_at=0, in_flight=in_flight, ledger=ledger)
    assert (snapshot.hot_blocks, snapshot.reclaimable_blocks, snapshot.free_blocks) == (None, None, None)
    assert snapshot.largest_free_run_blocks is None
    assert snapshot.total_blocks == 10
    assert [(v.metric, v.problem) for v in ledger.violations] == [("blocks", "out_of_range")]


def test_partly_known_blocks_may_leave_room_but_not_exceed() -> None:
    ledger = Ledger()
    values = {"total_blocks": 10, "hot_blocks": 3}
    assert build_snapshot(values, sampled_at=0, in_flight=None, ledger=ledger).hot_blocks == 3
    assert ledger.violations == ()
    values = {"total_blocks": 10, "hot_blocks": 11}
    assert build_snapshot(values, sampled_at=0, in_flight=None, ledger=ledger).hot_blocks is None
    assert len(ledger.violations) == 1


@pytest.mark.parametrize(("largest", "kept"), [(7, 7), (8, None)])
def test_nobody_can_have_more_than_there_is(largest: int, kept: int | None) -> None:
    ledger = Ledger()
    values = {
        "total_blocks": 10,
        "hot_blocks": 3,
        "reclaimable_blocks": 5,
        "free_blocks": 2,
        "largest_allocation_blocks": largest,
    }
    assert build_snapshot(values, sampled_at=0, in_flight=0, ledger=ledger).largest_allocation_blocks == kept
    assert len(ledger.violations) == (kept is None)


@pytest.mark.parametrize(
    ("lesser", "greater"),
    [
        ("largest_free_run_blocks", "free_blocks"),
        ("filled_slots", "allocated_slots"),
        ("allocator_allocated_bytes", "allocator_reserved_bytes"),
        ("host_used_bytes", "host_total_bytes"),
        ("prefix_hit_tokens_total", "prefix_query_tokens_total"),
    ],
)
def test_a_part_greater_than_its_whole_is_unknown(lesser: str, greater: str) -> None:
    ledger = Ledger()
    snapshot = build_snapshot({lesser: 6, greater: 5}, sampled_at=0, in_flight=None, ledger=ledger)
    assert getattr(snapshot, lesser) is None
    assert getattr(snapshot, greater) == 5
    assert [v.metric for v in ledger.violations] == [lesser]


def test_a_stuck_step_loop_is_stale_and_keeps_its_values() -> None:
    ledger = Ledger()
    snapshot = build_snapshot({"step_age_s": 31.0}, sampled_at=0, in_flight=None, ledger=ledger)
    assert snapshot.step_age_s == 31.0
    assert [v.problem for v in ledger.violations] == ["stale"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["active", "x"]), inner),
    max_leaves=8,
)


@given(json_values)
def test_any_json_gives_a_count_or_a_violation(value: Any) -> None:
    ledger = Ledger()
    found = read_json({"blocks": value}, (COUNT,), ledger)["hot_blocks"]
    if found is None:
        assert len(ledger.violations) == 1
    else:
        assert type(found) is int
        assert 0 <= found <= 2**53
