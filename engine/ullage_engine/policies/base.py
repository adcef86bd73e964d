"""What an eviction policy is, and what it gets to see of a sequence.

A policy only ranks: it reads, and gives every row of every head a score. How many rows stay is `select`'s business,
which of them may go at all is the caller's, and memory is touched by neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

import torch

Mode = Literal["square", "sum", "entropy"]
"""One number of a row's probabilities p under several queries.

The sum of p squared, of p, or of -p log p, averaged over the query heads of its KV head.
"""


class Needs(Enum):
    """What must have been observed of a sequence before a policy can score it."""

    NOTHING = "nothing"
    QUERIES = "queries"
    """The sequence's last queries, which the model's attention has seen."""
    REREADING = "rereading"
    """A second pass over the sequence's tokens (`reread`)."""


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """The last queries of a sequence in one layer."""

    vectors: torch.Tensor
    """[W, Hq, D] after RoPE."""
    positions: torch.Tensor
    """[W] int64."""


class SequenceView(Protocol):
    """One sequence's rows in the cache. R rows for each head; where a head has fewer, `exists` is False for the rest.

    Keys, values and attention come layer by layer, so that no more than one layer is dequantised at a time.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[L, H, R] int: true position of each row; meaningless where none exists."""
        ...

    @property
    def exists(self) -> torch.Tensor:
        """[L, H, R] bool."""
        ...

    @property
    def length(self) -> int:
        """Position of the sequence's next token."""
        ...

    def keys(self, layer: int) -> torch.Tensor:
        """[H, R, D] float32 after RoPE; finite everywhere."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """[H, R, D] float32; finite everywhere."""
        ...

    def queries(self, layer: int) -> Queries:
        """What was observed; policies that need it are only asked where something was."""
        ...

    def attention(self, layer: int, mode: Mode) -> torch.Tensor:
        """[H, R] of the observed queries' attention to each row.

        Probabilities are over all that a query saw. `kernels.key_scores` computes it, as does `mass.attention`.
        """
        ...

    def reread(self, layer: int) -> torch.Tensor:
        """[H, R]: squared attention that a re-reading paid to each row (`reread.Rereading`)."""
        ...

    def frequencies(self, layer: int) -> torch.Tensor | None:
        """[D / 2] or fewer radians per token by which RoPE turns pairs (i, i + width / 2); None: unknown."""
        ...


class Policy(Protocol):
    """Ranks a sequence's rows."""

    @property
    def name(self) -> str:
        """As in options and requests."""
        ...

    @property
    def needs(self) -> Needs: ...

    def score(self, view: SequenceView) -> torch.Tensor:
        """[L, H, R] float32, comparable over layers and heads; the highest stay.

        Finite where a row exists, without meaning elsewhere. Changes nothing.
        """
        ...


def by_layer(view: SequenceView, scores: list[torch.Tensor]) -> torch.Tensor:
    """[L, H, R] of one [H, R] for each layer, on the device of the view's positions."""
    return torch.stack(scores).to(view.positions.device)
