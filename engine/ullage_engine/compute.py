"""Forward passes over what was planned: what fails is repeated in smaller parts, so that only its own request ends.

Non-goals: what follows from the logits (`engine`) and steps that run ahead (`ahead`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import torch

from ullage_engine.budgets import Store
from ullage_engine.decode_graphs import Flight
from ullage_engine.sampler import Row, rows_of
from ullage_engine.scheduler import Chunk, Scheduler
from ullage_engine.sequence import Sequence

log = logging.getLogger(__name__)


class Runner(Store, Protocol):
    """The model as the engine sees it: `runner.ModelRunner`, or `fake_runner.FakeRunner` in tests."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def allocator_bytes(self) -> tuple[int, int]:
        """Bytes that the allocator has reserved and, of those, handed out."""
        ...

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Write the chunks' keys and values; logits [n, V] float32: in order, for each chunk that completes, a row of
        its last token and one of each drafted token.

        May raise anything: repeating the call with fewer chunks must be safe.
        """
        ...

    def launch(self, chunks: list[Chunk], ahead_of: Flight | None = None) -> Flight | None:
        """See `ahead.Launcher`."""
        ...

    def copy_blocks(self, copies: dict[int, int]) -> None:
        """Copy whole blocks, source by target; all sources are read before any target is written."""
        ...

    def erase(self, slots: list[int]) -> None:
        """Zero single tokens whose content may be unfit to lie beside others."""
        ...

    def scrub(self, blocks: list[int], cells: list[int]) -> None:
        """Zero blocks and cells (ids) whose content may be unfit for others."""
        ...


class Compute:
    """The model, over chunks that may fail.

    Args:
        fail: ends a request that can't be computed, with what to tell it.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, fail: Callable[[Sequence, str], None]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._fail = fail

    def forward(self, chunks: list[Chunk]) -> list[tuple[Chunk, list[Row]]]:
        """Chunks computed, each with its rows of logits (none for those that don't complete).

        A pass that raises is repeated chunk by chunk, and at last without a draft, so that only the request that can't
        be computed fails: writing the same keys and values to the same slots again does no harm.
        """
        if not chunks:
            return []
        try:
            rows = iter(rows_of(self._runner.forward(chunks)))
        except Exception as error:
            if len(chunks) > 1:
                return [pair for chunk in chunks for pair in self.forward([chunk])]
            if chunks[0].draft.tokens:
                return self.forward([self._without_draft(chunks[0])])
            log.exception("request %s failed in the model", chunks[0].sequence.request_id)
            self._fail(chunks[0].sequence, f"the model failed on this request: {type(error).__name__}")
            return []
        counts = [1 + len(chunk.draft.tokens) if chunk.completes else 0 for chunk in chunks]
        return [self._sound(chunk, list(islice(rows, count))) for chunk, count in zip(chunks, counts, strict=True)]

    def _sound(self, chunk: Chunk, rows: list[Row]) -> tuple[Chunk, list[Row]]:
        """The chunk and its rows, without a draft that the model has no finite answer to."""
        if all(row.finite for row in rows[1:]):
            return chunk, rows
        self._runner.erase(chunk.sequence.slots(chunk.width)[chunk.count :])
        return self._without_draft(chunk), rows[:1]

    def _without_draft(self, chunk: Chunk) -> Chunk:
        self._scheduler.trim(chunk.sequence, chunk.count)
        return Chunk(chunk.sequence, chunk.count)
