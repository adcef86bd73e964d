"""The pool's books and the prefix index, alone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ullage_engine.errors import PoolExhausted
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex

SIZE = 4


def make(total: int = 8, **kwargs: object) -> BlockPool:
    return BlockPool(total, SIZE, PrefixIndex("salt", SIZE, **kwargs))  # type: ignore[arg-type]


def publish(pool: BlockPool, tokens: tuple[int, ...]) -> list[int]:
    """Hold and publish the blocks of `tokens`."""
    blocks = pool.allocate(len(tokens) // SIZE)
    parent = None
    for i, block in enumerate(blocks):
        pool.set_filled(block, SIZE)
        parent = pool.publish(parent, tokens[i * SIZE : (i + 1) * SIZE], block)
    return blocks


def test_exhaustion_changes_nothing() -> None:
    pool = make(4)
    held = pool.allocate(3)
    with pytest.raises(PoolExhausted, match="2 blocks wanted, 1 available of 4"):
        pool.allocate(2)
    pool.check_integrity([held])
    assert pool.free == 1


def test_live_cached_and_free_are_told_apart() -> None:
    pool = make(4)
    held = publish(pool, tuple(range(8)))
    assert (pool.active, pool.cached, pool.free) == (2, 0, 2)
    assert pool.release(held) == 0
    assert (pool.active, pool.cached, pool.free, pool.available) == (0, 2, 2, 4)
    assert pool.usage().slots_filled == 0


def test_reused_block_is_not_found_under_its_old_content() -> None:
    pool = make(2)
    held = publish(pool, tuple(range(8)))
    pool.release(held)
    again = pool.allocate(2)
    assert set(again) == set(held)
    assert pool.match(tuple(range(8))) == []
    pool.check_integrity([again])


def test_tail_of_a_chain_is_reclaimed_before_its_head() -> None:
    pool = make(3)
    held = publish(pool, tuple(range(12)))
    pool.release(held)
    pool.allocate(1)
    assert [entry.block for entry in pool.match(tuple(range(12)))] == held[:2]


def test_constant_hash_never_serves_another_prompt() -> None:
    pool = make(8, hasher=lambda data: b"same")
    first = publish(pool, (1, 2, 3, 4, 5, 6, 7, 8))
    assert pool.match((9, 9, 9, 9)) == []
    assert pool.match((5, 6, 7, 8)) == []
    assert [entry.block for entry in pool.match((1, 2, 3, 4))] == first[:1]
    other = publish(pool, (9, 9, 9, 9))
    assert pool.match((9, 9, 9, 9)) == []
    pool.check_integrity([first, other])


def test_same_block_after_another_prefix_is_another_block() -> None:
    pool = make()
    a = publish(pool, (1, 1, 1, 1, 7, 7, 7, 7))
    b = publish(pool, (2, 2, 2, 2, 7, 7, 7, 7))
    assert [entry.block for entry in pool.match((2, 2, 2, 2, 7, 7, 7, 7))] == b
    pool.check_integrity([a, b])


def test_salt_separates_models_and_tenants() -> None:
    one, other = PrefixIndex("model-a", SIZE), PrefixIndex("model-b", SIZE)
    entry = one.publish(None, (1, 2, 3, 4), 0, 1)
    assert entry is not None
    assert other.publish(None, (1, 2, 3, 4), 0, 1).digest != entry.digest  # type: ignore[union-attr]


@pytest.mark.parametrize("hasher", [None, lambda data: b"same"], ids=["good hash", "constant hash"])
def test_tenants_never_share_a_block(hasher: object) -> None:
    pool = make(8, **({"hasher": hasher} if hasher else {}))
    [block] = pool.allocate(1)
    pool.set_filled(block, SIZE)
    pool.publish(None, (1, 2, 3, 4), block, "a")
    assert pool.match((1, 2, 3, 4), "b") == []
    assert pool.match((1, 2, 3, 4)) == []
    assert [entry.block for entry in pool.match((1, 2, 3, 4), "a")] == [block]


def test_withdrawing_a_head_frees_what_only_it_leads_to() -> None:
    pool = make()
    held = publish(pool, tuple(range(12)))
    pool.release(held[1:])
    assert pool.cached == 2
    assert pool.withdraw(held[0]) == 2
    pool.check_integrity([held[:1]])
    assert pool.match(tuple(range(12))) == []


def test_largest_free_run() -> None:
    pool = make(6)
    held = pool.allocate(6)
    assert pool.largest_free_run() == 0
    pool.release([held[0], held[2], held[3], held[5]])
    assert pool.largest_free_run() == 2


class PoolMachine(RuleBasedStateMachine):
    """Random owners over a small alphabet, so that prefixes meet often."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = make(10)
        self.held: list[list[int]] = []

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE))
    def start(self, tokens: list[int]) -> list[int]:
        entries = self.pool.match(tokens)
        missing = -(-len(tokens) // SIZE) - len(entries)
        if missing > self.pool.available - self.pool.idle(entries):
            return []
        table = self.pool.share(entries)
        table += self.pool.allocate(missing)
        parent = entries[-1] if entries else None
        for i in range(len(entries), len(table)):
            part = tuple(tokens[i * SIZE : (i + 1) * SIZE])
            self.pool.set_filled(table[i], len(part))
            if len(part) == SIZE:
                parent = self.pool.publish(parent, part, table[i])
                if parent is None:
                    break
        self.held.append(table)
        return table

    @rule(table=consumes(tables))
    def stop(self, table: list[int]) -> None:
        if table:
            self.held = [other for other in self.held if other is not table]
            self.pool.release(table)

    @rule(count=st.integers(0, 12))
    def reclaim(self, count: int) -> None:
        before = self.pool.cached
        assert self.pool.reclaim(count).freed >= min(count, before)

    @rule(table=tables)
    def withdraw(self, table: list[int]) -> None:
        if table and any(other is table for other in self.held):
            self.pool.withdraw(table[0])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.held)

    def teardown(self) -> None:
        for table in self.held:
            self.pool.release(table)
        assert self.pool.active == 0


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
