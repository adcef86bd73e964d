"""What the memory allocator of the engine shows of itself: its largest request, and whether its waste is usable.

A caching allocator keeps memory that it no longer uses, and hands it out again where a piece is large enough. Waste
(reserved less allocated) is therefore room, until the allocator is seen to reserve more though its waste was larger
than what it then took: the pieces are too small. The largest request is the greatest rise of allocated memory from one
reading to the next. Both are remembered for ten to twenty minutes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PERIOD_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the allocator may ask the device for. Bytes."""

    request: int = 0
    """The largest request seen."""
    waste: int = 0
    """Reserved and not allocated now, where that was not seen to be unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extremes:
    began_at: float
    request: int = 0
    scattered: bool = False


class AllocatorWatch:
    """Follows one engine process. `look` is its only operation."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._instance: str | None = None
        self._last: tuple[int, int] | None = None
        self._older: _Extremes | None = None
        self._newer = _Extremes(began_at=0.0)

    def look(self, at: float, instance: str, reserved: int | None, allocated: int | None) -> Need | None:
        """Take in a reading; None where the engine says nothing of its allocator, or for the first time."""
        if reserved is None or allocated is None:
            return None
        if instance != self._instance or at < self._newer.began_at:
            self._instance, self._last, self._older = instance, None, None
            self._newer = _Extremes(began_at=at)
        before, self._last = self._last, (reserved, allocated)
        if before is None:
            return None
        if at - self._newer.began_at >= self._period_s:
            self._older, self._newer = self._newer, _Extremes(began_at=at)
        self._newer = _widened(self._newer, before, (reserved, allocated))
        seen = [part for part in (self._older, self._newer) if part is not None]
        scattered = any(part.scattered for part in seen)
        return Need(request=max(part.request for part in seen), waste=0 if scattered else max(0, reserved - allocated))


def _widened(extremes: _Extremes, before: tuple[int, int], now: tuple[int, int]) -> _Extremes:
    taken, waste = now[0] - before[0], before[0] - before[1]
    return replace(
        extremes,
        request=max(extremes.request, now[1] - before[1]),
        scattered=extremes.scattered or 0 < taken <= waste,
    )
