"""The agent's `ullage` adapter against the engine's own admin interface, with a counted pool instead of a model."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from ullage_agent.adapters.base import AdapterConfig
from ullage_agent.adapters.ullage import SNAPSHOT_PATH, UllageAdapter
from ullage_agent.adapters.ullage_contract import parse_snapshot
from ullage_agent.clock import SystemClock
from ullage_agent.errors import EngineRefused
from ullage_agent.wire import ActionRequest
from ullage_engine.config import ServerConfig, TcpAddress, UnixAddress
from ullage_engine.fake_core import FakeCore, Gate
from ullage_engine.fake_engine import FakeEngine, running, tiny_tokenizer
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.request import GenerationRequest, TokenOutput
from ullage_engine.server import Stop, bind, serve
from ullage_engine.snapshot import TierState

CONTRACTS = Path(__file__).parents[2] / "docs" / "contracts.md"


@pytest.fixture
def core() -> Iterator[FakeCore]:
    made = FakeCore().start()
    yield made
    made.close()


@pytest.fixture
async def public(core: FakeCore, tmp_path: Path) -> AsyncIterator[str]:
    """The engine's public address, while it serves."""
    config = ServerConfig(public=TcpAddress("127.0.0.1", 0), admin=UnixAddress(tmp_path / "admin.sock"))
    async with running(FakeEngine(core, tiny_tokenizer()), config) as addresses:
        yield addresses["public"]


@pytest.fixture
async def adapter(public: str, tmp_path: Path) -> AsyncIterator[UllageAdapter]:
    made = UllageAdapter.from_config(AdapterConfig(url=f"unix:{tmp_path}/admin.sock", clock=SystemClock()))
    yield made
    await made.close()


async def test_the_engine_keeps_the_metric_contract(adapter: UllageAdapter) -> None:
    reading = await adapter.read()
    assert reading.violations == ()
    assert reading.snapshot.total_blocks is not None
    assert reading.identity.type == "ullage"
    assert reading.identity.model == "fake"


async def test_the_largest_allocation_is_all_that_is_free_or_cached(adapter: UllageAdapter, core: FakeCore) -> None:
    core.pool.cached = 100
    state = (await adapter.read()).snapshot
    assert state.free_blocks is not None and state.reclaimable_blocks == 100
    assert state.largest_allocation_blocks == state.free_blocks + 100


def test_scattered_blocks_are_had_in_one_allocation() -> None:
    """What the engine states as its largest allocation, it can do."""
    pool = BlockPool(8, 4, PrefixIndex("salt", 4))
    pool.release(pool.allocate(8)[::2])
    assert pool.largest_free_run() == 1
    assert len(pool.allocate(pool.available)) == 4


async def test_latencies_of_the_http_side_reach_the_agent(adapter: UllageAdapter, public: str) -> None:
    idle = await adapter.read()
    assert {name: histogram.count for name, histogram in idle.histograms.items()} == {
        "ttft": 0,
        "inter_token": 0,
        "end_to_end": 0,
    }
    async with httpx.AsyncClient(base_url=public) as http:
        answer = await http.post("/v1/completions", json={"model": "fake", "prompt": "the quick fox", "max_tokens": 4})
    tokens = answer.json()["usage"]["completion_tokens"]
    assert tokens > 1
    reading = await adapter.read()
    assert reading.violations == ()
    assert {name: histogram.count for name, histogram in reading.histograms.items()} == {
        "ttft": 1,
        "inter_token": tokens - 1,
        "end_to_end": 1,
    }


async def test_the_documented_snapshot_is_what_the_engine_tells_and_the_agent_understands(
    public: str, tmp_path: Path
) -> None:
    found = re.search(r"^Snapshot:\n```json\n(.*?)```", CONTRACTS.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    documented = json.loads(found[1])
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "admin.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        told = (await http.get(SNAPSHOT_PATH)).json()
    assert told.keys() == documented.keys()
    for name in ("blocks", "cells", "requests", "counters", "step", "admission", "latency"):
        assert told[name].keys() == documented[name].keys()
    reading = parse_snapshot(json.dumps(documented).encode(), SNAPSHOT_PATH, sampled_at=0.0)
    assert reading.violations == ()
    assert set(reading.histograms) == set(documented["latency"])


async def test_sequence_never_goes_back(adapter: UllageAdapter) -> None:
    numbers = [(await adapter.read()).snapshot.sequence for _ in range(5)]
    assert None not in numbers
    assert numbers == sorted(number for number in numbers if number is not None)


async def test_evict_reaches_the_pool_once_a_key(adapter: UllageAdapter, core: FakeCore) -> None:
    request = ActionRequest(ratio=0.5)
    first = await adapter.act("evict", request, "key-1")
    again = await adapter.act("evict", request, "key-1")
    assert len(core.evictions) == 1
    assert (first.outcome, first.blocks_freed) == (again.outcome, again.blocks_freed)
    with pytest.raises(EngineRefused) as caught:
        await adapter.act("evict", ActionRequest(ratio=0.6), "key-1")
    assert caught.value.status == 409


async def test_an_eviction_demotes_where_the_engine_has_a_lower_tier(adapter: UllageAdapter, core: FakeCore) -> None:
    core.pool.cached = 40
    dropped = await adapter.act("evict", ActionRequest(ratio=0.25), "key-1")
    core.host = TierState(total_bytes=1 << 20, used_bytes=4096)
    demoted = await adapter.act("evict", ActionRequest(ratio=0.25), "key-2")
    assert (dropped.dropped_blocks, dropped.demoted_blocks) == (10, 0)
    assert demoted.demoted_blocks == demoted.blocks_freed > 0
    assert demoted.dropped_blocks == 0
    assert "kept in the host tier" in demoted.message
    assert adapter.features() == ("demote",)
    assert demoted.after is not None
    assert (demoted.after.host_total_bytes, demoted.after.host_used_bytes) == (1 << 20, 4096)


def test_the_documented_tier_is_what_the_engine_tells() -> None:
    found = re.search(r'null where there is none: `({"total_bytes".*?})`', CONTRACTS.read_text(), re.DOTALL)
    assert found is not None
    assert re.findall(r'"(\w+)"', found[1]) == [field.name for field in fields(TierState)]


async def test_throttle_shows_in_the_snapshot_and_release_lifts_it(adapter: UllageAdapter) -> None:
    throttled = await adapter.act("throttle", ActionRequest(max_prompt_tokens=64, ttl_s=60.0), "key-1")
    assert throttled.after is not None
    assert throttled.after.admission_max_prompt_tokens == 64
    assert throttled.after.admission_expires_in_s == pytest.approx(60.0, abs=30.0)
    released = await adapter.act("release", ActionRequest(), "key-2")
    assert released.after is not None
    assert released.after.admission_max_prompt_tokens is None


async def test_drain_of_an_idle_engine(adapter: UllageAdapter) -> None:
    drained = await adapter.act("drain", ActionRequest(timeout_s=5.0), "key-1")
    assert drained.outcome == "Succeeded"
    assert drained.after is not None
    assert drained.after.draining is True


async def test_release_opens_a_drained_engine(adapter: UllageAdapter, public: str) -> None:
    body = {"model": "fake", "prompt": "the quick fox", "max_tokens": 4}
    await adapter.act("drain", ActionRequest(timeout_s=5.0), "key-1")
    async with httpx.AsyncClient(base_url=public) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 503
        released = await adapter.act("release", ActionRequest(timeout_s=5.0), "key-2")
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert released.outcome == "Succeeded"
    assert released.before is not None and released.before.draining is True
    assert released.after is not None and released.after.draining is False
    again = await adapter.act("release", ActionRequest(timeout_s=5.0), "key-2")
    assert (again.outcome, again.message) == (released.outcome, released.message)


async def test_release_leaves_an_engine_closed_that_is_stopping(core: FakeCore, tmp_path: Path) -> None:
    """It stops while a request is in flight, and answers until that has ended."""
    gate = core.gate()

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        yield gate
        yield TokenOutput(request_id=request.request_id, token=65, finish_reason="length")

    core.script = script
    config = ServerConfig(public=TcpAddress("127.0.0.1", 0), admin=UnixAddress(tmp_path / "admin.sock"))
    stop = Stop()
    addresses: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    engine = FakeEngine(core, tiny_tokenizer())
    serving = asyncio.ensure_future(
        serve(engine, bind(config), config, stop=stop, announce=addresses.set_result),
    )
    url = (await addresses)["public"]
    adapter = UllageAdapter.from_config(AdapterConfig(url=f"unix:{tmp_path}/admin.sock", clock=SystemClock()))
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        answer = asyncio.ensure_future(http.post("/v1/completions", json={"model": "fake", "prompt": "x"}))
        assert await asyncio.to_thread(core.wait_for, lambda core: bool(core.live))
        stop.ask()
        assert await asyncio.to_thread(core.wait_for, lambda core: core.draining)
        released = await adapter.act("release", ActionRequest(timeout_s=5.0), "key-1")
        assert (released.outcome, released.message) == (
            "Ineffective",
            "the engine still admits nothing: it is stopping",
        )
        assert released.after is not None and released.after.draining is True
        gate.open()
        assert (await answer).status_code == 200
    await adapter.close()
    await serving


async def test_compact_is_offered_and_frees_once_a_key(adapter: UllageAdapter, core: FakeCore) -> None:
    core.pool.sparse = 5
    await adapter.read()
    assert adapter.capabilities() == ("evict", "throttle", "release", "drain", "compact")
    first = await adapter.act("compact", ActionRequest(budget_ms=3), "key-1")
    again = await adapter.act("compact", ActionRequest(budget_ms=3), "key-1")
    assert (first.outcome, first.blocks_freed, first.message) == (again.outcome, again.blocks_freed, again.message)
    assert (first.outcome, first.blocks_freed, core.compactions) == ("Succeeded", 3, [3])
    assert first.before is not None
    assert first.after is not None
    assert (first.after.free_blocks or 0) - (first.before.free_blocks or 0) == 3
    assert (first.before.compactable_blocks, first.after.compactable_blocks) == (5, 2)
    core.pool.sparse = 0
    nothing = await adapter.act("compact", ActionRequest(budget_ms=3), "key-2")
    assert (nothing.outcome, nothing.blocks_freed) == ("Ineffective", 0)


async def test_readings_may_overlap(adapter: UllageAdapter) -> None:
    readings = await asyncio.gather(*(adapter.read() for _ in range(20)))
    assert all(reading.violations == () for reading in readings)
