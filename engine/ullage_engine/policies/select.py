"""Who stays, once every entry has a score: all of a sequence's (layer, head, token) entries compete.

Heads differ in how much of a context they need, and a budget spent equally on each starves the few that retrieve
(docs/adr/0005). A floor keeps any head from being left with nothing but its protected rows.
"""

from __future__ import annotations

import torch


def select(scores: torch.Tensor, candidates: torch.Tensor, count: int, floor: int = 0) -> torch.Tensor:
    """The `count` candidates to keep; ties keep the later row.

    Args:
        scores: [L, H, R]; finite where there is a candidate.
        candidates: [L, H, R] bool; all else is either protected or not there.
        count: entries to keep of all candidates; more than there are keeps all, below 1 none.
        floor: candidates that each head keeps whatever the others score, as far as it has them; as many as the
            budget allows where it does not reach for all.

    Returns:
        [L, H, R] bool, within `candidates`; min(count, candidates) are True.
    """
    count = max(0, min(count, int(candidates.sum())))
    keep = torch.zeros_like(candidates)
    if count == 0:
        return keep
    ranked = scores.float().masked_fill(~candidates, float("-inf"))
    floor = min(floor, count // (scores.shape[0] * scores.shape[1]))
    if floor > 0:
        best = _order(ranked)[..., :floor]
        keep.scatter_(-1, best, candidates.gather(-1, best))
        ranked = ranked.masked_fill(keep, float("inf"))
    keep.view(-1)[_order(ranked.flatten())[:count]] = True
    return keep


def _order(scores: torch.Tensor) -> torch.Tensor:
    """Indices along the last dimension from the highest score to the lowest; of equals the last comes first."""
    return scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
