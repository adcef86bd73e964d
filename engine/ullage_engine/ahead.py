"""One step ahead: the device begins a decode step before anybody has seen the tokens of the one before.

Between two steps a device would wait for the host to read tokens, book them and plan. Where the next step is certain
whatever those tokens are (`Scheduler.plan_ahead`), it is launched first and the tokens are read while it runs. What
the tokens change is found a step late: a sequence that has ended computed one row too many, into a block of its own
that is released when the step before is booked; whoever gets the block writes to it after that row, because a device
works in order. Its result is dropped. Nothing is booked, published or emitted before its tokens are known, so answers
are those of the synchronous loop.

Only the likeliest token is chosen on the device, so a step with a sequence that draws is not run ahead; nor is one with
a sequence that holds cells, which recorded steps do not read.
"""

from __future__ import annotations

import logging
import math
from typing import Protocol

import torch

from ullage_engine.decode_graphs import NO_TOKEN, Flight
from ullage_engine.sampler import Row
from ullage_engine.scheduler import Chunk, Scheduler

log = logging.getLogger(__name__)

NO_LOGITS = torch.empty(0)


class Launcher(Protocol):
    """A runner that can begin a decode step without waiting for it."""

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None) -> Flight | None:
        """Begin a step of one token a sequence, its tokens chosen on the device.

        Args:
            ahead_of: the step launched last, if it is not booked yet: the tokens it chooses are computed here.

        Returns:
            None: this runner can't, and nothing was done.
        """
        ...


class RunAhead:
    """The step in the air, if there is one."""

    def __init__(self, runner: Launcher, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._flight: Flight | None = None

    def flying(self) -> list[Chunk]:
        """Chunks in the air whose sequences still run; a step without any is forgotten."""
        if self._flight is None:
            return []
        running = set(map(id, self._scheduler.running))
        chunks = [chunk for chunk in self._flight.chunks if id(chunk.sequence) in running]
        if not chunks:
            self._flight = None
        return chunks

    def results(self, chunks: list[Chunk]) -> list[tuple[Chunk, list[Row]]] | None:
        """Each chunk with its row, after the step that follows was launched too, where it could.

        Args:
            chunks: what `flying` gave, or a planned step to launch now.

        Returns:
            None: they are to be computed the ordinary way.
        """
        flight = self._flight or self._launch(chunks, None)
        if flight is None:
            return None
        self._flight = self._launch(self._scheduler.plan_ahead(chunks), flight)
        try:
            tokens = flight.tokens()
        except Exception:
            log.exception("a decode step failed after its launch; it is computed again")
            self._flight = None
            return None
        return [(chunk, [_row(tokens[flight.rows[id(chunk.sequence)]])]) for chunk in chunks]

    def _launch(self, chunks: list[Chunk], ahead_of: Flight | None) -> Flight | None:
        """The chunks in the air; None where they can't be: the ordinary way tells which of them fails."""
        if not chunks or not all(_can_fly(chunk) for chunk in chunks):
            return None
        try:
            return self._runner.launch(chunks, ahead_of)
        except Exception:
            log.exception("a decode step could not be launched")
            return None


def _can_fly(chunk: Chunk) -> bool:
    sampling, sequence = chunk.sequence.request.sampling, chunk.sequence
    likeliest = sampling.temperature == 0 and sampling.logprobs is None
    return sequence.decoding and chunk.width == 1 and likeliest and sequence.cells is None


def _row(token: int) -> Row:
    return Row(NO_LOGITS, math.nan if token == NO_TOKEN else 0.0, token)
