"""Attention over several parts of a sequence's rows, put together by their log-sum-exps.

softmax over a union is the mean of the parts' results weighted by exp(lse) of each (Milakov and Gimelshein,
arXiv:1805.02867). A sink counts in one part only: its lse then carries it into the whole.
"""

from __future__ import annotations

import torch


def reference(
    parts: torch.Tensor, lses: torch.Tensor, at: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Merge some tokens' parts into `out`, and their log-sum-exp into `lse`.

    Args:
        parts: [P, T, Hq, D] float32.
        lses: [P, T, Hq] float32, natural log; -inf: the part saw nothing, and its result counts for nothing.
        at: [N] int64 tokens to merge; others are neither read nor written.
        out: [T, Hq, D].
        lse: [T, Hq] float32, or None.
    """
    logs = lses[:, at]
    top = logs.amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (logs - top).exp()
    total = weights.sum(0)
    chosen = parts[:, at].masked_fill((weights == 0).unsqueeze(-1), 0.0)
    merged = (chosen * weights.unsqueeze(-1)).sum(0) / total.clamp_min(1e-38).unsqueeze(-1)
    out[at] = merged.to(out.dtype)
    if lse is not None:
        lse[at] = top + total.log()
