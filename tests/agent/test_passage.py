import math
import random

import pytest

from ullage_agent.passage import Spread, filled_by, time_of


def brownian(start: float, drift: float, variance: float, *, step: float = 1.0, forgetting: float = 0.0) -> Spread:
    """The distribution of a Brownian motion over a minute."""
    times = [index * step for index in range(round(60 / step) + 1)]
    return Spread(
        times=times,
        means=[start + drift * time for time in times],
        variances=[variance * time for time in times],
        forgetting=forgetting,
    )


@pytest.mark.parametrize("drift", [-0.5, 0.0, 0.5, 1.5])
def test_a_brownian_motion_passes_as_theory_says(drift: float) -> None:
    room, end, deviation = 50.0, 60.0, math.sqrt(25.0 * 60.0)
    below = lambda x: 0.5 * math.erfc(-x / math.sqrt(2.0))  # noqa: E731
    exact = below((drift * end - room) / deviation) + math.exp(2 * drift * room / 25.0) * below(
        (-drift * end - room) / deviation
    )
    chances = filled_by(brownian(50.0, drift, 25.0), 100.0)
    assert chances[-1] == pytest.approx(exact, abs=0.02)


def test_what_wavers_about_a_level_comes_to_the_brim_at_last() -> None:
    """Against a simulation of a process that forgets a tenth of its deviation each second: to first order, which is
    no less than the truth and at most a third more."""
    rng, forgetting, deviation, room, runs = random.Random(7), 0.1, 10.0, 22.0, 2000
    crossed = 0
    for _ in range(runs):
        value = 0.0
        for _ in range(600):
            pull = math.sqrt(1.0 - math.exp(-2 * forgetting * 0.1))
            value = value * math.exp(-forgetting * 0.1) + deviation * pull * rng.gauss(0.0, 1.0)
            if value > room:
                crossed += 1
                break
    times = [float(second) for second in range(61)]
    variances = [deviation**2 * (1.0 - math.exp(-2 * forgetting * time)) for time in times]
    spread = Spread(times=times, means=[0.0] * 61, variances=variances, forgetting=forgetting)
    assert 1.0 <= filled_by(spread, room)[-1] / (crossed / runs) <= 4 / 3


def test_a_full_pool_is_full_and_an_even_one_stays() -> None:
    assert filled_by(brownian(100.0, 0.0, 0.0), 100.0)[0] == 1.0
    assert filled_by(brownian(50.0, 0.0, 0.0), 100.0)[-1] == 0.0
    certain = filled_by(brownian(50.0, 1.0, 0.0), 100.0)
    assert (certain[49], certain[50]) == (0.0, 1.0)


def test_nearer_is_never_safer() -> None:
    last = [filled_by(brownian(start, 0.2, 9.0), 100.0)[-1] for start in range(0, 100, 5)]
    assert last == sorted(last)


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.0), (0.25, 5.0), (0.5, 10.0), (0.75, 20.0), (0.8, None)])
def test_time_of_a_chance(chance: float, expected: float | None) -> None:
    assert time_of(chance, (0.0, 10.0, 20.0), (0.0, 0.5, 0.75)) == expected
