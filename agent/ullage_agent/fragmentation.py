"""Three fragmentation figures of one snapshot, kept apart because their causes and remedies differ.

`unusable` is of another kind: what the classic risk term takes for external fragmentation, over all that can be handed
out (docs/adr/0003).

Pure. A figure whose inputs the engine cannot say is None. No blending: a single "fragmentation" number would
hide which of the three to act on.
"""

from __future__ import annotations

from ullage_agent.wire import Fragmentation, Snapshot


def fragmentation(snapshot: Snapshot) -> Fragmentation:
    """The three figures, each within 0..1."""
    return Fragmentation(
        external=_external(snapshot.free_blocks, snapshot.largest_free_run_blocks),
        internal=_waste(snapshot.filled_slots, snapshot.allocated_slots),
        allocator=_waste(snapshot.allocator_allocated_bytes, snapshot.allocator_reserved_bytes),
    )


def unusable(snapshot: Snapshot) -> float | None:
    """Share of the available (free and reclaimable) blocks that one allocation can't have, 1.0 when there are none.

    An engine that does not say how much that is still tells it while nothing is reclaimable: the longest free run.
    """
    free, cached = snapshot.free_blocks, snapshot.reclaimable_blocks
    largest = snapshot.largest_allocation_blocks
    if largest is None and cached == 0:
        largest = snapshot.largest_free_run_blocks
    if free is None or cached is None or largest is None:
        return None
    return _unit(1.0 - largest / (free + cached)) if free + cached else 1.0


def _external(free: int | None, largest_run: int | None) -> float | None:
    if free is None or largest_run is None:
        return None  # engines that tell no runs page without regard to them
    if free == 0:
        return 1.0  # by definition: nothing can be handed out, so no run is long enough
    return _unit(1.0 - largest_run / free)


def _waste(used: int | None, held: int | None) -> float | None:
    if held == 0:
        return 0.0
    if used is None or held is None:
        return None
    return _unit(1.0 - used / held)


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))
