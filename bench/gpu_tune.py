"""Which tile is fastest for attention on this GPU: candidates in turn, and the lines for `kernels/tuning.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpu_speed import Speeds
from gpu_sums import HEAD_SIZE, HEADS, KV_HEADS, Budget, DecodeCase

from ullage_engine.kernels import tuning
from ullage_engine.kernels.targets import Target
from ullage_engine.kernels.tuning import Key, Tile

DECODE = (32, 8192)
PREFILL = (6144, 2048)
REPEAT = HEADS // KV_HEADS
WORTHWHILE = 0.98
"""A tile replaces the rule's where it takes at most so much of its time; less is what two runs differ by."""


def fastest(
    key: Key, tiles: Iterable[Tile], measure: Callable[[], float], allowed: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Each tile with its time in microseconds, None where it can't run here; the table is left as it was."""
    before = tuning.MEASURED.get(key)
    rows = []
    for tile in tiles:
        if not allowed(f"{key.kind}, {tile}"):
            break
        tuning.MEASURED[key] = tile
        try:
            time: float | None = measure()
        except Exception as error:  # noqa: BLE001 - too much shared memory, say: not for this GPU
            print(f"  {tile}: {type(error).__name__}")
            time = None
        rows.append(
            {"queries": tile.queries, "rows": tile.rows, "warps": tile.warps, "stages": tile.stages, "us": time}
        )
    if before is None:
        tuning.MEASURED.pop(key, None)
    else:
        tuning.MEASURED[key] = before
    return rows


def worth_checking_in(rows: list[dict[str, Any]]) -> Tile | None:
    """The fastest tile, if it beats the first one, which is the rule's, by more than noise."""
    if not rows or rows[0]["us"] is None:
        return None
    best = min((row for row in rows if row["us"] is not None), key=lambda row: float(row["us"]))
    if best["us"] > rows[0]["us"] * WORTHWHILE:
        return None
    return Tile(best["queries"], best["rows"], best["warps"], best["stages"])


def tune(speeds: Speeds, target: Target, kinds: Iterable[str], budget: Budget) -> dict[Key, Tile]:
    """Tiles to check in for decode and prefill with each cache type."""
    found: dict[Key, Tile] = {}
    for kind in kinds:
        works: list[tuple[str, int, Callable[[], float]]] = [
            ("decode", REPEAT, lambda kind=kind: speeds.decode(DecodeCase(kind, *DECODE), 1.0)["us"]),
            ("prefill", REPEAT * PREFILL[1], lambda kind=kind: speeds.prefill(kind, *PREFILL)["us"]),
        ]
        for name, queries, measure in works:
            key = tuning.key_of(target, kind, HEAD_SIZE, queries)
            rule = tuning.by_rule(target, kind, key.columns, queries)
            rows = fastest(key, tuning.candidates(rule), measure, lambda what: budget.allows(what, 8))
            best = worth_checking_in(rows)
            if best is not None:
                found[key] = best
            print(
                f"{name} {kind}: rule {rows[0]['us'] if rows else None}, {len(rows)} tried, best {best or 'the rule'}"
            )
    return found


def lines(found: dict[Key, Tile]) -> list[str]:
    """Python to put into `MEASURED`."""
    return [f"    {key!r}: {tile!r}," for key, tile in found.items()]
