import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.fragmentation import fragmentation
from ullage_agent.wire import Snapshot


@pytest.mark.parametrize(
    ("free", "run", "expected"),
    [(0, 0, 1.0), (0, None, None), (10, 10, 0.0), (10, 4, 0.6), (10, None, None), (None, 4, None)],
)
def test_external(free: int | None, run: int | None, expected: float | None) -> None:
    figures = fragmentation(Snapshot(sampled_at=0, free_blocks=free, largest_free_run_blocks=run))
    assert figures.external == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("filled", "allocated", "expected"),
    [(0, 0, 0.0), (None, 0, 0.0), (3000, 3200, 0.0625), (0, 16, 1.0), (None, 16, None), (5, None, None)],
)
def test_internal_and_allocator_are_waste(filled: int | None, allocated: int | None, expected: float | None) -> None:
    figures = fragmentation(
        Snapshot(
            sampled_at=0,
            filled_slots=filled,
            allocated_slots=allocated,
            allocator_allocated_bytes=filled,
            allocator_reserved_bytes=allocated,
        )
    )
    assert figures.internal == figures.allocator == expected
    assert figures.external is None


maybe = st.none() | st.integers(0, 2**53)


@given(maybe, maybe, maybe, maybe)
def test_always_within_unit_interval(
    free: int | None, run: int | None, filled: int | None, allocated: int | None
) -> None:
    figures = fragmentation(
        Snapshot(
            sampled_at=0,
            free_blocks=free,
            largest_free_run_blocks=run,
            filled_slots=filled,
            allocated_slots=allocated,
        )
    )
    for figure in (figures.external, figures.internal):
        assert figure is None or 0.0 <= figure <= 1.0
