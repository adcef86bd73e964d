"""Sequences with a budget, on a real (small, random) model: positions, policies, readers, and what others notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import make_engine
from test_fused import tiny

from ullage_engine import policies
from ullage_engine.budgets import Retention
from ullage_engine.engine import Engine
from ullage_engine.reclaim import ReclaimTally
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams, TokenOutput

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(300)]


@pytest.fixture(scope="module")
def model() -> Any:
    found, _ = tiny("llama")
    found.config.max_position_embeddings = 1024
    return found


def retention(model: Any, **options: Any) -> Retention:
    rotary = next(m for m in model.modules() if hasattr(m, "inv_freq"))
    return Retention(
        policies={name: policies.make(name, scaling=32**-0.5) for name in policies.NAMES},
        instruction=(5, 6, 7),
        inverse_frequencies=rotary.inv_freq.float(),
        **options,
    )


def engine_of(model: Any, **options: Any) -> Engine:
    kept = retention(model, **options.pop("retention", {}))
    return make_engine(model, options.pop("kind", "fp8"), size=16, budget=96, retention=kept, **options)


def ask(
    engine: Engine, name: str, prompt: list[int], count: int, budget: float | None = None, policy: str | None = None
) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    request = GenerationRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=count, temperature=0),
        kv_budget=None if budget is None else KvBudget.of(budget),
        kv_policy=policy,
    )
    engine.add(request, outputs.append)
    return outputs


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.pool.active == 0


def until_cut(engine: Engine, name: str = "a") -> Any:
    """The sequence, as soon as it holds cells."""
    for _ in range(60):
        engine.step()
        engine.check_integrity()
        found = next((s for s in engine.scheduler.running if s.request_id == name), None)
        if found is not None and found.cells is not None and not found.held:
            return found
    raise AssertionError("the sequence was not cut")


def positions_seen(model: Any, action: Any) -> list[int]:
    """Every position that the model computes while `action` runs."""
    seen: list[int] = []

    def note(_: Any, arguments: Any, options: Any) -> None:
        seen.extend(options["position_ids"][0].tolist())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        action()
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("policy", policies.NAMES)
def test_positions_go_on_after_three_hundred_tokens_cut_to_a_hundred_and_twenty_eight(model: Any, policy: str) -> None:
    engine = engine_of(model)
    outputs = ask(engine, "a", PROMPT, 5, 128, policy)
    sequence = until_cut(engine) if policy not in ("recency", "streaming") else None
    while sequence is None:
        engine.step()
        sequence = next((s for s in engine.scheduler.running if s.dropped), None)
    assert sequence.computed == 300
    assert sequence.kept_tokens <= 128
    assert positions_seen(model, engine.step) == [300]
    assert positions_seen(model, engine.step) == [301]
    finish(engine)
    assert len(outputs) == 5
    assert outputs[-1].kept_tokens == 132
    assert outputs[-1].dropped_tokens == 304 - 132


def rows_left(model: Any, policy: str) -> frozenset[tuple[int, int, int]]:
    """What a policy keeps of one sequence, by layer, head and position."""
    engine = engine_of(model)
    ask(engine, "a", PROMPT, 3, 128, policy)
    while not any(s.dropped and not s.held for s in engine.scheduler.running if s.reads is None):
        engine.step()
    sequence = engine.scheduler.running[0]
    dense = [start + i for start in sequence.starts for i in range(16) if start + i < sequence.computed]
    found = {(layer, head, position) for layer in range(2) for head in range(2) for position in dense}
    if sequence.cells is not None:
        held = sequence.cells.positions
        found |= {
            (layer, head, p) for layer in range(2) for head in range(2) for p in held[layer, head].tolist() if p >= 0
        }
    return frozenset(found)


def test_any_two_policies_keep_something_different(model: Any) -> None:
    left = {policy: rows_left(model, policy) for policy in policies.NAMES if policy != "streaming"}
    assert len(set(left.values())) == len(left)
    assert len({len(kept) for kept in left.values()}) == 1  # of one budget
    # sinks are protected as it is: only without protection do streaming and recency differ
    scores = []
    for name in ("streaming", "recency"):
        view: Any = type("View", (), {"positions": torch.arange(40).view(1, 1, 40), "length": 40})()
        scores.append(policies.make(name, scaling=1.0).score(view))
    assert not torch.equal(*(policies.select(s, torch.ones(1, 1, 40, dtype=torch.bool), 10) for s in scores))


@pytest.mark.parametrize("budget", [1, 100_000])
def test_a_budget_of_everything_changes_no_bit(model: Any, budget: float) -> None:
    def logits(budget: float | None) -> list[torch.Tensor]:
        engine = engine_of(model, retention={"interval": 4})
        found: list[torch.Tensor] = []
        forward = engine._runner.forward

        def noting(chunks: Any) -> torch.Tensor:
            found.append(forward(chunks))
            return found[-1]

        engine._runner.forward = noting  # type: ignore[method-assign]
        ask(engine, "a", PROMPT, 20, budget, "reconstruct")
        finish(engine)
        assert engine.snapshot(None, draining=False).counters.evicted_tokens == 0
        return found

    for ours, theirs in zip(logits(budget), logits(None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("policy", ["reconstruct", "window", "recency"])
def test_decoding_is_cut_again_whenever_it_outgrows_its_budget(model: Any, policy: str) -> None:
    engine = engine_of(model, retention={"interval": 32})
    outputs = ask(engine, "a", PROMPT, 150, 0.4, policy)
    most = 0.0
    while not engine.idle:
        engine.step()
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            if sequence.reads is None and sequence.settled_at is not None:
                most = max(most, sequence.kept_tokens - 0.4 * sequence.computed)
    assert most <= 32 + 1
    assert len(outputs) == 150
    assert engine.pool.active == 0


def test_others_go_on_while_a_sequence_is_read_and_get_the_same_answers(model: Any) -> None:
    alone = engine_of(model, kind="fp32")
    wanted = ask(alone, "b", [9] * 20, 60)
    finish(alone)
    engine = engine_of(model, kind="fp32")
    outputs = ask(engine, "b", [9] * 20, 60)
    engine.step()
    ask(engine, "a", PROMPT, 20, 100, "reconstruct")
    read = 0
    while not engine.idle:
        before = len(outputs)
        engine.step()
        engine.check_integrity()
        if any(sequence.reads is not None for sequence in engine.scheduler.running):
            read += 1
            assert len(outputs) == before + 1 or outputs[-1].finish_reason is not None
    assert read >= 4
    assert [output.token for output in outputs] == [output.token for output in wanted]


def test_a_shared_prefix_is_never_touched(model: Any) -> None:
    alone = engine_of(model)
    wanted = ask(alone, "b", PROMPT[:200], 30)
    finish(alone)
    engine = engine_of(model)
    outputs = ask(engine, "b", PROMPT[:200], 30)
    for _ in range(4):
        engine.step()
    shared = list(engine.scheduler.running[0].table[:12])
    before = engine._runner.store.data[shared].clone()  # type: ignore[attr-defined]
    ask(engine, "a", PROMPT, 20, 250, "window")
    sequence = until_cut(engine)
    assert sequence.table[:12] == shared
    finish(engine)
    assert torch.equal(engine._runner.store.data[shared], before)  # type: ignore[attr-defined]
    assert [output.token for output in outputs] == [output.token for output in wanted]


@pytest.mark.parametrize("policy", ["reconstruct", "window"])
def test_cut_preempted_computed_again_cut_again(model: Any, policy: str) -> None:
    engine = engine_of(model)
    outputs = ask(engine, "a", PROMPT, 40, 100, policy)
    sequence = until_cut(engine)
    kept = sequence.cells
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(sequence)
    engine.check_integrity()
    assert sequence.cells is None
    assert engine.scheduler.cells.usage().blocks == 0
    assert until_cut(engine).cells is not kept
    finish(engine)
    assert len(outputs) == 40
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(("policy", "fitted"), [("reconstruct", True), ("window", False), ("recency", False)])
def test_values_are_fitted_where_the_context_was_read_again(
    model: Any, policy: str, fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(amend: bool) -> list[torch.Tensor]:
        if not amend:
            monkeypatch.setattr("ullage_engine.budgets.amended", lambda *_: None)
        engine = engine_of(model, kind="fp32")
        ask(engine, "a", PROMPT, 20, 100, policy)
        return content(engine, until_cut(engine))

    changed = [(ours != plain).flatten(1).any(1) for ours, plain in zip(values(True), values(False), strict=True)]
    assert [layer.tolist() for layer in changed] == [[False, fitted]] * 2, "keys, values"


def content(engine: Engine, sequence: Any) -> list[torch.Tensor]:
    """Keys and values in its cells, by layer."""
    table, store = sequence.cells, engine._runner.store  # type: ignore[attr-defined]
    return [torch.cat(store.read_cells(layer, table.padded(layer)[None], torch.float32)) for layer in range(2)]


def until_cutting(engine: Engine, layers: int) -> Any:
    """Step until a cut has begun and so many layers are filled; the sequence."""
    for _ in range(200):
        reading = engine.reclaimer.budgets._reading
        if engine.cutting and reading.cutting.layers == layers:  # type: ignore[union-attr]
            return reading.sequence  # type: ignore[union-attr]
        engine.step()
    raise AssertionError("no cut began")


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_a_cut_spread_over_steps_is_the_same_cut(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for rows in (1, 1 << 30):
        monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", rows)
        engine = engine_of(model, kind=kind)
        outputs = ask(engine, "a", PROMPT, 20, 100, "reconstruct")
        cut = content(engine, until_cut(engine))
        blocks = engine.reclaimer.totals().evicted_blocks
        finish(engine)
        found[rows] = cut, [output.token for output in outputs], blocks
    (cut, tokens, blocks), (at_once, wanted, expected) = found.values()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cut, at_once, strict=True))
    assert (tokens, blocks) == (wanted, expected)
    assert blocks > 0


def test_a_cut_that_frees_nothing_any_more_is_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that shares the whole context came while it was cut: what is left of it would be held twice."""
    monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", 1)
    engine = engine_of(model)
    ask(engine, "a", PROMPT, 20, 100, "reconstruct")
    sequence = until_cutting(engine, 0)
    ask(engine, "b", PROMPT, 20)
    before = engine.pool.available
    while engine.cutting:
        engine.step()
        engine.check_integrity()
    assert sequence.cells is None
    assert engine.reclaimer.totals() == ReclaimTally()
    assert engine.pool.available > before, "the fresh cells are back"
    finish(engine)


def test_who_needs_blocks_gets_those_of_a_cut_under_way_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", 1)
    engine = engine_of(model)
    ask(engine, "c", [9] * 20, 200)
    engine.step()
    outputs = ask(engine, "a", PROMPT, 20, 100, "reconstruct")
    sequence = until_cutting(engine, 0)
    scheduler, others = engine.scheduler, engine.pool.allocate(engine.pool.available)
    assert scheduler._make_room(scheduler.running[0], 48)
    assert scheduler.tally.preemptions == 0
    assert all(running.reads is None for running in scheduler.running)
    engine.pool.release(others)
    engine.reclaimer.budgets.keep()
    engine.check_integrity()
    assert sequence.cells is not None, "it is cut all the same"
    finish(engine)
    assert len(outputs) == 20


@pytest.mark.parametrize("layers", [0, 1])
def test_cells_may_move_while_they_are_filled(model: Any, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", 1)
    found = []
    for compacted in (False, True):
        engine = engine_of(model)
        ask(engine, "x", PROMPT[:250], 200, 90, "window")
        until_cut(engine, "x")
        ask(engine, "a", PROMPT, 20, 100, "reconstruct")
        sequence = until_cutting(engine, layers)
        engine.abort("x")  # leaves holes
        if compacted:
            coming = engine.scheduler.running[1].coming
            assert engine.compact(1000).cells_moved > 0
            assert not torch.equal(engine.scheduler.running[1].coming.cells, coming.cells)  # type: ignore[union-attr]
        engine.check_integrity()
        assert until_cut(engine) is sequence
        found.append(content(engine, sequence))
        finish(engine)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_others_go_on_while_a_sequence_is_cut(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", 1)
    engine = engine_of(model)
    outputs = ask(engine, "b", [9] * 20, 200)
    engine.step()
    cut = ask(engine, "a", PROMPT, 20, 100, "reconstruct")
    sequence, before, received = until_cutting(engine, 0), len(outputs), len(cut)
    for step in range(2):
        assert engine.cutting
        assert sequence.cells is None
        engine.step()
        engine.check_integrity()
        assert (len(outputs), len(cut)) == (before + step + 1, received), "others go on, the sequence waits"
    assert not engine.cutting
    assert sequence.cells is not None
    finish(engine)
    assert len(cut) == 20


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("event", ["evict", "compact", "abort", "preempted", "reader preempted", "fit failed"])
def test_whatever_happens_to_a_cut_that_has_begun(
    model: Any, event: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_engine.budgets.FITTED_ROWS", 1)
    engine = engine_of(model)
    outputs = ask(engine, "a", PROMPT, 40, 100, "reconstruct")
    sequence = until_cutting(engine, layers)
    reader = engine.scheduler.running[1]
    if event == "evict":
        engine.evict(ratio=0.5, bytes_=None, dry_run=False)
    elif event == "compact":
        engine.compact(1000)
    elif event == "abort":
        engine.abort("a")
    elif event == "preempted":
        engine.scheduler.preempt(sequence)
    elif event == "reader preempted":
        engine.scheduler.preempt(reader)
    else:
        monkeypatch.setattr("ullage_engine.budgets.amended", lambda *_: 1 / 0)
    engine.check_integrity()
    engine.step()
    engine.check_integrity()
    if event == "reader preempted":
        assert sequence.cells is not None, "it is cut all the same"
        assert not engine.cutting
    if event == "fit failed":
        assert sequence.cells is None
        assert not engine.cutting
    finish(engine)
    assert engine.scheduler.cells.usage().blocks == 0
    if event != "abort":
        assert len(outputs) == 40
        assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("steps", range(4, 14))
def test_a_request_that_ends_while_it_is_read_leaves_nothing(model: Any, steps: int) -> None:
    engine = engine_of(model)
    ask(engine, "a", PROMPT, 40, 100, "reconstruct")
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    finish(engine)
    assert engine.scheduler.running == []


def test_a_policy_that_fails_costs_nothing_but_the_cut(model: Any) -> None:
    class Broken:
        name = "broken"
        needs = policies.Needs.QUERIES

        def score(self, view: policies.SequenceView) -> torch.Tensor:
            raise ValueError("no scores today")

    kept = Retention(policies={"broken": Broken()}, policy="broken", budget=KvBudget(tokens=64))
    engine = make_engine(model, "fp8", size=16, budget=96, retention=kept)
    outputs = {name: ask(engine, name, PROMPT[:200], 10) for name in "ab"}
    finish(engine)
    for received in outputs.values():
        assert len(received) == 10
        assert received[-1].dropped_tokens == 0


def test_what_a_reader_cannot_compute_costs_its_sequence_nothing_but_the_cut(model: Any) -> None:
    engine = engine_of(model)
    outputs = ask(engine, "a", PROMPT, 10, 100, "reconstruct")
    forward = engine._runner.forward

    def failing(chunks: Any) -> torch.Tensor:
        if any(chunk.sequence.reads is not None for chunk in chunks):
            raise RuntimeError("no")
        return forward(chunks)

    engine._runner.forward = failing  # type: ignore[method-assign]
    finish(engine)
    assert len(outputs) == 10
    assert outputs[-1].dropped_tokens == 0


@pytest.mark.parametrize("policy", ["reconstruct", "window"])
def test_reading_a_sequence_again_is_no_reuse_of_its_prefix(model: Any, policy: str) -> None:
    engine = engine_of(model)
    ask(engine, "a", PROMPT, 10, 100, policy)
    until_cut(engine)
    finish(engine)
    counters = engine.snapshot(None, draining=False).counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (len(PROMPT), 0)
    assert (counters.prompt_tokens, counters.generated_tokens) == (len(PROMPT), 10)


@pytest.mark.parametrize("budget", [64, 100, 0.3, 1])
@pytest.mark.parametrize("policy", ["recency", "window"])
def test_outstanding_blocks_end_at_the_budget(model: Any, budget: float, policy: str) -> None:
    """What is held and what may still be asked for bounds what will be held, and a budget lowers it."""
    engine = engine_of(model, retention={"interval": 32})
    ask(engine, "a", PROMPT[:120], 250, budget, policy)
    held, foreseen, asked = [], [], []
    while not engine.idle:
        reading = engine.snapshot(None, draining=False)
        held.append(reading.blocks.active)
        asked.append(reading.outstanding_blocks)
        foreseen.append(reading.blocks.active + reading.outstanding_blocks)
        engine.step()
    whole = -(-(120 + 250) // 16)
    assert foreseen[0] == (whole if budget == 1 else min(whole, -(-max(120, _limit(budget) + 32) // 16)))
    readers = (
        4 if policy == "window" else 0
    )  # the tokens that are read again, and one block for cells that are not full
    for step, bound in enumerate(foreseen):
        assert max(held[step:]) <= bound + 1 + readers, step  # one for cells that are not full
    if budget != 1:
        assert max(asked[len(asked) // 2 :]) < whole // 2


def _limit(budget: float) -> float:
    return budget if budget > 1 else budget * (120 + 250)
