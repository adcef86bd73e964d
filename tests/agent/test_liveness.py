"""Case: a server that answers its health route and serves nobody."""

import asyncio
import lzma
from pathlib import Path
from typing import Any

import pytest

from ullage_agent.adapters.vllm import parse_metrics
from ullage_agent.analysis import Analysis, Surroundings
from ullage_agent.canary import CanaryKeeper
from ullage_agent.clock import ManualClock
from ullage_agent.errors import EngineError, EngineTimeout, EngineUnreachable
from ullage_agent.liveness import STALL_S, feel, judge
from ullage_agent.wire import Liveness, Snapshot

TRACES = Path(__file__).parent / "traces"


def watch(*states: tuple[float, Snapshot], canary: str | None = None) -> Liveness:
    pulse = None
    for at, state in states:
        pulse = feel(pulse, "a", state, at)
    assert pulse is not None
    return judge(pulse, states[-1][1], states[-1][0], canary)


def state(tokens: int, running: int = 3, **more: Any) -> Snapshot:
    return Snapshot(sampled_at=0, generated_tokens_total=tokens, running=running, waiting=0, **more)


def test_counters_that_move_are_life() -> None:
    assert watch((0.0, state(1)), (70.0, state(2))).state == "working"


def test_work_without_progress_is_a_stall() -> None:
    found = watch((0.0, state(1)), (STALL_S + 1, state(1)))
    assert (found.state, found.quiet_s) == ("stalled", STALL_S + 1)
    assert "3 requests" in found.detail


def test_a_long_prefill_is_none() -> None:
    assert watch((0.0, state(1)), (10.0, state(1))).state == "working"


def test_nothing_to_do_is_idle_unless_a_canary_died() -> None:
    assert watch((0.0, state(1, 0)), (900.0, state(1, 0))).state == "idle"
    assert watch((0.0, state(1, 0)), (900.0, state(1, 0)), canary="no answer").state == "dead"


def test_an_old_step_is_a_stall_whatever_else_moves() -> None:
    assert watch((0.0, state(1, 0, step_age_s=31.0))).state == "stalled"


def test_an_engine_that_says_nothing_is_unknown() -> None:
    assert watch((0.0, Snapshot(sampled_at=0))).state == "unknown"


def test_the_recorded_zombie_looks_idle_and_the_canary_tells() -> None:
    body = lzma.decompress((TRACES / "vllm-0.32-zombie.txt.xz").read_bytes())
    analysis = Analysis()
    for second in range(100):
        found = analysis.take(parse_metrics(body, float(second)), float(second))
    assert (found.liveness.state, found.liveness.quiet_s) == ("idle", 99.0)
    dead = analysis.take(parse_metrics(body, 100.0), 100.0, Surroundings(canary_error="POST: no whole answer"))
    assert dead.liveness.state == "dead"
    assert dead.risk.score == 0.0  # no memory is missing, and the score does not pretend so


def test_frozen_work_is_no_exhaustion() -> None:
    """A stuck engine with a growing queue fills no pool: the score must not ask for evictions."""
    body = lzma.decompress((TRACES / "vllm-0.32-load.txt.xz").read_bytes()).decode()
    analysis = Analysis()
    for second in range(120):
        waiting = f'vllm:num_requests_waiting{{engine="0",model_name="smollm2"}} {31 + 5 * second}.0'
        now = body.replace('vllm:num_requests_waiting{engine="0",model_name="smollm2"} 31.0', waiting)
        assert now != body or second == 0
        found = analysis.take(parse_metrics(now.encode(), 0.0), float(second))
    assert found.liveness.state == "stalled"
    assert (found.risk.score or 0.0) < 85


class Subject:
    def __init__(self) -> None:
        self.asked = 0
        self.outcome: bool | EngineError = True

    async def canary(self, timeout_s: float) -> bool:
        self.asked += 1
        if isinstance(self.outcome, EngineError):
            raise self.outcome
        return self.outcome


QUIET = Liveness(state="idle", quiet_s=100.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_canaries_are_sent_to_quiet_engines_only_and_not_too_often(clock: ManualClock) -> None:
    subject = Subject()
    keeper = CanaryKeeper(subject, 30.0)
    keeper.look(Liveness(state="working", quiet_s=1.0), 0.0)
    await settle()
    assert subject.asked == 0
    for now in (1.0, 2.0, 31.0, 32.0):
        keeper.look(QUIET, now)
        await settle()
    assert subject.asked == 2
    await keeper.close()


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(True, None), (False, None), (EngineTimeout("late"), "late"), (EngineUnreachable("refused"), None)],
)
async def test_what_a_canary_proves(outcome: Any, error: str | None) -> None:
    subject = Subject()
    subject.outcome = outcome
    keeper = CanaryKeeper(subject, 30.0)
    keeper.look(QUIET, 0.0)
    await settle()
    assert keeper.error == error
    keeper.look(Liveness(state="working", quiet_s=0.0), 1.0)
    assert keeper.error is None
    await keeper.close()
