"""What agent and operator say to each other survives the wire, and what is bad does not get across."""

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent import wire
from ullage_agent.wire import (
    ActionRequest,
    ActionResult,
    Device,
    EngineIdentity,
    Forecast,
    Fragmentation,
    Host,
    Liveness,
    Rank,
    RiskReport,
    Service,
    Snapshot,
    Violation,
    WireError,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
points = st.floats(0, 100)
count = st.none() | st.integers(0, 2**53)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
amount = st.none() | st.floats(0, 1e9)
snapshots = st.builds(
    Snapshot,
    sampled_at=st.floats(0, 1e12),
    **{field.name: count for field in fields(Snapshot) if field.type == "int | None"},
    step_age_s=amount,
    admission_expires_in_s=amount,
    draining=st.none() | st.booleans(),
    ranks=st.lists(st.builds(Rank, name=text, hot_blocks=count, waiting=count), max_size=3).map(tuple),
)
shares = st.none() | st.floats(0, 1)
services = st.builds(
    Service, window_s=st.floats(0, 1e3), arrivals_per_s=amount, ttft_p99_s=amount, prefix_hit_ratio=shares
)
livenesses = st.builds(
    Liveness,
    state=st.sampled_from(["working", "idle", "stalled", "dead", "unknown"]),
    quiet_s=st.floats(0, 1e6),
    detail=text,
)
devices = st.builds(Device, index=st.integers(0, 64), used_bytes=count, other_bytes=count, last_xid=count)
hosts = st.builds(Host, limit_bytes=count, used_bytes=count, psi_full_avg10=shares)
reports = st.builds(
    RiskReport,
    engine=st.builds(EngineIdentity, type=text, instance=text, version=st.none() | text, model=st.none() | text),
    generated_at=st.floats(0, 1e12),
    sample_age_s=amount,
    score=st.none() | points,
    winner=st.none() | text,
    terms=st.dictionaries(text, points, max_size=3),
    snapshot=st.none() | snapshots,
    fragmentation=st.none() | st.builds(Fragmentation, external=st.none() | st.floats(0, 1)),
    forecast=st.none()
    | st.builds(Forecast, exhaustion_p50_s=amount, growth_blocks_per_s=st.none() | finite, exhaustion_chance=shares),
    service=st.none() | services,
    liveness=st.none() | livenesses,
    devices=st.lists(devices, max_size=3).map(tuple),
    host=st.none() | hosts,
    capabilities=st.lists(st.sampled_from(wire.ACTIONS), max_size=5).map(tuple),
    features=st.lists(text, max_size=3).map(tuple),
    violations=st.lists(st.builds(Violation, metric=text, problem=st.just("missing"), detail=text)).map(tuple),
    error=st.none() | text,
)
requests = st.builds(
    ActionRequest,
    ratio=st.none() | st.floats(0, 1, exclude_min=True),
    bytes=st.none() | st.integers(1, 2**53),
    max_prompt_tokens=st.none() | st.integers(1, 2**53),
    ttl_s=st.none() | st.floats(0.1, 1e9),
    budget_ms=st.none() | st.integers(1, 10_000),
    dry_run=st.booleans(),
    timeout_s=st.floats(0.1, 1e6),
    reason=text,
)
results = st.builds(
    ActionResult,
    action=st.sampled_from(wire.ACTIONS),
    outcome=st.sampled_from(["Succeeded", "Ineffective", "Failed", "Unsupported"]),
    message=text,
    blocks_freed=st.integers(0, 2**53),
    duration_ms=st.floats(0, 1e9),
    before=st.none() | snapshots,
    after=st.none() | snapshots,
)


@given(reports | requests | results)
def test_every_message_survives_the_wire(message: RiskReport | ActionRequest | ActionResult) -> None:
    assert wire.decode(wire.encode(message), type(message)) == message


@given(reports)
def test_what_crosses_is_plain_json(report: RiskReport) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(wire.encode(report), parse_constant=refuse)["version"] == wire.WIRE_VERSION


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_carry_are_refused(bad: float) -> None:
    result = ActionResult(action="evict", outcome="Succeeded", message="")
    nested = replace(result, before=Snapshot(sampled_at=bad))
    for message in (replace(result, duration_ms=bad), nested, ActionRequest(ratio=bad)):
        with pytest.raises(WireError, match=r"\$\."):
            wire.encode(message)


@given(st.recursive(st.none() | st.booleans() | finite | text, lambda x: st.lists(x) | st.dictionaries(text, x)))
def test_any_json_decodes_or_is_refused(value: Any) -> None:
    for kind in (RiskReport, ActionResult, ActionRequest):
        try:
            message = wire.decode(json.dumps(value).encode(), kind)
        except WireError:
            continue
        assert isinstance(message, kind)


def encoded(**changes: Any) -> bytes:
    report = {
        "engine": {"type": "fake", "instance": "i"},
        "generated_at": 1.0,
        "sample_age_s": 0.5,
        "score": 50.0,
        "winner": "classic",
        "terms": {"classic": 50.0},
        "version": wire.WIRE_VERSION,
    }
    return json.dumps({**report, **changes}).encode()


def test_a_newer_peer_may_add_fields() -> None:
    assert wire.decode(encoded(news=[1, 2]), RiskReport).score == 50.0


def test_an_older_peer_may_leave_out_what_came_later() -> None:
    report = wire.decode(encoded(snapshot={"sampled_at": 1.0}), RiskReport)
    assert (report.service, report.liveness, report.devices, report.host, report.features) == (None, None, (), None, ())
    assert report.snapshot is not None
    assert report.snapshot.ranks == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": "ullage.dev/wire/v2"}, "upgrade"),
        ({"score": 100.5}, "score"),
        ({"score": -1.0}, "score"),
        ({"score": "50"}, "score"),
        ({"terms": {"classic": 101.0}}, "classic"),
        ({"terms": {"classic": None}}, "terms"),
        ({"engine": None}, "engine"),
        ({"capabilities": ["reboot"]}, "capabilities"),
        ({"sample_age_s": -1.0}, "sample_age_s"),
        ({"snapshot": {"sampled_at": 1.0, "hot_blocks": -1}}, "hot_blocks"),
        ({"snapshot": {"sampled_at": 1.0, "hot_blocks": True}}, "hot_blocks"),
        ({"snapshot": {}}, "sampled_at"),
        ({"fragmentation": {"external": 1.5}}, "external"),
        ({"forecast": {"exhaustion_p50_s": -3.0}}, "exhaustion_p50_s"),
        ({"forecast": {"exhaustion_chance": 1.01}}, "exhaustion_chance"),
        ({"service": {"window_s": 60.0, "prefix_hit_ratio": 1.5}}, "prefix_hit_ratio"),
        ({"liveness": {"state": "sleepy", "quiet_s": 1.0}}, "state"),
        ({"devices": [{"index": 0, "used_bytes": -1}]}, "used_bytes"),
        ({"host": {"psi_full_avg10": 2.0}}, "psi_full_avg10"),
        ({"snapshot": {"sampled_at": 1.0, "ranks": [{"name": "0", "hot_blocks": -1}]}}, "hot_blocks"),
    ],
)
def test_bad_reports_name_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError, match=named):
        wire.decode(encoded(**changes), RiskReport)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'{"ratio": 0}', b'{"ratio": 1.01}', b'{"timeout_s": -1}', b'{"bytes": 0}'],
)
def test_bad_requests_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="ActionRequest"):
        wire.decode(body, ActionRequest)


def test_an_eviction_that_freed_a_negative_number_is_refused() -> None:
    body = {"action": "evict", "outcome": "Succeeded", "message": "", "blocks_freed": -1}
    with pytest.raises(WireError, match="blocks_freed"):
        wire.decode(json.dumps(body).encode(), ActionResult)
