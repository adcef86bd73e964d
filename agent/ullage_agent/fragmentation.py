"""Three fragmentation figures of one snapshot, kept apart because their causes and remedies differ.

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
