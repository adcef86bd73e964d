"""A second pass over a sequence's tokens: what is fed to the model, and how its attention becomes scores.

The context is re-read in chunks. Each follows the whole context, as if the model had been told to repeat it and did:
instruction, the last tokens before the chunk as a cue, the chunk itself. Keys and values of these tokens are scratch;
only what their queries attend to in the context is of interest. Cost: as many tokens of prefill as the context has,
and an instruction and a cue for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"
"""What the model is asked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens to compute after the whole context, at the positions that follow it, and to forget again."""

    tokens: tuple[int, ...]
    observed: int
    """Queries from this token on count. It is the one before the chunk: whose next token is the chunk's first."""


def readings(context: Sequence[int], instruction: Sequence[int], *, chunk: int, cue: int = 8) -> list[Reading]:
    """The passes that cover a context.

    Args:
        instruction: tokens that ask for a repeat; at least one.
        chunk: tokens of the context that one pass repeats.
        cue: tokens before the chunk that show where to go on.

    Raises:
        ValueError: an empty instruction, or chunks without tokens.
    """
    if not instruction or chunk < 1 or cue < 0:
        raise ValueError(f"instruction of {len(instruction)} tokens, chunks of {chunk}, cue of {cue}; want 1, 1, 0")
    result = []
    for start in range(0, len(context), chunk):
        before = (*instruction, *context[max(0, start - cue) : start])
        result.append(Reading((*before, *context[start : start + chunk]), len(before) - 1))
    return result


class Rereading:
    """Squares of the attention that readings paid to each row of a context, added up; [L, H, R] float32 in all."""

    def __init__(self, layers: int, heads: int, rows: int, device: torch.device | str = "cpu") -> None:
        self.scores = torch.zeros((layers, heads, rows), device=device)

    @property
    def nbytes(self) -> int:
        return self.scores.numel() * self.scores.element_size()

    def take(self, layer: int, attention: torch.Tensor) -> None:
        """Add what some of a reading's queries gave in a layer, [H, R] (`mass.attention` in mode `square`)."""
        self.scores[layer] += attention
