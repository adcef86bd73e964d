"""The admin interface: strict bodies, honest answers, acts that happen once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from ullage_engine.api.admin import create_admin_app
from ullage_engine.api.drain import Door
from ullage_engine.errors import LoopUnavailable
from ullage_engine.fake_core import FakeCore, Gate
from ullage_engine.metrics import HttpMetrics, Latency
from ullage_engine.request import GenerationRequest, TokenOutput
from ullage_engine.snapshot import TierState

Open = Callable[..., Any]
EVICT, ADMISSION, DRAIN = "/admin/v1/kv/evict", "/admin/v1/admission", "/admin/v1/drain"
RESUME = "/admin/v1/resume"
COMPACT = "/admin/v1/kv/compact"


@asynccontextmanager
async def admin(
    core: FakeCore, *, clock: Callable[[], float] = lambda: 100.0, latency: Callable[[], Latency] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(core, Door(core, lambda: 0), latency=latency, clock=clock)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as made:
        yield made


async def test_snapshot_and_block_map_agree(core: FakeCore) -> None:
    core.pool.cached = 40
    async with admin(core) as http:
        kv = (await http.get("/admin/v1/kv")).json()
        blocks = (await http.get("/admin/v1/kv/blocks")).json()
    assert kv == core.snapshot().to_json(100.0) | {"sequence": kv["sequence"], "step": kv["step"]}
    assert set(blocks) == {"version", "sequence", "block_tokens", "states", "filled", "refs"}
    assert len(blocks["states"]) == len(blocks["filled"]) == len(blocks["refs"]) == kv["blocks"]["total"]
    assert blocks["states"].count("C") == kv["blocks"]["cached"] == 40


async def test_latencies_are_cumulative_buckets_with_null_for_no_bound(core: FakeCore) -> None:
    metrics = HttpMetrics(CollectorRegistry())
    for seconds in (0.004, 0.005, 0.3, 1000.0):
        metrics.first_token.observe(seconds)
    metrics.inter_token.observe(0.02)
    async with admin(core, latency=metrics.latency) as http:
        answer = (await http.get("/admin/v1/kv")).json()
    assert answer["version"] == 1
    latency = answer["latency"]
    assert set(latency) == {"ttft", "inter_token", "end_to_end"}
    first = latency["ttft"]
    assert [first[0], first[-2], first[-1]] == [[0.005, 2], [320.0, 3], [None, 4]]
    assert [0.25, 2] in first
    assert [0.5, 3] in first
    assert [0.01, 0] in latency["inter_token"]
    assert [0.025, 1] in latency["inter_token"]
    assert {count for _, count in latency["end_to_end"]} == {0}
    assert all(type(count) is int for buckets in latency.values() for _, count in buckets)


async def test_evict(core: FakeCore) -> None:
    core.pool.cached = 40
    async with admin(core) as http:
        dry = await http.post(EVICT, json={"ratio": 0.25, "dry_run": True})
        real = await http.post(EVICT, json={"ratio": 0.25, "tiers": ["drop"]})
        by_bytes = await http.post(EVICT, json={"bytes": core.pool.block_bytes * 5 - 1})
        everything = await http.post(EVICT, json={"ratio": 1})
        nothing = await http.post(EVICT, json={"ratio": 1.0})
    assert [answer.status_code for answer in (dry, real, by_bytes, everything, nothing)] == [200] * 5
    freed = [answer.json()["blocks_freed"] for answer in (dry, real, by_bytes, everything, nothing)]
    assert freed == [10, 10, 5, 25, 0]
    assert dry.json()["dry_run"] is True
    assert real.json()["bytes_freed"] == 10 * core.pool.block_bytes
    assert core.pool.cached == 0


async def test_evict_to_a_lower_tier(core: FakeCore) -> None:
    core.pool.cached = 40
    core.host = TierState(total_bytes=1 << 20, used_bytes=0)
    async with admin(core) as http:
        dropped = (await http.post(EVICT, json={"ratio": 0.25, "tiers": ["drop"]})).json()
        demoted = (await http.post(EVICT, json={"ratio": 0.5, "tiers": ["host", "drop"]})).json()
        state = (await http.get("/admin/v1/kv")).json()["host"]
    assert (dropped["dropped"], dropped["demoted"]) == (10, 0)
    assert (demoted["dropped"], demoted["demoted"], demoted["blocks_freed"]) == (0, 15, 15)
    assert state["total_bytes"] == 1 << 20


async def test_evict_down_to_a_share_of_all_blocks(core: FakeCore) -> None:
    core.pool.cached = 40
    async with admin(core) as http:
        first = (await http.post(EVICT, json={"target_usage": 0.1})).json()
        again = (await http.post(EVICT, json={"target_usage": 0.1})).json()
        everything = (await http.post(EVICT, json={"target_usage": 0})).json()
    assert [answer["blocks_freed"] for answer in (first, again, everything)] == [40 - 25, 0, 25]


async def test_compact_frees_as_much_as_its_time_allows_and_says_so(core: FakeCore) -> None:
    core.pool.sparse = 5
    async with admin(core) as http:
        first = (await http.post(COMPACT, json={"budget_ms": 3.5})).json()
        rest = (await http.post(COMPACT, json={"budget_ms": 10_000})).json()
        nothing = (await http.post(COMPACT, json={"budget_ms": 1})).json()
    freed = [(answer["blocks_freed"], answer["remaining_blocks"]) for answer in (first, rest, nothing)]
    assert freed == [(3, 2), (2, 0), (0, 0)]
    assert first["bytes_freed"] == 3 * core.pool.block_bytes
    assert (first["before"]["split_blocks"], first["after"]["split_blocks"]) == (5, 2)
    assert (first["before"]["external"], rest["after"]["external"]) == (0.5, 0.0)
    assert first["after"].keys() == {"internal", "external", "split_blocks", "largest_free_run"}


async def test_admission(core: FakeCore) -> None:
    async with admin(core) as http:
        limited = await http.post(ADMISSION, json={"max_prompt_tokens": 512, "ttl_s": 30})
        assert limited.json() == {"max_prompt_tokens": 512, "max_total_blocks": None, "expires_in_s": 30}
        assert core.limit is not None
        assert (core.limit.max_prompt_tokens, core.limit.expires_at) == (512, 130.0)
        shown = (await http.get("/admin/v1/kv")).json()["admission"]
        assert (shown["max_prompt_tokens"], shown["expires_in_s"]) == (512, 30.0)
        lifted = await http.post(ADMISSION, json={"max_prompt_tokens": None, "max_total_blocks": None})
        assert lifted.json() == {"max_prompt_tokens": None, "max_total_blocks": None, "expires_in_s": None}
        assert core.limit is None


BAD_BODIES: list[tuple[str, Any, str, str]] = [
    (EVICT, {}, "ratio", "exactly one of ratio, bytes and target_usage"),
    (EVICT, {"ratio": 0.5, "bytes": 5}, "ratio", "exactly one of ratio, bytes and target_usage"),
    (EVICT, {"ratio": 0.5, "target_usage": 0.5}, "ratio", "exactly one of ratio, bytes and target_usage"),
    (EVICT, {"target_usage": 1}, "target_usage", "less than 1"),
    (EVICT, {"target_usage": -0.1}, "target_usage", "greater than or equal to 0"),
    (COMPACT, {}, "budget_ms", "required"),
    (COMPACT, {"budget_ms": 0}, "budget_ms", "greater than 0"),
    (COMPACT, {"budget_ms": 10_001}, "budget_ms", "less than or equal to 10000"),
    (COMPACT, {"budget_ms": "5"}, "budget_ms", "valid number"),
    (EVICT, {"ratio": 0}, "ratio", "greater than 0"),
    (EVICT, {"ratio": 1.01}, "ratio", "less than or equal to 1"),
    (EVICT, {"ratio": "0.5"}, "ratio", "valid number"),
    (EVICT, {"ratio": True}, "ratio", "valid number"),
    (EVICT, {"bytes": 0}, "bytes", "greater than 0"),
    (EVICT, {"bytes": 5.5}, "bytes", "valid integer"),
    (EVICT, {"bytes": 10**300}, "bytes", "less than"),
    (EVICT, {"ratio": 1, "tiers": ["host"]}, "tiers", "no host tier"),
    (EVICT, {"ratio": 1, "tiers": ["host", "drop"]}, "tiers", "no host tier"),
    (EVICT, {"ratio": 1, "tiers": ["tape"]}, "tiers.0", "'host' or 'drop'"),
    (EVICT, {"ratio": 1, "tiers": []}, "tiers", "at least 1"),
    (EVICT, {"ratio": 1, "tiers": "drop"}, "tiers", "valid array"),
    (EVICT, {"ratio": 1, "dry_run": "no"}, "dry_run", "valid boolean"),
    (EVICT, {"ratio": 1, "force": True}, "force", "known are ratio, bytes, target_usage, tiers, dry_run"),
    (ADMISSION, {"max_prompt_tokens": 5}, "ttl_s", "lift by itself"),
    (ADMISSION, {"max_prompt_tokens": 0, "ttl_s": 5}, "max_prompt_tokens", "greater than 0"),
    (ADMISSION, {"max_total_blocks": -1, "ttl_s": 5}, "max_total_blocks", "greater than 0"),
    (ADMISSION, {"max_prompt_tokens": 5, "ttl_s": 0}, "ttl_s", "greater than 0"),
    (ADMISSION, {"max_prompt_tokens": 5, "ttl_s": 10**9}, "ttl_s", "less than or equal"),
    (DRAIN, {"timeout_s": -1}, "timeout_s", "greater than or equal to 0"),
    (DRAIN, {"timeout": 1}, "timeout", "known are timeout_s"),
    (DRAIN, [], "body", "object"),
    (RESUME, {"timeout_s": 1}, "timeout_s", "known are none"),
    (RESUME, [], "body", "object"),
]


@pytest.mark.parametrize(("path", "body", "field", "message"), BAD_BODIES)
async def test_bad_bodies(core: FakeCore, path: str, body: Any, field: str, message: str) -> None:
    async with admin(core) as http:
        answer = await http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 422
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"field", "value", "message"}
    assert error["field"] == field
    assert message in error["message"]
    assert (core.evictions, core.limit, core.draining) == ([], None, False)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"ratio": NaN}', b'{"ratio": Infinity}', b'{"\\ud800": 1}', b'{"x":' * 9000]
)
async def test_hostile_bodies(core: FakeCore, body: bytes) -> None:
    async with admin(core) as http:
        answer = await http.post(EVICT, content=body)
        assert (answer.status_code, set(answer.json()["error"])) == (422, {"field", "value", "message"})
        assert (await http.post(EVICT, content=b" " * 70_000)).status_code == 413
        assert (await http.get("/admin/v1/none")).status_code == 404
        assert set((await http.get(EVICT)).json()["error"]) == {"message"}


async def test_the_same_key_acts_once(core: FakeCore) -> None:
    now = 0.0
    core.pool.cached = 100
    key = {"Idempotency-Key": "a"}
    async with admin(core, clock=lambda: now) as http:
        first = await http.post(EVICT, json={"bytes": 1024}, headers=key)
        now = 599.0
        again = await http.post(EVICT, json={"bytes": 1024, "dry_run": False}, headers=key)
        assert again.json() == first.json()
        assert len(core.evictions) == 1
        for path, body in ((EVICT, {"bytes": 2048}), (DRAIN, {"timeout_s": 0})):
            other = await http.post(path, json=body, headers=key)
            assert other.status_code == 409
            assert "Idempotency-Key" in other.json()["error"]["message"]
        now = 601.0
        await http.post(EVICT, json={"bytes": 1024}, headers=key)
        assert len(core.evictions) == 2
        await http.post(EVICT, json={"bytes": 1024})
        await http.post(EVICT, json={"bytes": 1024})
        assert len(core.evictions) == 4
        long = await http.post(EVICT, json={"bytes": 1024}, headers={"Idempotency-Key": "k" * 300})
        assert (long.status_code, long.json()["error"]["field"]) == (422, "Idempotency-Key")


async def test_a_loop_that_does_not_answer_is_503_and_may_be_tried_again(core: FakeCore) -> None:
    core.pool.cached = 10
    core.hung = True
    async with admin(core) as http:
        failed = await http.post(EVICT, json={"ratio": 1}, headers={"Idempotency-Key": "a"})
        assert failed.status_code == 503
        assert set(failed.json()["error"]) == {"message"}
        core.hung = False
        answer = await http.post(EVICT, json={"ratio": 1}, headers={"Idempotency-Key": "a"})
        assert answer.json()["blocks_freed"] == 10


async def test_concurrent_calls_with_one_key_act_once(core: FakeCore) -> None:
    begun, go_on = threading.Event(), threading.Event()
    evict = core.evict

    class Slow(FakeCore):
        def evict(self, **arguments: Any) -> Any:
            begun.set()
            assert go_on.wait(10)
            return evict(**arguments)

    core.pool.cached = 10
    async with admin(Slow()) as http:
        calls = [
            asyncio.ensure_future(http.post(EVICT, json={"ratio": 1}, headers={"Idempotency-Key": "a"}))
            for _ in range(5)
        ]
        assert await asyncio.to_thread(begun.wait, 10)
        go_on.set()
        answers = await asyncio.gather(*calls)
    assert [answer.json()["blocks_freed"] for answer in answers] == [10] * 5
    assert len(core.evictions) == 1


async def test_drain(core: FakeCore, open_engine: Open) -> None:
    gate = core.gate()

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        yield gate
        yield TokenOutput(request_id=request.request_id, token=65, finish_reason="length")

    core.script = script
    async with (
        open_engine() as addresses,
        httpx.AsyncClient(base_url=addresses["public"], timeout=30) as public,
        httpx.AsyncClient(base_url=addresses["admin"], timeout=30) as http,
    ):
        body = {"model": "fake", "prompt": "x"}
        answer = asyncio.ensure_future(public.post("/v1/completions", json=body))
        assert await asyncio.to_thread(core.wait_for, lambda core: bool(core.live))
        early = await http.post(DRAIN, json={"timeout_s": 0})
        assert early.json() == {"drained": False, "in_flight": 1}
        refused = await public.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        waiting = asyncio.ensure_future(http.post(DRAIN, json={"timeout_s": 30}))
        gate.open()
        assert (await waiting).json() == {"drained": True, "in_flight": 0}
        assert (await answer).status_code == 200


async def test_a_drain_is_ended_and_requests_are_admitted_again(core: FakeCore, open_engine: Open) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 1}
    async with (
        open_engine() as addresses,
        httpx.AsyncClient(base_url=addresses["public"], timeout=30) as public,
        httpx.AsyncClient(base_url=addresses["admin"], timeout=30) as http,
    ):
        assert (await http.post(DRAIN, json={"timeout_s": 5})).json() == {"drained": True, "in_flight": 0}
        assert (await public.post("/v1/completions", json=body)).status_code == 503
        assert (await public.get("/ready")).status_code == 503
        resumed = await http.post(RESUME, json={})
        assert (resumed.status_code, resumed.json()) == (200, {"draining": False})
        assert (await http.get("/admin/v1/kv")).json()["admission"]["draining"] is False
        assert (await public.get("/ready")).status_code == 200
        assert (await public.post("/v1/completions", json=body)).status_code == 200
        again = await http.post(RESUME, json={})
        assert (again.status_code, again.json()) == (200, {"draining": False}), "of an open engine: no error"


async def test_the_same_key_resumes_once(core: FakeCore) -> None:
    async with admin(core) as http:
        key = {"Idempotency-Key": "a"}
        await http.post(DRAIN, json={"timeout_s": 0})
        assert (await http.post(RESUME, json={}, headers=key)).json() == {"draining": False}
        await http.post(DRAIN, json={"timeout_s": 0})
        assert (await http.post(RESUME, json={}, headers=key)).json() == {"draining": False}
        assert core.draining, "the first answer again, without acting again"
        assert (await http.post(DRAIN, json={"timeout_s": 0}, headers=key)).status_code == 409


async def test_a_drain_that_still_waits_is_ended_by_resume(core: FakeCore) -> None:
    """It has not drained, though nothing is in flight: requests are admitted."""
    open_sequences = 1
    door = Door(core, lambda: open_sequences)
    draining = asyncio.ensure_future(door.drain(60))
    await asyncio.to_thread(core.wait_for, lambda core: core.draining)
    open_sequences = 0
    assert await door.resume(10) is False
    assert not (await draining).drained


async def test_a_server_that_is_stopping_stays_closed(core: FakeCore) -> None:
    door = Door(core, lambda: 0)
    assert (await door.stop(5)).drained
    assert await door.resume(5) is True
    assert core.draining


async def test_an_end_that_the_step_loop_does_not_show_is_503(core: FakeCore) -> None:
    class Late(FakeCore):
        def set_draining(self, draining: bool) -> None:
            if draining:
                super().set_draining(True)

    door = Door(Late(), lambda: 0)
    await door.drain(0)
    with pytest.raises(LoopUnavailable, match="did not show the end"):
        await door.resume(0.01)
