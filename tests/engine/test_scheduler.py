"""Faults of schedulers that users met, each as a small scene on an engine without a model."""

from __future__ import annotations

from typing import Any

import pytest

from ullage_engine.fake_runner import expected_tokens
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.scheduler import MAX_PASSED_OVER


def submit(
    engine: Any, name: str, prompt: list[int], count: int, fork_of: str | None = None, tenant: str = ""
) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    sampling = SamplingParams(max_tokens=count, temperature=0)
    request = GenerationRequest(
        request_id=name, prompt=tuple(prompt), sampling=sampling, fork_of=fork_of, tenant=tenant
    )
    engine.add(request, outputs.append)
    return outputs


def finish(engine: Any, limit: int = 2000) -> None:
    for _ in range(limit):
        if engine.idle:
            return
        engine.step()
    pytest.fail(f"not idle after {limit} steps")


def test_preempted_one_token_past_a_block_boundary_and_resumed(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=5, block_tokens=4, budget=16, sequences=3)
    outputs = [submit(engine, f"r{i}", [i, 1, 2], 15) for i in range(3)]
    finish(engine)
    assert engine.scheduler.tally.preemptions > 0
    assert engine.scheduler.tally.recomputed_tokens > 0
    for i, output in enumerate(outputs):
        assert [o.token for o in output] == expected_tokens([i, 1, 2], 15, 5)
    assert engine.pool.active == 0


def test_prefix_serves_a_resume_after_preemption(fake_engine: Any) -> None:
    # 7 blocks of 16, two prompts of 34, 35 new tokens: the pool holds one of them at full length
    engine, _ = fake_engine(blocks=7, block_tokens=16, budget=64, sequences=2)
    outputs = [submit(engine, f"r{i}", [i] * 34, 35) for i in range(2)]
    finish(engine)
    assert all(len(output) == 35 for output in outputs)
    assert engine.scheduler.tally.preemptions > 0
    assert engine.scheduler.tally.recomputed_tokens < 34, "the published blocks of the preempted one were not used"


def test_small_requests_pass_a_blocked_head(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=10, block_tokens=4, budget=40, sequences=4, reuse=False)
    submit(engine, "holder", [1] * 24, 8)
    engine.step()
    head = submit(engine, "head", [2] * 24, 4)
    small = submit(engine, "small", [3] * 2, 2)
    for _ in range(4):
        engine.step()
    assert small[-1].finish_reason == "length"
    assert not head
    finish(engine)
    assert head[-1].finish_reason == "length"


def test_a_blocked_head_is_not_passed_for_ever(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=10, block_tokens=4, budget=40, sequences=4, reuse=False)
    head: list[TokenOutput] = []
    for i in range(10 * MAX_PASSED_OVER):
        submit(engine, f"small{i}", [i % 5] * 9, 3)
        if i == 4:
            head = submit(engine, "head", [9] * 34, 4)
        engine.step()
        if head:
            break
    assert head, "later requests starved the head of the queue"


def test_oldest_request_always_advances(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=6, block_tokens=4, budget=8, sequences=4)
    first = submit(engine, "first", [1] * 6, 18)
    for i in range(4):
        submit(engine, f"later{i}", [2 + i] * 6, 18)
    got = 0
    while not (first and first[-1].finish_reason):
        for _ in range(3):
            engine.step()
        assert len(first) > got, "the oldest request made no progress in three steps"
        got = len(first)
    finish(engine)


def test_full_prompt_hit_recomputes_its_last_token(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4)
    cold = submit(engine, "cold", [1, 2, 3, 4] * 2, 3)
    finish(engine)
    warm = submit(engine, "warm", [1, 2, 3, 4] * 2, 3)
    finish(engine)
    assert [o.token for o in warm] == [o.token for o in cold]
    assert warm[0].cached_tokens == 4
    assert cold[0].cached_tokens == 0


def test_requests_finish_at_every_offset_of_a_block(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=8)
    for length in range(1, 18):
        outputs = submit(engine, f"r{length}", [1] * 5, length)
        finish(engine)
        assert len(outputs) == length
        assert engine.pool.active == 0


def test_one_failing_request_ends_alone(fake_engine: Any) -> None:
    def fail(chunk: Any) -> None:
        if chunk.sequence.request_id == "bad" and chunk.sequence.generated >= 2:
            raise RuntimeError("boom")

    engine, _ = fake_engine(blocks=16, block_tokens=4, fail=fail)
    good, bad = submit(engine, "good", [1, 2, 3], 6), submit(engine, "bad", [1, 2, 3], 6)
    finish(engine)
    assert [o.token for o in good] == expected_tokens([1, 2, 3], 6, 5)
    assert bad[-1].finish_reason == "error"
    assert "RuntimeError" in (bad[-1].error or "")
    assert engine.tally.failed == 1
    assert engine.pool.active == 0
    engine.check_integrity()


def test_receiver_that_raises_ends_its_own_request_only(fake_engine: Any) -> None:
    engine, _ = fake_engine()
    good = submit(engine, "good", [1, 2, 3], 6)

    def broken(output: TokenOutput) -> None:
        raise ValueError("nobody listens")

    engine.add(
        GenerationRequest(request_id="bad", prompt=(1,), sampling=SamplingParams(max_tokens=5, temperature=0)), broken
    )
    finish(engine)
    assert len(good) == 6
    assert engine.pool.active == 0


def test_slots_filled_tells_full_blocks_from_begun_ones(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=8, block_tokens=16, budget=64)
    for i in range(2):
        submit(engine, f"r{i}", [i] * 17, 5)
    engine.step()
    snapshot = engine.snapshot(None, draining=False)
    assert snapshot.blocks.active == 4
    assert (snapshot.slots_filled, snapshot.slots_allocated) == (34, 64)


def test_outstanding_counts_what_admitted_work_may_still_ask_for(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=8, block_tokens=8, budget=16)
    submit(engine, "r", [1] * 8, 24)
    assert engine.snapshot(None, draining=False).outstanding_blocks == 4
    engine.step()
    assert engine.snapshot(None, draining=False).outstanding_blocks == 3


def test_forks_share_the_prompt_and_copy_its_tail(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4, budget=32)
    prompt = [1, 2, 3, 4, 1, 2]
    outputs = [submit(engine, "r0", prompt, 5), *(submit(engine, f"r{i}", prompt, 5, "r0") for i in (1, 2))]
    assert engine.snapshot(None, draining=False).waiting == 3
    engine.step()
    assert engine.pool.active == 2, "the prompt's two blocks are held once for all three"
    assert [len(output) for output in outputs] == [1, 1, 1]
    engine.step()
    assert engine.pool.active == 4, "one full block shared, one tail each"
    assert engine.tally.generated_tokens == 6
    finish(engine)
    for output in outputs:
        assert [o.token for o in output] == expected_tokens(prompt, 5, 5)
    assert outputs[1][0].cached_tokens == 6
    assert engine.pool.active == 0


@pytest.mark.parametrize("parent_ends", ["abort", "fail"])
def test_forks_of_a_parent_that_ends_go_on_alone(fake_engine: Any, parent_ends: str) -> None:
    def fail(chunk: Any) -> None:
        if parent_ends == "fail" and chunk.sequence.request_id == "r0":
            raise RuntimeError("boom")

    engine, _ = fake_engine(blocks=16, block_tokens=4, budget=4, fail=fail)
    submit(engine, "r0", [1] * 10, 5)
    child = submit(engine, "r1", [1] * 10, 5, "r0")
    engine.step()
    engine.abort("r0")
    finish(engine)
    assert [o.token for o in child] == expected_tokens([1] * 10, 5, 5)


def test_fork_of_another_prompt_or_of_a_parent_gone_is_an_ordinary_request(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4)
    submit(engine, "r0", [1] * 5, 3)
    other = submit(engine, "r1", [2] * 5, 3, "r0")
    orphan = submit(engine, "r2", [3] * 5, 3, "nobody")
    finish(engine)
    assert [o.token for o in other] == expected_tokens([2] * 5, 3, 5)
    assert [o.token for o in orphan] == expected_tokens([3] * 5, 3, 5)


def test_aborted_fork_leaves_its_siblings(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4, budget=4)
    submit(engine, "r0", [1] * 10, 3)
    gone, stays = (submit(engine, f"r{i}", [1] * 10, 3, "r0") for i in (1, 2))
    engine.step()
    engine.abort("r1")
    finish(engine)
    assert not gone
    assert len(stays) == 3


def test_preemption_takes_the_one_that_costs_least(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=20, block_tokens=4, budget=64, first=4, recent=4)
    for name, prompt in (("oldest", [1] * 8), ("evicted", [2] * 24), ("whole", [3] * 24)):
        submit(engine, name, prompt, 20)
    engine.step()
    engine.step()
    report = engine.evict(ratio=None, bytes_=4 * 32, dry_run=False)
    assert report.sequences_touched == 2
    from ullage_engine.scheduler import preemption_cost

    costs = {s.request_id: preemption_cost(s, engine.pool) for s in engine.scheduler.running}
    victim = engine.scheduler._victim()
    assert victim.request_id != "oldest"
    assert costs[victim.request_id] == min(costs["evicted"], costs["whole"])


def test_four_long_runners_and_a_fifth_do_not_thrash(fake_engine: Any) -> None:
    # scaled down from 4 x 100k tokens running at 90 % of the pool when a fifth arrives
    engine, _ = fake_engine(blocks=112, block_tokens=4, budget=128, sequences=8, reuse=False)
    outputs = [submit(engine, f"r{i}", [i] * 100, 12) for i in range(5)]
    finish(engine)
    assert [len(output) for output in outputs] == [12] * 5
    assert engine.scheduler.tally.preemptions == 0


def test_engine_that_can_never_move_again_ends_the_head(fake_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ullage_engine.engine import STALL_PASSES

    engine, _ = fake_engine(blocks=4, block_tokens=4)
    outputs = submit(engine, "r", [1] * 10, 2)
    lost = engine.pool.allocate(3)  # blocks that nobody will ever give back
    for _ in range(STALL_PASSES + 1):
        engine.step()
    assert outputs[-1].finish_reason == "error"
    assert "no KV blocks became available" in (outputs[-1].error or "")
    assert "no progress" in caplog.text
    engine.pool.release(lost)
    assert engine.idle


def test_prompts_of_two_tenants_share_nothing(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4)
    first = submit(engine, "r0", [1] * 9, 3, tenant="a")
    forked = submit(engine, "r1", [1] * 9, 3, "r0", tenant="b")
    finish(engine)
    again = submit(engine, "r2", [1] * 9, 3, tenant="b")
    other = submit(engine, "r3", [1] * 9, 3)
    finish(engine)
    cached = [output[0].cached_tokens for output in (first, forked, again, other)]
    assert cached == [0, 0, 8, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_nothing_can_be_chosen_from_end_their_request_alone(fake_engine: Any, value: float) -> None:
    engine, runner = fake_engine(blocks=16, block_tokens=4)
    good = submit(engine, "good", [1, 2, 3], 6)
    bad: list[TokenOutput] = []
    sampling = SamplingParams(max_tokens=6, temperature=1.0)
    engine.add(GenerationRequest(request_id="bad", prompt=(1, 2), sampling=sampling), bad.append)
    forward = runner.forward

    def poisoned(chunks: Any) -> Any:
        logits = forward(chunks)
        names = [chunk.sequence.request_id for chunk in chunks if chunk.completes]
        if "bad" in names:
            logits[names.index("bad"), 0] = value
        return logits

    runner.forward = poisoned
    finish(engine)
    assert bad[-1].finish_reason == "error"
    assert [o.token for o in good] == expected_tokens([1, 2, 3], 6, 5)
    engine.check_integrity()


def test_outstanding_counts_a_shared_prompt_once(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=16, block_tokens=4, budget=4)
    for i in range(4):
        submit(engine, f"r{i}", [1] * 16, 4, "r0" if i else None)
    assert engine.snapshot(None, draining=False).outstanding_blocks == 5 + 3


def test_outstanding_counts_the_copies_of_a_shared_tail(fake_engine: Any) -> None:
    """Held and outstanding blocks together are what the requests will hold in the end, from the queue on."""
    engine, _ = fake_engine(blocks=32, block_tokens=4, budget=64)
    for i in range(3):
        submit(engine, f"r{i}", [1] * 18, 5, "r0" if i else None)
    ends = []
    while not engine.idle:
        state = engine.snapshot(None, draining=False)
        if state.running + state.waiting == 3:
            ends.append(state.blocks.active + state.outstanding_blocks)
        engine.step()
    # four whole blocks of prompt shared, and for each its own tail and what follows: rows 16 to 22
    assert set(ends) == {4 + 3 * 2}


def test_hits_count_prompts_that_others_computed_and_nothing_else(fake_engine: Any) -> None:
    engine, _ = fake_engine(blocks=10, block_tokens=4, budget=32, sequences=6)
    for i in range(6):
        submit(engine, f"r{i}", [i % 5, i // 5, 1, 2, 3, 4, 3, 2], 16)
    finish(engine)
    assert engine.scheduler.tally.preemptions > 0
    assert engine.scheduler.tally.prefix_query_tokens == 6 * 8
    assert engine.scheduler.tally.prefix_hit_tokens == 0
