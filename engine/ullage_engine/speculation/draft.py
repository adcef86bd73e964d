"""Drafts by a second, smaller model of the same vocabulary, with a KV cache of its own.

Each sequence has a *shadow*: its tokens as far as the draft model has seen them, and its own blocks. A call brings the
shadows up to date (what was rejected is rolled back, what was committed since is computed), then extends all of them
together, one token a pass. Shadows share no blocks; one that finds no block, or that has much to catch up with, drafts
nothing this time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional

from ullage_engine.pool import BlockPool
from ullage_engine.request import TokenOutput
from ullage_engine.sampler import Row, distribution, draw, rows_of
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft


class DraftRunner(Protocol):
    """The draft model: `runner.ModelRunner` over the draft's own block store."""

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Write the chunks' keys and values; logits [n, V] of the last token of each chunk that completes."""
        ...


@dataclass(slots=True)
class _Shadow:
    """What the draft model knows of one sequence."""

    state: Sequence
    """Its tokens and blocks here; nobody receives what it generates."""
    agreed: int = 0
    """Tokens that are the sequence's own; those after them were drafted."""


@dataclass(slots=True)
class _Drafting:
    """One sequence's draft as it grows."""

    shadow: Sequence
    wanted: int
    generator: torch.Generator | None
    """None for greedy requests."""
    keeps_odds: bool
    """Whether the draft tells what its tokens were drawn from."""
    odds: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Implements `base.Proposer`.

    Args:
        pool: blocks of the draft's own store.
        vocabulary: width V of the target's logits; the draft's are cut or filled up to it.
        budget: most tokens computed in one pass.
    """

    def __init__(self, runner: DraftRunner, pool: BlockPool, *, vocabulary: int, budget: int) -> None:
        self._runner = runner
        self._pool = pool
        self._vocabulary = vocabulary
        self._budget = budget
        self._shadows: dict[Sequence, _Shadow] = {}
        self._random = torch.Generator()
        self._random.seed()

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        growing = {}
        left = self._budget
        for sequence, count in wanted.items():
            shadow = self._up_to_date(sequence)
            behind = len(shadow.tokens) - shadow.computed
            if left > 0 and self._make_room(shadow, behind + count):
                growing[sequence] = self._drafting(sequence, shadow, count)
                left -= behind
        self._grow(growing.values())
        return {sequence: _draft(one) for sequence, one in growing.items() if one.tokens}

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None:
            self._pool.release(shadow.state.table)

    def check_integrity(self) -> None:
        """See `BlockPool.check_integrity`."""
        self._pool.check_integrity(shadow.state.table for shadow in self._shadows.values())

    # -- shadows -------------------------------------------------------------------------------------------------

    def _up_to_date(self, sequence: Sequence) -> Sequence:
        """The shadow's state with the sequence's tokens, computed as far as both agree."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            state = Sequence(sequence.request, _nobody, sequence.arrival, [], self._pool.block_tokens)
            shadow = self._shadows[sequence] = _Shadow(state)
        state, same = shadow.state, shadow.agreed
        while same < min(len(state.tokens), len(sequence.tokens)) and state.tokens[same] == sequence.tokens[same]:
            same += 1
        state.tokens[same:] = sequence.tokens[same:]
        shadow.agreed = len(state.tokens)
        state.computed = min(state.computed, same, len(state.tokens) - 1)
        self._pool.release(state.drop_tail(0))
        return state

    def _make_room(self, shadow: Sequence, count: int) -> bool:
        missing = -(-(shadow.computed + count) // shadow.block_tokens) - len(shadow.table)
        if missing > self._pool.available:
            return False
        shadow.append_blocks(self._pool.allocate(max(0, missing)))
        return True

    def _drafting(self, sequence: Sequence, shadow: Sequence, count: int) -> _Drafting:
        """Seeded requests draft with a copy of their own generator, so that equal models draw equal tokens."""
        sampling = sequence.request.sampling
        if sampling.temperature == 0 or sequence.generator is None:
            return _Drafting(shadow, count, None, keeps_odds=False)
        if sampling.seed is None:
            return _Drafting(shadow, count, self._random, keeps_odds=True)
        return _Drafting(shadow, count, sequence.generator.clone_state(), keeps_odds=False)

    # -- drafting ------------------------------------------------------------------------------------------------

    def _grow(self, growing: Iterable[_Drafting]) -> None:
        """One token a pass for all; those whose shadow is not caught up yet compute on and get none."""
        active = list(growing)
        while active:
            chunks = self._chunks(active)
            rows = iter(rows_of(self._fitted(self._runner.forward(chunks))))
            ready = [one for one, chunk in zip(active, chunks, strict=False) if chunk.completes]
            for chunk in chunks:
                chunk.sequence.computed += chunk.count
            for one, row in zip(ready, rows, strict=True):
                self._extend(one, row)
            active = [one for one in ready if len(one.tokens) < one.wanted]

    def _chunks(self, active: list[_Drafting]) -> list[Chunk]:
        chunks, left = [], self._budget
        for one in active:
            count = min(left, len(one.shadow.tokens) - one.shadow.computed)
            if count == 0:
                break
            chunks.append(Chunk(one.shadow, count))
            left -= count
        return chunks

    def _extend(self, one: _Drafting, row: Row) -> None:
        if not row.finite:
            one.wanted = len(one.tokens)
            return
        token = row.likeliest
        if one.generator is not None:
            odds = distribution(row.logits, one.shadow.request.sampling)
            token = draw(odds, one.generator)
            if one.keeps_odds:
                one.odds.append(odds)
        one.tokens.append(token)
        one.shadow.tokens.append(token)

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as wide as the target's: padding of a vocabulary is never drafted."""
        missing = max(0, self._vocabulary - logits.shape[-1])
        return functional.pad(logits[:, : self._vocabulary], (0, missing), value=float("-inf"))


def _draft(one: _Drafting) -> Draft:
    return Draft(tuple(one.tokens), torch.stack(one.odds) if one.odds else None)


def _nobody(output: TokenOutput) -> None:
    """Shadows have no receiver."""
