"""Drafts for a step's sequences, and what became of them: the engine's side of speculation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft, Proposer
from ullage_engine.speculation.control import Costs, Pace

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SpeculationTally:
    """Totals since the start."""

    drafted_tokens: int = 0
    """Drafted tokens that were verified."""
    accepted_tokens: int = 0
    """Of those, tokens that stood."""


class Speculator:
    """Asks a proposer for as much as pays. Not thread-safe: the step loop alone touches it.

    Args:
        longest: most tokens drafted for a sequence in one step.
    """

    def __init__(self, proposer: Proposer, costs: Costs, *, longest: int) -> None:
        self._proposer = proposer
        self._costs = costs
        self._longest = longest
        self._paces: dict[Sequence, Pace] = {}
        self._broken = False
        self.tally = SpeculationTally()

    def propose(self, chunks: Iterable[Chunk]) -> Mapping[Sequence, Draft]:
        """Drafts for what is about to be computed; without effect on anything but the proposer."""
        chunks = list(chunks)
        rows = sum(chunk.count for chunk in chunks)
        attended = sum(chunk.count * chunk.sequence.kept_tokens for chunk in chunks)
        lengths = {chunk.sequence: self._length(chunk.sequence, rows, attended) for chunk in chunks}
        wanted = {sequence: length for sequence, length in lengths.items() if length > 0}
        if not wanted or self._broken:
            return {}
        try:
            return self._proposer.propose(wanted)
        except Exception:
            log.exception("drafting failed; the engine goes on without speculation")
            self._broken = True
            return {}

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Book a verified draft."""
        self.tally.drafted_tokens += drafted
        self.tally.accepted_tokens += accepted
        if sequence in self._paces:  # else it ended with this step
            self._paces[sequence].observe(drafted, accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._paces.pop(sequence, None)
        self._proposer.forget(sequence)

    def check_integrity(self) -> None:
        """See `Proposer.check_integrity`."""
        self._proposer.check_integrity()

    def _length(self, sequence: Sequence, rows: int, attended: float) -> int:
        if not sequence.request.speculation or not sequence.decoding:
            return 0
        pace = self._paces.setdefault(sequence, Pace())
        price = self._costs.price(rows, attended, sequence.kept_tokens)
        # the token that follows the draft is generated as well
        return min(pace.length(price, self._longest), sequence.remaining - 1)
