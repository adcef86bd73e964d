from ullage_agent.allocator import PERIOD_S, AllocatorWatch, Need

MIB = 1 << 20


def watch(*pairs: tuple[int, int], step: float = 1.0) -> Need | None:
    """Reserved and allocated MiB, a reading each `step` seconds; what follows from the last."""
    watched, found = AllocatorWatch(), None
    for index, (reserved, allocated) in enumerate(pairs):
        found = watched.look(index * step, "a", reserved * MIB, allocated * MIB)
    return found


def test_the_largest_request_is_the_greatest_rise() -> None:
    assert watch((100, 80)) is None
    assert watch((100, 80), (100, 95), (100, 60), (100, 70)) == Need(request=15 * MIB, waste=30 * MIB)


def test_waste_is_room_while_requests_are_served_from_it() -> None:
    assert watch((100, 50), (100, 90)) == Need(request=40 * MIB, waste=10 * MIB)


def test_waste_in_pieces_too_small_is_no_room() -> None:
    """50 MiB lay idle, and yet 20 more were reserved."""
    assert watch((100, 50), (120, 70), (120, 70)) == Need(request=20 * MIB, waste=0)


def test_growth_beyond_the_waste_says_nothing_of_it() -> None:
    assert watch((100, 95), (140, 130)) == Need(request=35 * MIB, waste=10 * MIB)


def test_what_was_seen_is_forgotten_after_two_periods() -> None:
    calm = [(120, 70)] * 3
    assert watch((100, 50), (120, 70), *calm, step=PERIOD_S) == Need(request=0, waste=50 * MIB)


def test_another_process_starts_anew() -> None:
    watched = AllocatorWatch()
    watched.look(0.0, "a", 100 * MIB, 50 * MIB)
    watched.look(1.0, "a", 120 * MIB, 70 * MIB)
    assert watched.look(2.0, "b", 10 * MIB, 10 * MIB) is None
    assert watched.look(3.0, "b", 10 * MIB, 8 * MIB) == Need(request=0, waste=2 * MIB)


def test_an_engine_that_says_nothing_has_no_need() -> None:
    assert AllocatorWatch().look(0.0, "a", None, 5) is None
