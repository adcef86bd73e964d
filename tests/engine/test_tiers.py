"""Memory tiers below the pool: each promise, and each thing that can go wrong, as a small scene."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiered import Tiered, expected, make_tiered

from ullage_engine.budgets import Retention
from ullage_engine.engine import STALL_PASSES
from ullage_engine.fake_runner import EMPTY
from ullage_engine.request import Destination, KvBudget
from ullage_engine.tiers.manager import Bounds
from ullage_engine.tiers.scripted import Script

SLOW = Script(progress=0.0)
PROMPT = [1, 2, 3, 4] * 4
OTHER = [4, 3, 2, 1] * 11


def push_out(tiered: Tiered) -> None:
    """Fill the pool with another prompt, so that nothing else is left in it."""
    assert tiered.ask(OTHER, 4) == expected(OTHER, 4)
    assert tiered.engine.pool.match(PROMPT) == [] or tiered.engine.pool.match(PROMPT)[0].block is None


def host(tiered: Tiered) -> Any:
    return tiered.residency.manager.tally["host"]


def test_what_leaves_the_pool_comes_back_without_being_computed() -> None:
    tiered = make_tiered()
    assert tiered.ask(PROMPT, 3) == expected(PROMPT, 3)
    push_out(tiered)
    outputs = tiered.submit("again", [*PROMPT, 0, 0], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 0, 0], 3)
    assert outputs[0].cached_tokens == 16
    assert host(tiered).hit_tokens == 16
    assert tiered.engine.snapshot(None, draining=False).counters.prefix_hit_tokens == 16


def test_without_tiers_it_would_have_been_computed_anew() -> None:
    tiered = make_tiered(host=1)
    tiered.ask(PROMPT, 3)
    push_out(tiered)
    outputs = tiered.submit("again", [*PROMPT, 0, 0], 3)
    tiered.finish()
    assert outputs[0].cached_tokens < 16


def test_others_go_on_while_a_prompt_is_loaded() -> None:
    tiered = make_tiered()
    tiered.ask(PROMPT)
    push_out(tiered)
    tiered.transfers.script = SLOW
    waiting = tiered.submit("waits", [*PROMPT, 0], 3)
    going = tiered.submit("goes", [2, 2], 4)
    for _ in range(6):
        tiered.engine.step()
    assert [output.token for output in going] == expected([2, 2], 4)
    assert waiting == []
    assert "L" in tiered.engine.pool.states()
    assert tiered.engine.snapshot(None, draining=False).blocks.in_flight >= 4
    tiered.transfers.script = Script(progress=1.0)
    tiered.finish()
    assert [output.token for output in waiting] == expected([*PROMPT, 0], 3)


def test_fifty_requests_for_one_prefix_share_one_load() -> None:
    tiered = make_tiered(blocks=160, host=80, sequences=50, budget=100)
    tiered.ask(PROMPT)
    tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    before = host(tiered).loaded
    tiered.transfers.script = SLOW
    outputs = [tiered.submit(f"r{i}", [*PROMPT, i % 5], 1) for i in range(50)]
    while tiered.engine.scheduler.waiting:
        tiered.engine.step()
    assert len(tiered.transfers.running) == 4
    tiered.transfers.script = Script(progress=1.0)
    tiered.finish()
    assert host(tiered).loaded - before == 4
    assert all([o.token for o in output] == expected([*PROMPT, i % 5], 1) for i, output in enumerate(outputs))


@pytest.mark.parametrize("trouble", [Script(progress=1.0, failure=1.0), Script(progress=1.0, stuck=1.0)])
def test_a_failed_or_late_load_is_computed_instead(trouble: Script) -> None:
    tiered = make_tiered(blocks=20, bounds=Bounds(load_s=2.0))
    tiered.ask(PROMPT)
    tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    tiered.transfers.script = trouble
    outputs = tiered.submit("again", [*PROMPT, 1], 3)
    for _ in range(30):
        tiered.engine.step()
        tiered.clock.now += 0.3
    assert [output.token for output in outputs] == expected([*PROMPT, 1], 3)
    assert outputs[0].cached_tokens == 0, "what was computed was counted as found"
    assert host(tiered).failed > 0
    tiered.settle()
    tiered.engine.check_integrity()
    assert tiered.engine.pool.in_flight == 0


@pytest.mark.parametrize("then", ["preempt", "abort"])
def test_a_load_that_failed_between_two_steps_is_forgotten_with_its_sequence(then: str) -> None:
    tiered = make_tiered()
    tiered.ask(PROMPT)
    push_out(tiered)
    tiered.transfers.script = Script(progress=0.0, failure=1.0)
    tiered.submit("short", [3] * 5, 1)
    tiered.finish()
    outputs = tiered.submit("again", [*PROMPT, 0], 3)
    tiered.engine.step()
    [sequence] = tiered.engine.scheduler.running
    assert {copy.kind for copy in tiered.transfers.running} == {"store", "load"}
    tiered.transfers.script = Script(progress=1.0)
    tiered.engine.evict(ratio=None, bytes_=1, dry_run=False, tiers=("host",))  # waits for the store
    assert tiered.residency.failed == [sequence]
    if then == "preempt":
        tiered.engine.scheduler.preempt(sequence)
        assert sequence.image is None, "blocks that never got their content were kept"
    else:
        tiered.engine.abort("again")
    tiered.finish()
    tiered.settle()
    assert [output.token for output in outputs] == (expected([*PROMPT, 0], 3) if then == "preempt" else [])
    assert tiered.engine.pool.active == 0
    tiered.engine.check_integrity()


@pytest.mark.parametrize("tiers", [("drop",), ("host", "drop"), ("host",)])
def test_blocks_that_a_late_load_may_still_write_to_are_not_eligible(tiers: tuple[Destination, ...]) -> None:
    tiered = make_tiered(blocks=16, first=4, recent=4, reuse=False, bounds=Bounds(load_s=2.0, store_s=9.0))
    outputs = tiered.submit("late", [1, 2, 3], 30)
    while len(outputs) < 20:
        tiered.engine.step()
    other = tiered.submit("other", [3] * 9, 40)
    while len(other) < 6:
        tiered.engine.step()
    sequence, going = tiered.engine.scheduler.running
    tiered.engine.scheduler.preempt(sequence)
    tiered.settle()
    tiered.transfers.script = SLOW
    tiered.engine.step()
    tiered.engine.scheduler.preempt(going)  # its store is what a demotion waits for
    assert sequence.loading and sequence.decoding
    tiered.clock.now += 3.0
    tiered.engine.evict(ratio=None, bytes_=1, dry_run=False, tiers=("host",))
    assert tiered.residency.failed == [sequence]
    for dry_run in (True, False):
        free = tiered.engine.pool.free
        report = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=dry_run, tiers=tiers)
        assert report.blocks_freed == report.eligible_blocks == 0
        assert tiered.engine.pool.free == free
    tiered.transfers.script = Script(progress=1.0)
    tiered.settle()
    tiered.engine.check_integrity()
    tiered.finish()
    assert [output.token for output in outputs] == expected([1, 2, 3], 30)
    assert [output.token for output in other] == expected([3] * 9, 40)


def test_corrupted_bytes_are_never_served() -> None:
    tiered = make_tiered(blocks=20, script=Script(progress=1.0, corruption=1.0))
    tiered.ask(PROMPT)
    tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    outputs = tiered.submit("again", [*PROMPT, 1], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 1], 3)
    assert (host(tiered).failed, host(tiered).hit_tokens) == (4, 0)


@pytest.mark.parametrize("when", range(12))
def test_abort_in_every_state_of_a_load_leaks_nothing(when: int) -> None:
    tiered = make_tiered(script=Script(progress=1.0))
    tiered.ask(PROMPT)
    push_out(tiered)
    tiered.transfers.script = Script(progress=0.4)
    tiered.submit("gone", [*PROMPT, 0], 3)
    for _ in range(when):
        tiered.engine.step()
        tiered.engine.check_integrity()
    tiered.engine.abort("gone")
    tiered.engine.check_integrity()
    tiered.settle()
    tiered.engine.tend()
    assert (tiered.engine.pool.active, tiered.engine.pool.in_flight) == (0, 0)
    assert tiered.ask([*PROMPT, 0], 3) == expected([*PROMPT, 0], 3)


def test_a_preempted_sequence_comes_back_instead_of_being_computed_anew() -> None:
    tiered = make_tiered()
    outputs = tiered.submit("r", [1, 2, 3, 4, 5], 20)
    for _ in range(8):
        tiered.engine.step()
    scheduler = tiered.engine.scheduler
    scheduler.preempt(scheduler.running[0])
    tiered.engine.pool.reclaim(12)
    tiered.finish()
    assert [output.token for output in outputs] == expected([1, 2, 3, 4, 5], 20)
    assert scheduler.tally.preemptions == 1
    assert scheduler.tally.recomputed_tokens == 0
    tiered.settle()
    assert not any(record.content for record in tiered.residency.manager.host if hasattr(record.content, "filled"))


def test_an_evicted_sequence_comes_back_with_what_it_had_kept() -> None:
    tiered = make_tiered(blocks=16, first=4, recent=4)
    tiered.submit("r", [1, 2, 3], 40)
    for _ in range(30):
        tiered.engine.step()
    tiered.settle()
    report = tiered.engine.evict(ratio=0.5, bytes_=None, dry_run=False)
    assert report.tokens_dropped > 0
    [sequence] = tiered.engine.scheduler.running
    kept, dropped = sequence.kept, sequence.dropped
    tiered.engine.scheduler.preempt(sequence)
    tiered.settle()
    tiered.engine.step()
    tiered.settle()
    assert (sequence.dropped, sequence.kept >= kept) == (dropped, True)
    assert tiered.engine.scheduler.tally.recomputed_tokens == 0


def test_cells_of_an_evicted_sequence_come_back() -> None:
    """Two sequences' cells share split blocks; each is stored and comes back without the other's."""
    tiered = make_tiered(
        blocks=24, host=40, grid=(2, 2), classes=((0, 1), (2, 3)), retention=Retention(interval=4), first=4, recent=4
    )
    outputs = {
        name: tiered.submit(name, [*PROMPT, *prompt], 24, kv_budget=KvBudget.of(13))
        for name, prompt in (("a", [1, 1]), ("b", [2, 2]))
    }
    for _ in range(14):
        tiered.engine.step()
    scheduler = tiered.engine.scheduler
    first, second = scheduler.running
    assert first.cells is not None and second.cells is not None
    entries, positions = first.cells.entries, first.cells.positions
    scheduler.preempt(first)
    assert first.image is not None and first.image.cells is not None
    tiered.settle()
    while first.cells is None:
        tiered.engine.step()
    assert first.cells.entries >= entries
    assert torch.equal(first.cells.positions, positions) or first.cells.entries > entries
    tiered.finish()
    assert scheduler.tally.recomputed_tokens == 0
    for name, prompt in (("a", [1, 1]), ("b", [2, 2])):
        assert [output.token for output in outputs[name]] == expected([*PROMPT, *prompt], 24)
    tiered.settle()
    assert (tiered.engine.pool.active, tiered.engine.pool.in_flight) == (0, 0)


def test_an_evicted_sequence_that_cannot_be_computed_anew_fails_alone() -> None:
    tiered = make_tiered(blocks=8, first=4, recent=4, reuse=False)
    outputs = tiered.submit("long", [1, 2, 3], 60)
    while len(outputs) < 45:
        tiered.engine.step()
        if tiered.engine.pool.free < 2:
            tiered.engine.evict(ratio=0.5, bytes_=None, dry_run=False)
    [sequence] = tiered.engine.scheduler.running
    assert len(sequence.tokens) > 8 * 4
    tiered.transfers.script = Script(progress=1.0, failure=1.0)
    tiered.engine.scheduler.preempt(sequence)
    other = tiered.submit("other", [1, 1], 3)
    tiered.finish()
    assert outputs[-1].finish_reason == "error"
    assert "do not fit the KV cache of 8 blocks any more" in (outputs[-1].error or "")
    assert [output.token for output in other] == expected([1, 1], 3)
    assert tiered.engine.pool.active == 0


def test_room_that_stores_will_give_back_is_waited_for() -> None:
    """A preemption's blocks are free once they are stored: nobody else is preempted for want of them meanwhile."""
    tiered = make_tiered(blocks=6, sequences=3, reuse=False, script=Script(progress=0.3))
    outputs = [tiered.submit(f"r{i}", [i, 1, 2], 14) for i in range(3)]
    tiered.finish()
    for i, output in enumerate(outputs):
        assert [o.token for o in output] == expected([i, 1, 2], 14)
    assert 0 < tiered.engine.scheduler.tally.preemptions < 12


def test_waiting_for_loads_is_no_stall() -> None:
    tiered = make_tiered()
    tiered.ask(PROMPT)
    push_out(tiered)
    tiered.transfers.script = SLOW
    outputs = tiered.submit("waits", [*PROMPT, 0], 2)
    for _ in range(STALL_PASSES + 10):
        assert tiered.engine.step() == []
    tiered.transfers.script = Script(progress=1.0)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 0], 2)


def test_a_full_host_tier_keeps_what_is_used_again() -> None:
    tiered = make_tiered(blocks=6, host=8)
    for _ in range(3):
        tiered.ask([*PROMPT, 0])
    for i in range(5):
        tiered.ask([i, 1, 3, 3, i, 1, 2, 3, 0])
    assert host(tiered).evicted >= 6
    entries = tiered.engine.pool.match(PROMPT)
    assert len(entries) == 4, "prompts that never return flushed out one that does"


def test_demotion_and_dropping_are_told_apart() -> None:
    tiered = make_tiered(blocks=12, host=2)
    tiered.ask([*PROMPT, 0])
    assert tiered.engine.pool.cached == 4
    dry = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=True, tiers=("host", "drop"))
    report = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host", "drop"))
    assert (report.blocks_freed, report.dropped + report.demoted) == (4, 4)
    assert report.demoted == dry.demoted
    assert 0 < report.demoted <= 2
    tiered.engine.check_integrity()


def test_demotion_waits_for_stores_but_not_for_ever() -> None:
    tiered = make_tiered(bounds=Bounds(stores=0))
    tiered.ask([*PROMPT, 0])
    assert host(tiered).stored == 0
    report = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    assert (report.demoted, report.dropped) == (4, 0)
    tiered.ask([2] * 9)
    tiered.transfers.script, began = SLOW, tiered.clock.now
    report = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("host",))
    assert (report.demoted, report.dropped, report.blocks_freed) == (0, 0, 0)
    assert tiered.clock.now - began <= 1.0
    tiered.transfers.script = Script(progress=1.0)
    tiered.settle()
    tiered.engine.check_integrity()


def test_dropping_leaves_nothing_below() -> None:
    tiered = make_tiered()
    tiered.ask([*PROMPT, 0])
    report = tiered.engine.evict(ratio=1.0, bytes_=None, dry_run=False, tiers=("drop",))
    assert (report.demoted, report.dropped) == (0, 4)
    assert tiered.residency.manager.host.used == 0
    assert tiered.engine.pool.match(PROMPT) == []


def test_a_failing_requests_blocks_are_kept_nowhere() -> None:
    tiered = make_tiered()
    outputs = tiered.submit("bad", PROMPT, 10)
    for _ in range(4):
        tiered.engine.step()
    tiered.settle()
    assert tiered.residency.manager.host.used > 0
    last = tiered.engine.scheduler.running[0].table[-1] * 4
    for slot in range(last, last + 4):
        tiered.runner.slots[slot] = EMPTY
    tiered.finish()
    assert outputs[-1].finish_reason == "error"
    assert tiered.residency.manager.host.used == 0
    tiered.engine.check_integrity()


def test_a_block_that_is_zeroed_under_a_store_is_not_kept() -> None:
    tiered = make_tiered(script=Script(progress=0.0))
    prompt = [1, 2, 3, 4, 5, 6]
    outputs = tiered.submit("parent", prompt, 12)
    child = tiered.submit("child", prompt, 12, fork_of="parent")
    tiered.engine.step()
    parent, fork = tiered.engine.scheduler.running
    assert parent.table[-1] == fork.table[-1]  # the begun block of both
    tiered.engine.scheduler.preempt(parent)  # its copy waits to begin
    assert parent.image is not None
    [begun] = [piece for piece in parent.image.own if tiered.residency.manager.known(piece)]
    tiered.engine._live.fail(fork, "the model failed")
    assert child[-1].finish_reason == "error"
    assert not tiered.residency.manager.known(begun)
    tiered.transfers.release()
    tiered.finish()
    assert [output.token for output in outputs] == expected(prompt, 12)
    tiered.engine.check_integrity()


def test_sixty_four_prompts_with_words_of_their_own_in_a_tenth_of_their_memory() -> None:
    """Each prompt has its own canary; an answer that holds another's would differ from what it must be."""
    prompts = [[i % 5, i // 5 % 5, i // 25, 4 - i % 5] * 4 + [i % 3] for i in range(64)]
    script = Script(progress=0.4, failure=0.02, corruption=0.02)
    # 64 prompts and answers of 23 tokens take 384 blocks
    tiered = make_tiered(blocks=32, host=400, sequences=16, budget=64, script=script, bounds=Bounds(pause_s=0.0))
    for turn in range(3):
        outputs = [tiered.submit(f"t{turn}-{i}", prompt, 6) for i, prompt in enumerate(prompts)]
        for _ in range(3000):
            if tiered.engine.idle:
                break
            tiered.engine.step()
            tiered.clock.now += 0.01
        for prompt, output in zip(prompts, outputs, strict=True):
            assert [o.token for o in output] == expected(prompt, 6)
    assert host(tiered).hit_tokens > 0
    assert tiered.engine.pool.active == 0
