"""The adapter of our own engine against an engine double that answers the admin JSON."""

import json
import math
from typing import Any

import pytest

from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig, EngineAdapter
from ullage_agent.clock import ManualClock
from ullage_agent.errors import ConfigError, EngineError, EngineProtocolError, EngineRefused
from ullage_agent.wire import ActionRequest


@pytest.fixture
async def adapter(engine: Any, clock: ManualClock) -> Any:
    made = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=engine.url, clock=clock))
    yield made
    await made.close()


async def test_reads_every_value(adapter: EngineAdapter, engine: Any, clock: ManualClock) -> None:
    reading = await adapter.read()
    assert reading.violations == ()
    assert (reading.identity.instance, reading.identity.model) == ("abc123", "smollm2")
    state = reading.snapshot
    assert state.sampled_at == clock.wall()
    assert (state.total_blocks, state.hot_blocks, state.reclaimable_blocks) == (256, 200, 46)
    assert (state.free_blocks, state.largest_free_run_blocks, state.outstanding_blocks) == (10, 4, 40)
    assert (state.largest_allocation_blocks, state.compactable_blocks) == (56, 1)
    assert (state.filled_slots, state.preemptions_total, state.prefix_hit_tokens_total) == (3000, 1, 450)
    assert (state.step, state.step_age_s, state.draining) == (900, 0.02, False)
    unsaid = {"host_total_bytes", "host_used_bytes", "admission_max_prompt_tokens", "admission_expires_in_s"}
    assert {name for name in state.__slots__ if getattr(state, name) is None} == unsaid


@pytest.mark.parametrize("cells", [None, {}, {"split_blocks": 4, "total": 360, "used": 200}, {"spare_blocks": None}])
async def test_an_engine_need_not_say_what_compaction_would_free(
    adapter: EngineAdapter, engine: Any, cells: dict[str, int] | None
) -> None:
    engine.snapshot["cells"] = cells
    reading = await adapter.read()
    assert (reading.violations, reading.snapshot.compactable_blocks) == ((), None)


async def test_no_more_can_be_compacted_than_is_held(adapter: EngineAdapter, engine: Any) -> None:
    engine.snapshot["cells"]["spare_blocks"] = 201
    reading = await adapter.read()
    assert reading.snapshot.compactable_blocks is None
    assert reading.violations != ()


async def test_bad_values_are_named_and_the_rest_is_read(adapter: EngineAdapter, engine: Any) -> None:
    engine.snapshot["step"]["age_s"] = float("nan")
    engine.snapshot["slots"]["filled"] = "many"
    del engine.snapshot["requests"]["outstanding_blocks"]
    engine.snapshot["instance"] = 7
    reading = await adapter.read()
    problems = {violation.metric: violation.problem for violation in reading.violations}
    assert problems == {
        "step.age_s": "not_finite",
        "slots.filled": "wrong_type",
        "requests.outstanding_blocks": "missing",
        "instance": "wrong_type",
    }
    assert reading.snapshot.filled_slots is None
    assert reading.snapshot.outstanding_blocks is None
    assert reading.snapshot.hot_blocks == 200
    assert reading.identity.instance == "unknown"


async def test_torn_block_counts_are_unknown(adapter: EngineAdapter, engine: Any) -> None:
    engine.snapshot["blocks"]["free"] = 11
    reading = await adapter.read()
    assert reading.snapshot.hot_blocks is None
    assert [violation.metric for violation in reading.violations] == ["blocks"]


LATENCY: dict[str, Any] = {
    "ttft": [[0.1, 5], [0.5, 9], [None, 10]],
    "inter_token": [[0.01, 90], [0.05, 100], [None, 100]],
    "end_to_end": [[1, 0], [10, 7], [None, 7]],
}


async def test_latencies_are_read(adapter: EngineAdapter, engine: Any) -> None:
    engine.snapshot["latency"] = LATENCY | {"of a later version": "anything"}
    reading = await adapter.read()
    assert reading.violations == ()
    assert set(reading.histograms) == set(LATENCY)
    assert reading.histograms["ttft"].buckets == ((0.1, 5), (0.5, 9), (math.inf, 10))
    assert {name: histogram.count for name, histogram in reading.histograms.items()} == {
        "ttft": 10,
        "inter_token": 100,
        "end_to_end": 7,
    }


@pytest.mark.parametrize("latency", [None, {}, {"ttft": None, "of a later version": 3}])
async def test_an_engine_need_not_tell_latencies(adapter: EngineAdapter, engine: Any, latency: object) -> None:
    for told in ({}, {"latency": latency}):
        engine.snapshot.pop("latency", None)
        engine.snapshot |= told
        reading = await adapter.read()
        assert (reading.violations, dict(reading.histograms)) == ((), {})


@pytest.mark.parametrize("latency", [[], 3, "x", True, [["ttft", []]]])
async def test_latency_that_is_no_object(adapter: EngineAdapter, engine: Any, latency: object) -> None:
    engine.snapshot["latency"] = latency
    reading = await adapter.read()
    assert [(one.metric, one.problem) for one in reading.violations] == [("latency", "wrong_type")]
    assert dict(reading.histograms) == {}
    assert reading.snapshot.hot_blocks == 200


@pytest.mark.parametrize(
    ("buckets", "problem"),
    [
        ({}, "wrong_type"),
        ("buckets", "wrong_type"),
        ([3], "wrong_type"),
        ([[0.1]], "wrong_type"),
        ([[0.1, 1, 1], [None, 1]], "wrong_type"),
        ([["0.1", 1], [None, 1]], "wrong_type"),
        ([["+Inf", 1]], "wrong_type"),
        ([[True, 1], [None, 1]], "wrong_type"),
        ([[0.1, None], [None, 1]], "wrong_type"),
        ([[0.1, True], [None, 1]], "wrong_type"),
        ([[0.1, 1.5], [None, 2]], "wrong_type"),
        ([[[], 1], [None, 1]], "wrong_type"),
        ([[index, 0] for index in range(256)] + [[None, 0]], "wrong_type"),
        ([[math.nan, 1], [None, 1]], "not_finite"),
        ([[math.inf, 1]], "not_finite"),
        ([[0.1, math.nan], [None, 1]], "not_finite"),
        ([], "out_of_range"),
        ([[0.1, 1]], "out_of_range"),  # no last bound
        ([[None, 1], [None, 1]], "out_of_range"),
        ([[0.1, 1], [0.1, 1], [None, 1]], "out_of_range"),
        ([[0.1, 5], [None, 4]], "out_of_range"),  # not cumulative
        ([[0.1, -1], [None, 4]], "out_of_range"),
        ([[-0.1, 1], [None, 4]], "out_of_range"),
        ([[0.1, 1], [None, 10**400]], "out_of_range"),
        ([[10**400, 1], [None, 1]], "out_of_range"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_malformed_latency_is_named_and_the_others_are_read(
    adapter: EngineAdapter, engine: Any, buckets: object, problem: str
) -> None:
    engine.snapshot["latency"] = LATENCY | {"inter_token": buckets}
    reading = await adapter.read()
    assert [(one.metric, one.problem) for one in reading.violations] == [("latency.inter_token", problem)]
    assert set(reading.histograms) == {"ttft", "end_to_end"}


@pytest.mark.parametrize("version", [2, None, "1"])
async def test_another_version_is_not_guessed_at(adapter: EngineAdapter, engine: Any, version: object) -> None:
    engine.snapshot["version"] = version
    with pytest.raises(EngineProtocolError, match="upgrade the agent"):
        await adapter.read()


@pytest.mark.parametrize(("status", "body"), [(500, b"boom"), (404, b""), (302, b""), (204, b"")])
async def test_error_statuses(adapter: EngineAdapter, engine: Any, status: int, body: bytes) -> None:
    engine.answers["/admin/v1/kv"] = (status, body)
    with pytest.raises(EngineRefused, match=str(status)):
        await adapter.read()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
async def test_bodies_that_are_no_object(adapter: EngineAdapter, engine: Any, body: bytes) -> None:
    engine.answers["/admin/v1/kv"] = (200, body)
    with pytest.raises(EngineProtocolError):
        await adapter.read()


async def test_evict_says_what_was_freed(adapter: EngineAdapter, engine: Any) -> None:
    result = await adapter.act("evict", ActionRequest(ratio=0.1), "key-1")
    assert engine.posts == [("/admin/v1/kv/evict", {"ratio": 0.1, "tiers": ["drop"], "dry_run": False}, "key-1")]
    assert (result.outcome, result.blocks_freed, result.bytes_freed) == ("Succeeded", 25, 25 * 195840)
    assert result.duration_ms == 1.5
    assert result.before is not None and result.after is not None
    assert (result.before.free_blocks, result.after.free_blocks) == (10, 35)


async def test_evict_of_nothing_is_ineffective(adapter: EngineAdapter, engine: Any) -> None:
    engine.snapshot["blocks"].update(active=246, cached=0)
    result = await adapter.act("evict", ActionRequest(bytes=5), "key-1")
    assert engine.posts[0][1] == {"bytes": 5, "tiers": ["drop"], "dry_run": False}
    assert (result.outcome, result.blocks_freed) == ("Ineffective", 0)


async def test_dry_run_changes_nothing(adapter: EngineAdapter, engine: Any) -> None:
    result = await adapter.act("evict", ActionRequest(ratio=0.1, dry_run=True), "key-1")
    assert (result.outcome, result.dry_run, result.blocks_freed) == ("Succeeded", True, 25)
    assert "would free" in result.message
    assert engine.snapshot["blocks"]["free"] == 10


async def test_throttle_and_release(adapter: EngineAdapter, engine: Any) -> None:
    throttled = await adapter.act("throttle", ActionRequest(max_prompt_tokens=512, ttl_s=60.0), "key-1")
    assert throttled.outcome == "Succeeded"
    assert throttled.after is not None
    assert throttled.after.admission_max_prompt_tokens == 512
    released = await adapter.act("release", ActionRequest(), "key-2")
    assert released.outcome == "Succeeded"
    assert released.after is not None
    assert released.after.admission_max_prompt_tokens is None
    assert [body.get("max_prompt_tokens") for path, body, _ in engine.posts if path == "/admin/v1/admission"] == [
        512,
        None,
    ]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b'{"drained": true, "in_flight": 0}', "Succeeded"),
        (b'{"drained": false, "in_flight": 3}', "Ineffective"),
    ],
)
async def test_drain(adapter: EngineAdapter, engine: Any, body: bytes, outcome: str) -> None:
    engine.answers["/admin/v1/drain"] = (200, body)
    result = await adapter.act("drain", ActionRequest(timeout_s=10.0), "key-1")
    assert result.outcome == outcome
    assert engine.posts[0][1]["timeout_s"] < 10.0


async def test_release_ends_a_drain_and_proves_it_by_a_reading(adapter: EngineAdapter, engine: Any) -> None:
    drained = await adapter.act("drain", ActionRequest(), "key-1")
    released = await adapter.act("release", ActionRequest(), "key-2")
    assert (drained.after.draining, released.before.draining, released.after.draining) == (True, True, False)  # type: ignore[union-attr]
    assert (released.outcome, released.message) == ("Succeeded", "prompts of any length are admitted")
    assert [(path, key) for path, _, key in engine.posts] == [
        ("/admin/v1/drain", "key-1"),
        ("/admin/v1/admission", "key-2"),
        ("/admin/v1/resume", "key-2-resume"),
    ]
    assert engine.posts[-1][1] == {}


@pytest.mark.parametrize("says", [True, False])
async def test_release_does_not_open_an_engine_that_is_stopping(
    adapter: EngineAdapter, engine: Any, says: bool
) -> None:
    """Not by its answer, and not by what it reads whatever it answered."""
    engine.stopping = True
    if not says:
        engine.answers["/admin/v1/resume"] = (200, b'{"draining": false}')
    result = await adapter.act("release", ActionRequest(), "key-1")
    assert (result.outcome, result.message) == ("Ineffective", "the engine still admits nothing: it is stopping")


@pytest.mark.parametrize("drains", [True, False])
async def test_an_older_engine_without_the_route_is_open_unless_it_drains(
    serve_engine: Any, admin_engine: Any, clock: ManualClock, drains: bool
) -> None:
    engine = admin_engine()
    engine.resume = False
    await serve_engine(engine)
    engine.snapshot["admission"]["draining"] = drains
    adapter = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=engine.url, clock=clock))
    result = await adapter.act("release", ActionRequest(), "key-1")
    if drains:
        assert result.outcome == "Ineffective"
        assert "this version has no /admin/v1/resume; restart it" in result.message
    else:
        assert result.outcome == "Succeeded"
    await adapter.close()


@pytest.mark.parametrize("answer", [(503, b'{"error": {"message": "late"}}'), (200, b"{}"), (200, b"yes")])
async def test_a_release_without_an_understandable_answer_is_an_error(
    adapter: EngineAdapter, engine: Any, answer: tuple[int, bytes]
) -> None:
    engine.answers["/admin/v1/resume"] = answer
    with pytest.raises(EngineError):
        await adapter.act("release", ActionRequest(), "key-1")


async def test_compact_is_offered_only_where_it_was_found(
    serve_engine: Any, admin_engine: Any, clock: ManualClock
) -> None:
    without, offering = admin_engine(), admin_engine()
    offering.compact = True
    for double in (without, offering):
        await serve_engine(double)
        adapter = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=double.url, clock=clock))
        assert "compact" not in adapter.capabilities()  # not assumed before it was looked for
        await adapter.read()
        result = await adapter.act("compact", ActionRequest(budget_ms=5), "key-1")
        expected = "Succeeded" if double.compact else "Unsupported"
        assert result.outcome == expected
        assert ("compact" in adapter.capabilities()) == double.compact
        await adapter.close()


async def test_compact_tells_what_it_freed_and_that_there_was_nothing(
    serve_engine: Any, admin_engine: Any, clock: ManualClock
) -> None:
    engine = admin_engine()
    engine.compact = True
    await serve_engine(engine)
    adapter = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=engine.url, clock=clock))
    await adapter.read()
    first = await adapter.act("compact", ActionRequest(budget_ms=5), "key-1")
    assert (first.outcome, first.blocks_freed, first.bytes_freed) == ("Succeeded", 2, 2 * 195840)
    assert first.message == "freed 2 blocks by moving 14 cells, 0 are left; unused cells 50%, now 0%"
    again = await adapter.act("compact", ActionRequest(budget_ms=5), "key-2")
    assert (again.outcome, again.blocks_freed) == ("Ineffective", 0)
    assert [body for _, body, _ in engine.posts] == [{"budget_ms": 5}, {"budget_ms": 5}]
    engine.answers["/admin/v1/kv/compact"] = (200, b'{"blocks_freed": 3}')
    with pytest.raises(EngineProtocolError):
        await adapter.act("compact", ActionRequest(budget_ms=5), "key-3")
    await adapter.close()


@pytest.mark.parametrize("status", [409, 422, 503])
async def test_a_refused_action_names_the_engines_words(adapter: EngineAdapter, engine: Any, status: int) -> None:
    engine.answers["/admin/v1/kv/evict"] = (status, b'{"error": {"message": "no, because"}}')
    with pytest.raises(EngineRefused, match="no, because") as caught:
        await adapter.act("evict", ActionRequest(ratio=0.1), "key-1")
    assert caught.value.status == status


@pytest.mark.parametrize(
    "report",
    [{}, {"blocks_freed": -1}, {"blocks_freed": "5"}, {"blocks_freed": 1, "bytes_freed": None}],
)
async def test_a_report_that_cannot_be_believed_is_no_success(
    adapter: EngineAdapter, engine: Any, report: dict[str, Any]
) -> None:
    engine.answers["/admin/v1/kv/evict"] = (200, json.dumps(report).encode())
    with pytest.raises(EngineProtocolError):
        await adapter.act("evict", ActionRequest(ratio=0.1), "key-1")


async def test_a_lost_reading_afterwards_does_not_undo_success(adapter: EngineAdapter, engine: Any) -> None:
    await adapter.read()
    engine.dies_after_acting = True
    result = await adapter.act("evict", ActionRequest(ratio=0.1), "key-1")
    assert result.outcome == "Succeeded"
    assert result.before is not None
    assert result.after is None


async def test_nobody_listens(clock: ManualClock, tmp_path: Any) -> None:
    adapter = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=f"unix:{tmp_path}/none.sock", clock=clock))
    with pytest.raises(EngineError, match=r"none\.sock"):
        await adapter.read()
    await adapter.close()
    await adapter.close()


@pytest.mark.parametrize(
    "url", ["", "unix:", "ftp://h:1", "http://", "http://h:99999", "http://h/x", "h:80", "http://h:1?q"]
)
def test_urls_that_cannot_work(url: str, clock: ManualClock) -> None:
    for name in ("ullage", "vllm"):
        with pytest.raises(ConfigError, match="unix:PATH or http://HOST:PORT"):
            BUILTIN_ADAPTERS[name](AdapterConfig(url=url, clock=clock))
