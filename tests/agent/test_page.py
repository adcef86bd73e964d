"""The page: its data, its headers, and the page itself in a headless browser."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.app import Agent
from ullage_agent.clock import ManualClock
from ullage_agent.config import AgentConfig
from ullage_agent.errors import EngineUnreachable
from ullage_agent.history import ScorePoint
from ullage_agent.page import MAX_CELLS, counted_map, shrink, thin
from ullage_agent.wire import ActionRequest, Snapshot

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
needs_browser = pytest.mark.skipif(
    BROWSER is None and os.environ.get("CI") != "true", reason="no chromium on this machine (apt-get install chromium)"
)


class Mapped(FakeAdapter):
    """A simulated engine that tells its blocks one by one."""

    def __init__(self, clock: ManualClock) -> None:
        spec = PoolSpec(total=512, hot=300, cached=150, growth_per_s=2.0, free_runs=3)
        super().__init__(FakeAdapter.simulated(spec, clock)._scenario, clock)
        self.maps = 0
        self.broken = False

    async def block_map(self) -> str | None:
        self.maps += 1
        if self.broken:
            raise EngineUnreachable("gone")
        assert self.pool is not None
        return "A" * self.pool.hot + "C" * self.pool.cached + "SL" + "F" * (self.pool.free - 2)


@pytest.fixture
async def running(clock: ManualClock) -> AsyncIterator[tuple[Agent, Mapped, ManualClock]]:
    adapter = Mapped(clock)
    config = AgentConfig(
        engine="fake", engine_url="-", metrics_host="127.0.0.1", metrics_port=0, watch_devices=False, poll_seconds=60.0
    )
    async with Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent:
        for _ in range(30):
            clock.advance(1.0)
            await agent.poller.poll_once()
        yield agent, adapter, clock


def url(agent: Agent) -> str:
    assert agent.metrics_address is not None
    return f"http://127.0.0.1:{agent.metrics_address[1]}"


async def get(agent: Agent, path: str) -> tuple[int, Any, str]:
    async with aiohttp.ClientSession() as session, session.get(url(agent) + path) as answer:
        return answer.status, answer.headers, await answer.text()


async def test_data_of_the_page(running: tuple[Agent, Mapped, ManualClock]) -> None:
    agent, adapter, _ = running
    await agent.actions.run("evict", ActionRequest(ratio=0.2, reason="<b>risk</b>"), "k")
    status, _, body = await get(agent, "/page.json")
    data = json.loads(body)
    assert status == 200
    assert data["report"]["score"] == agent.board.report().score  # type: ignore[union-attr]
    assert (len(data["points"]) >= 30) and data["points"][-1][1] is not None
    assert data["blocks"]["exact"] is True
    assert data["blocks"]["total"] == 512
    (action,) = data["actions"]
    assert (action["action"], action["outcome"], action["reason"]) == ("evict", "Succeeded", "<b>risk</b>")
    assert adapter.maps == 1


async def test_the_engine_is_asked_for_its_map_once_a_second(running: tuple[Agent, Mapped, ManualClock]) -> None:
    agent, adapter, clock = running
    await asyncio.gather(*(get(agent, "/page.json") for _ in range(5)))
    assert adapter.maps == 1
    clock.advance(1.0)
    adapter.broken = True
    data = json.loads((await get(agent, "/page.json"))[2])
    assert (adapter.maps, data["blocks"]["exact"]) == (2, False)


async def test_the_page_can_ask_nobody_else(running: tuple[Agent, Mapped, ManualClock]) -> None:
    status, headers, body = await get(running[0], "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert set(re.findall(r"https?://[^\"' ]+", body)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|eval\(|document\.write", body)


async def test_before_the_first_sample(clock: ManualClock) -> None:
    adapter = FakeAdapter.scripted([RuntimeError("gone")], clock)
    config = AgentConfig(engine="fake", engine_url="-", metrics_host="127.0.0.1", metrics_port=0, watch_devices=False)
    async with Agent(config, adapters={"fake": lambda _: adapter}, clock=clock) as agent:
        await agent.poller.poll_once()
        data = json.loads((await get(agent, "/page.json"))[2])
    assert (data["report"], data["error"], data["blocks"]["states"]) == (None, "gone", "")


def test_maps_are_shrunk_to_what_is_telling() -> None:
    assert shrink("AAFFCCS?", 4) == "AFCS"
    assert shrink("", 4) == ""
    assert len(shrink("F" * 1_000_000, MAX_CELLS)) <= MAX_CELLS


def test_counted_maps_keep_the_proportions() -> None:
    state = Snapshot(sampled_at=0, total_blocks=10, hot_blocks=5, reclaimable_blocks=3, free_blocks=2)
    assert counted_map(state) == "AAAAACCCFF"
    assert counted_map(Snapshot(sampled_at=0, total_blocks=4, hot_blocks=1)) == "AUUU"
    huge = Snapshot(sampled_at=0, total_blocks=4_000_000, hot_blocks=1_000_000)
    assert counted_map(huge).count("A") / len(counted_map(huge)) == pytest.approx(0.25, abs=0.01)


def test_thinning_keeps_the_peaks() -> None:
    points = [ScorePoint(at=float(at), score=99.0 if at == 500 else 1.0, terms={}) for at in range(900)]
    kept = thin(points, 300)
    assert len(kept) == 300
    assert max(point.score or 0.0 for point in kept) == 99.0


async def browse(target: str, folder: Path, *more: str) -> str:
    assert BROWSER is not None, "CI installs chromium"
    process = await asyncio.create_subprocess_exec(
        BROWSER, *SWITCHES, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=1500", *more, target,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return out.decode()


@needs_browser
async def test_the_page_in_a_browser_as_wide_as_a_phone(
    running: tuple[Agent, Mapped, ManualClock], tmp_path: Path
) -> None:
    agent, _, _ = running
    await agent.actions.run("evict", ActionRequest(ratio=0.2, reason="<b>risk</b>"), "k")
    dom = await browse(url(agent) + "/", tmp_path, "--window-size=390,844", "--dump-dom")
    score = agent.board.report().score  # type: ignore[union-attr]
    assert score is not None
    assert 'data-ready="yes"' in dom
    assert re.search(rf'id="score"[^>]*>{round(score)}<', dom)
    assert re.search(r'id="error" hidden', dom)
    assert dom.count("<polyline") >= 6
    assert "evict: Succeeded" in dom
    assert "&lt;b&gt;risk" in dom
    assert "storing" in dom and "one cell a block" in dom


@needs_browser
async def test_a_picture_of_the_page(running: tuple[Agent, Mapped, ManualClock], tmp_path: Path) -> None:
    agent, _, _ = running
    picture = Path(os.environ.get("ULLAGE_PAGE_PICTURE", tmp_path / "page.png"))
    await browse(url(agent) + "/", tmp_path, "--window-size=390,1100", f"--screenshot={picture}")
    data = await asyncio.to_thread(picture.read_bytes)
    assert data.startswith(b"\x89PNG")
    assert len(data) > 15_000
