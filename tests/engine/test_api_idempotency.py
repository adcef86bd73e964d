"""The store of answers by key, against a plain model of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.api.idempotency import AnswerStore, KeyReused, TooManyKeys

steps = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from("abcde"), st.sampled_from("xy"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 12)),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=200)
async def test_against_a_model(taken: list[tuple[Any, ...]]) -> None:
    now, acts = 0.0, 0
    store: AnswerStore[int] = AnswerStore(lambda: now, keep_s=10, max_keys=3)
    known: dict[str, tuple[str, int, float]] = {}
    for step in taken:
        if step[0] == "wait":
            now += step[1]
            continue
        _, key, fingerprint, fails = step
        known = {name: entry for name, entry in known.items() if entry[2] > now - 10}
        before = acts

        async def act(fails: bool = fails) -> int:
            nonlocal acts
            acts += 1
            if fails:
                raise ValueError
            return acts

        entry = known.get(key)
        if entry is None:
            if len(known) == 3:
                del known[next(iter(known))]
            if fails:
                with pytest.raises(ValueError):
                    await store.run(key, fingerprint, act)
            else:
                assert await store.run(key, fingerprint, act) == before + 1
                known[key] = (fingerprint, acts, now)
            assert acts == before + 1
        elif entry[0] != fingerprint:
            with pytest.raises(KeyReused):
                await store.run(key, fingerprint, act)
            assert acts == before
        else:
            assert await store.run(key, fingerprint, act) == entry[1]
            assert acts == before
        await asyncio.sleep(0)  # a failed act is forgotten in the next turn of the loop
        assert len(store) == len(known)


async def test_acts_under_way_are_never_forgotten() -> None:
    now = 0.0
    store: AnswerStore[str] = AnswerStore(lambda: now, keep_s=10, max_keys=2)
    go_on = asyncio.Event()

    async def slow() -> str:
        await go_on.wait()
        return "done"

    calls = [asyncio.ensure_future(store.run(key, "x", slow)) for key in "ab"]
    await asyncio.sleep(0)
    now = 100.0
    with pytest.raises(TooManyKeys):
        await store.run("c", "x", slow)
    waiter = asyncio.ensure_future(store.run("a", "x", slow))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*calls, waiter) == ["done"] * 3
    assert await store.run("c", "x", slow) == "done"


async def test_a_caller_that_leaves_does_not_cancel_the_act() -> None:
    store: AnswerStore[str] = AnswerStore(lambda: 0.0)
    go_on = asyncio.Event()

    async def slow() -> str:
        await go_on.wait()
        return "done"

    async def never() -> str:
        raise AssertionError("must not act again")

    call = asyncio.ensure_future(store.run("a", "x", slow))
    await asyncio.sleep(0)
    call.cancel()
    go_on.set()
    assert await store.run("a", "x", never) == "done"
