"""What proposes drafts, as a contract. Non-goals: how many to ask for (`control`), what becomes of them (`accept`)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch

from ullage_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence."""

    tokens: tuple[int, ...] = ()
    probabilities: torch.Tensor | None = None
    """[len(tokens), V] float64: what each token was drawn from, given those before it; None: each was certain."""

    @property
    def odds(self) -> Items[torch.Tensor | None]:
        """`probabilities` by token."""
        return (None,) * len(self.tokens) if self.probabilities is None else tuple(self.probabilities)

    def first(self, count: int) -> Draft:
        """The draft cut to `count` tokens."""
        probabilities = None if self.probabilities is None else self.probabilities[:count]
        return Draft(self.tokens[:count], probabilities)


class Proposer(Protocol):
    """A source of drafts. Called in the step loop's thread, between planning a step and computing it."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        """Drafts of at most so many tokens for sequences that await the computation of their newest token only.

        Sequences for which nothing comes to mind are left out. Must not change the sequences nor draw from their
        generators, and should not raise.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; unknown ones are ignored."""
        ...

    def check_integrity(self) -> None:
        """Hold the proposer's own books against each other.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        ...
