import asyncio
import logging
from typing import Any

import pytest

from ullage_agent.adapters.base import Reading
from ullage_agent.adapters.fake import FakeAdapter
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.board import Board
from ullage_agent.clock import ManualClock
from ullage_agent.poller import PollConfig, Poller
from ullage_agent.wire import ActionRequest, Snapshot


def agent(adapter: Any, clock: ManualClock, **settings: Any) -> tuple[Poller, Board]:
    board = Board(clock)
    return Poller(adapter, board, clock, PollConfig(**settings)), board


async def test_a_growing_pool_is_foreseen(clock: ManualClock) -> None:
    spec = PoolSpec(total=256, hot=100, cached=56, growth_per_s=5.0, peak=400)
    poller, board = agent(FakeAdapter.simulated(spec, clock), clock)
    for _ in range(16):
        await poller.poll_once()
        clock.advance(1.0)
    report = board.report()
    assert report is not None and report.forecast is not None
    assert report.forecast.growth_blocks_per_s == pytest.approx(5.0)
    assert report.forecast.exhaustion_p50_s == pytest.approx(81 / 5.0)
    assert report.winner == "forecast"
    assert report.score is not None
    assert 85 <= report.score <= 100
    assert report.sample_age_s == 1.0
    assert report.capabilities == ("evict", "compact", "throttle", "release", "drain")


async def test_an_eviction_that_makes_room_lowers_the_risk(clock: ManualClock) -> None:
    adapter = FakeAdapter.simulated(PoolSpec(total=200, hot=200, peak=0), clock)
    poller, board = agent(adapter, clock)
    await poller.poll_once()
    before = board.report()
    assert adapter.pool is not None
    adapter.pool.act("evict", ActionRequest(ratio=0.2), clock.monotonic())
    await poller.poll_once()
    after = board.report()
    assert before is not None and before.score is not None
    assert after is not None and after.score is not None
    assert before.score == pytest.approx(100.0)
    assert after.score <= 60


async def test_a_dead_engine_leaves_the_last_sample_to_age(clock: ManualClock) -> None:
    state = Snapshot(sampled_at=0, total_blocks=10, hot_blocks=5, reclaimable_blocks=0, free_blocks=5)
    poller, board = agent(FakeAdapter.scripted([state, RuntimeError("gone")], clock), clock)
    assert board.report() is None
    await poller.poll_once()
    clock.advance(7.0)
    await poller.poll_once()
    report = board.report()
    assert report is not None and report.snapshot is not None
    assert report.snapshot.hot_blocks == 5
    assert report.sample_age_s == 7.0
    assert report.error == "gone"
    assert (board.polls_ok, board.polls_failed) == (1, 1)


async def test_never_read_is_no_report_but_an_error(clock: ManualClock) -> None:
    poller, board = agent(FakeAdapter.scripted([RuntimeError("gone")], clock), clock)
    await poller.poll_once()
    assert board.report() is None
    assert board.error == "gone"
    assert board.sample_age_s() is None


class Hanging(FakeAdapter):
    async def read(self) -> Reading:
        await asyncio.Event().wait()
        raise AssertionError


class Broken(FakeAdapter):
    async def read(self) -> Reading:
        raise KeyError("a mistake of the adapter")


async def test_a_hanging_engine_is_given_up(clock: ManualClock) -> None:
    adapter = Hanging.simulated(PoolSpec(), clock)
    poller, board = agent(adapter, clock, read_timeout_s=0.05)
    await poller.poll_once()
    assert board.error == "no answer within 0.05 s"


async def test_a_mistake_in_an_adapter_is_logged_and_survived(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    poller, board = agent(Broken.simulated(PoolSpec(), clock), clock)
    await poller.poll_once()
    assert board.error is not None
    assert "KeyError" in caplog.text


async def test_an_outage_is_logged_once_and_its_end_too(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    state = Snapshot(sampled_at=0, hot_blocks=1)
    script = [RuntimeError("gone"), RuntimeError("gone"), state, state]
    poller, _ = agent(FakeAdapter.scripted(script, clock), clock)
    with caplog.at_level(logging.INFO):
        for _ in script:
            await poller.poll_once()
    messages = [record.message for record in caplog.records]
    assert messages == ["cannot read the engine: gone", "the engine can be read again"]


async def test_unknown_hot_blocks_do_not_count_as_none(clock: ManualClock) -> None:
    states = [Snapshot(sampled_at=0, hot_blocks=hot, total_blocks=100) for hot in (10, None, 20, 30)]
    poller, board = agent(FakeAdapter.scripted(states, clock), clock)
    for _ in states:
        await poller.poll_once()
        clock.advance(1.0)
    report = board.report()
    assert report is not None and report.forecast is not None
    assert report.forecast.growth_blocks_per_s == pytest.approx(20 / 3)


async def test_the_loop_keeps_polling_until_told_to_stop(clock: ManualClock) -> None:
    stop = asyncio.Event()

    class Stopping(FakeAdapter):
        async def read(self) -> Reading:
            if self.readings == 4:
                stop.set()
            return await super().read()

    adapter = Stopping.simulated(PoolSpec(), clock)
    poller, board = agent(adapter, clock, period_s=0.001)
    await poller.run(stop)
    assert board.polls_ok == 5
