"""Cumulative histograms of Prometheus: differences over time, quantiles, and the share above a value. Pure.

Non-goals: native histograms, and quantiles finer than the buckets allow (a straight line within each).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

Buckets = tuple[tuple[float, float], ...]
"""Upper bound and cumulative count, ascending; the last bound is +Inf."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts since the engine started, or between two readings of it."""

    buckets: Buckets

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    def since(self, older: Histogram | None) -> Histogram:
        """What was observed since `older`; everything where `older` is of other buckets, or counted more."""
        if older is None or [le for le, _ in older.buckets] != [le for le, _ in self.buckets]:
            return self
        pairs = tuple((le, now - then) for (le, now), (_, then) in zip(self.buckets, older.buckets, strict=True))
        return self if any(count < 0 for _, count in pairs) else Histogram(pairs)

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of the observations lie; the last finite bound at most. None when empty."""
        if not self.count:
            return None
        target, low, below = share * self.count, 0.0, 0.0
        for bound, count in self.buckets:
            if count >= target and count > below:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * max(0.0, target - below) / (count - below)
            if math.isfinite(bound):
                low = bound
            below = count
        return low

    def share_above(self, value: float) -> float:
        """Share of the observations that are greater than `value`; 0 when empty."""
        if not self.count:
            return 0.0
        low, below = 0.0, 0.0
        for bound, count in self.buckets:
            if value < bound:
                inside = 0.0 if math.isinf(bound) else (count - below) * max(0.0, value - low) / (bound - low)
                return 1.0 - (below + inside) / self.count
            low, below = bound, count
        return 0.0

    def mean(self) -> float | None:
        """Mean with every observation in the middle of its bucket; beyond the last finite bound, 1.5 times it."""
        return self._moment(1)

    def deviation(self) -> float | None:
        """Standard deviation, observations placed as for the mean."""
        mean, square = self._moment(1), self._moment(2)
        return None if mean is None or square is None else math.sqrt(max(0.0, square - mean * mean))

    def _moment(self, power: int) -> float | None:
        if not self.count:
            return None
        total, low, below = 0.0, 0.0, 0.0
        for bound, count in self.buckets:
            middle = low * 1.5 if math.isinf(bound) else (low + bound) / 2
            total += (count - below) * middle**power
            low, below = bound, count
        return total / self.count


def from_cumulative(pairs: Iterable[tuple[float, float]]) -> Histogram | None:
    """A histogram from pairs in any order; None where they are no cumulative histogram."""
    buckets = tuple(sorted(pairs))
    counts = [count for _, count in buckets]
    ascending = all(low <= high for low, high in pairwise(counts))
    bounds = {bound for bound, _ in buckets}
    sane = all(math.isfinite(count) and count >= 0 for count in counts) and not any(map(math.isnan, bounds))
    if not buckets or not sane or not ascending or not math.isinf(buckets[-1][0]) or len(bounds) != len(buckets):
        return None
    return Histogram(buckets)


def add(parts: Iterable[Histogram]) -> Histogram | None:
    """Sum of histograms of the same buckets; None when there are none, or they differ."""
    found = list(parts)
    if not found or len({tuple(le for le, _ in part.buckets) for part in found}) != 1:
        return None
    columns = zip(*(part.buckets for part in found), strict=True)
    return Histogram(tuple((column[0][0], sum(count for _, count in column)) for column in columns))
