"""Eviction: cached blocks first, then cold tokens of live sequences; what is protected stays."""

from __future__ import annotations

from typing import Any

import pytest

from ullage_engine.eviction import share_of
from ullage_engine.request import GenerationRequest, SamplingParams

SIZE = 4


def submit(engine: Any, name: str, prompt: list[int], count: int) -> list[Any]:
    outputs: list[Any] = []
    sampling = SamplingParams(max_tokens=count, temperature=0)
    engine.add(GenerationRequest(request_id=name, prompt=tuple(prompt), sampling=sampling), outputs.append)
    return outputs


def long_runner(make: Any, tokens: int = 40, **options: Any) -> tuple[Any, Any]:
    """An engine with one sequence that has computed `tokens` tokens; 2 blocks protected, 2 recent."""
    engine, _ = make(blocks=20, block_tokens=SIZE, budget=64, first=8, recent=8, **options)
    submit(engine, "live", [1, 2] * (tokens // 2), 20)
    engine.step()
    engine.step()
    return engine, engine.scheduler.running[0]


def test_live_sequence_keeps_its_first_and_recent_tokens(fake_engine: Any) -> None:
    engine, sequence = long_runner(fake_engine)
    report = engine.evict(ratio=1.0, bytes_=None, dry_run=False)
    assert report.blocks_freed == report.eligible_blocks == 6
    assert report.tokens_dropped == 24
    assert report.sequences_touched == 1
    assert sequence.starts[:2] == [0, 4]
    assert sequence.starts[-1] == 40
    assert sequence.computed == 41
    assert sequence.kept == 41 - 24
    engine.check_integrity()


def test_positions_go_on_where_they_were(fake_engine: Any) -> None:
    engine, sequence = long_runner(fake_engine)
    engine.evict(ratio=0.5, bytes_=None, dry_run=False)
    before = sequence.computed
    for _ in range(6):
        engine.step()
    assert sequence.computed == before + 6
    assert sequence.starts[-1] == (sequence.computed - 1) // SIZE * SIZE


def test_cached_blocks_go_before_anything_live(fake_engine: Any) -> None:
    engine, sequence = long_runner(fake_engine)
    submit(engine, "done", [7] * 12, 1)
    engine.step()
    assert engine.pool.cached == 3
    table = list(sequence.table)
    report = engine.evict(ratio=None, bytes_=3 * 32, dry_run=False)
    assert (report.cached_blocks, report.blocks_freed, report.sequences_touched) == (3, 3, 0)
    assert sequence.table == table


def test_shared_blocks_are_never_dropped(fake_engine: Any) -> None:
    engine, first = long_runner(fake_engine)
    submit(engine, "twin", [1, 2] * 20, 10)
    engine.step()
    engine.step()
    shared = [block for block in first.table if engine.pool.references(block) == 2]
    assert len(shared) == 9
    report = engine.evict(ratio=1.0, bytes_=None, dry_run=False)
    assert report.blocks_freed == 0
    assert set(shared) <= set(first.table)


def test_dry_run_says_and_does_nothing(fake_engine: Any) -> None:
    engine, sequence = long_runner(fake_engine)
    table, usage = list(sequence.table), engine.pool.usage()
    report = engine.evict(ratio=0.3, bytes_=None, dry_run=True)
    assert report.dry_run
    assert report.blocks_freed == 4
    assert report.requested_blocks == 4
    assert (sequence.table, engine.pool.usage()) == (table, usage)


def test_nothing_to_free_is_said_so(fake_engine: Any) -> None:
    engine, _ = fake_engine()
    report = engine.evict(ratio=0.5, bytes_=None, dry_run=False)
    assert (report.blocks_freed, report.bytes_freed, report.eligible_blocks) == (0, 0, 0)


def test_two_sequences_give_in_turn(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=30, block_tokens=SIZE, budget=96, first=4, recent=4, reuse=False)
    for name in "ab":
        submit(engine, name, [1, 2] * 20, 10)
    engine.step()
    engine.step()
    engine.evict(ratio=None, bytes_=6 * 32, dry_run=False)
    assert [sequence.dropped // SIZE for sequence in engine.scheduler.running] == [3, 3]


def test_content_computed_after_a_drop_is_not_offered_to_others(fake_engine: Any) -> None:
    engine, _ = long_runner(fake_engine)
    published = len(engine.pool.index)
    engine.evict(ratio=1.0, bytes_=None, dry_run=False)
    assert len(engine.pool.index) < published
    after = len(engine.pool.index)
    for _ in range(12):
        engine.step()
    assert len(engine.pool.index) == after


def test_evict_preempt_restore_continue(fake_engine: Any) -> None:
    from ullage_engine.fake_runner import expected_tokens

    engine, sequence = long_runner(fake_engine)
    engine.evict(ratio=0.6, bytes_=None, dry_run=False)
    engine.step()
    engine.scheduler.preempt(sequence)
    outputs = sequence.sink.__self__
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert [o.token for o in outputs] == expected_tokens([1, 2] * 20, 20, 5)
    assert sequence.dropped == 0


def test_prefilling_sequences_are_left_alone(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=20, block_tokens=SIZE, budget=16, first=4, recent=4)
    submit(engine, "long", [1, 2] * 30, 4)
    engine.step()
    engine.step()
    assert engine.evict(ratio=1.0, bytes_=None, dry_run=False).blocks_freed == 0


@pytest.mark.parametrize(("blocks", "wanted"), [(0, 0), (1, 1), (5, 1), (10, 2), (15, 3), (25, 5), (26, 6), (214, 43)])
def test_a_share_is_rounded_up_and_never_beyond(blocks: int, wanted: int) -> None:
    assert share_of(blocks, 0.2) == wanted
