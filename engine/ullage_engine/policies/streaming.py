"""The first tokens and the latest stay: attention sinks and a recent window (Xiao et al., arXiv:2309.17453).

Models park the attention that they have no use for on the first tokens; without them what is left gets too much. It
keeps fluency at any length, and forgets the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, SequenceView


@dataclass(frozen=True, slots=True)
class Streaming:
    """Score: the row's position, where the first `sinks` tokens count as later than all others."""

    sinks: int = 4
    name: str = "streaming"
    needs: Needs = Needs.NOTHING

    def score(self, view: SequenceView) -> torch.Tensor:
        positions = view.positions
        return torch.where(positions < self.sinks, positions + view.length, positions).float()
