import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.calibration import CALIBRATION, LEVEL, WEIGHT, calibrated

shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("chance", "share", "expected"),
    [
        (0.0, 1.0, 0.0),  # what the model rules out
        (1.0, 0.0, 1.0),  # and what has happened
        (0.5, LEVEL, 0.48),  # no evidence either way
        (1.0 / (1.0 + math.exp(-2.15)), LEVEL, 0.72),
        (0.5, LEVEL + 2.15 / WEIGHT, 0.72),  # as near the brim as the model is sure
    ],
)
def test_calibrated_chances(chance: float, share: float, expected: float) -> None:
    assert calibrated(chance, share) == pytest.approx(expected)


def test_the_same_odds_count_for_more_near_the_brim() -> None:
    assert calibrated(0.6, 0.5) < 0.4 < 0.7 < calibrated(0.6, 0.95)


@given(shares, shares, shares, shares)
def test_more_of_either_is_never_less_likely(chance: float, other: float, share: float, more: float) -> None:
    low, high = calibrated(min(chance, other), min(share, more)), calibrated(max(chance, other), max(share, more))
    assert 0.0 <= low <= high <= 1.0


def test_the_curve_is_a_distribution() -> None:
    evidence, chances = zip(*CALIBRATION, strict=True)
    assert list(evidence) == sorted(set(evidence))
    assert list(chances) == sorted(set(chances))
    assert (chances[0], chances[-1]) == (0.0, 1.0)
