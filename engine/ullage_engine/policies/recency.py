"""The latest tokens stay. The baseline that looks at nothing: what every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ullage_engine.policies.base import Needs, SequenceView


@dataclass(frozen=True, slots=True)
class Recency:
    """Score: the row's position."""

    name: str = "recency"
    needs: Needs = Needs.NOTHING

    def score(self, view: SequenceView) -> torch.Tensor:
        return view.positions.float()
