"""Masked grouped-query attention in torch, over rows that were gathered: what the references have in common."""

from __future__ import annotations

import torch
from torch.nn import functional

from ullage_engine.kernels.view import Section
from ullage_engine.quant import decode


def attend(
    query: torch.Tensor,
    keys: Section,
    values: Section,
    visible: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp; all sums in float32, or float64 if the query is.

    Where codes have one scale per row they are not dequantised: K scales multiply logits, V scales multiply
    probabilities, which halves the passes over them.

    Args:
        query: [N, Hq, Q, D].
        keys, values: [N, Hkv, S, ...]; rows that no query sees hold finite numbers.
        visible: [N, 1 or Hkv, Q, S] bool.
        softcap: logits are squashed to `softcap * tanh(logits / softcap)`.
        sinks: [Hq] logits of a key per head that has no value.

    Returns:
        [N, Hq, Q, D] and [N, Hq, Q], the natural log of the sum of exp(logits), sinks included. A query that sees
        nothing gets 0 and -inf.
    """
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    count, heads, steps, size = query.shape
    key, key_scale, factor = _numbers(keys, exact)
    value, value_scale, value_factor = _numbers(values, exact)
    grouped = query.to(exact).reshape(count, key.shape[1], -1, size) * (scaling * factor)
    logits = grouped @ key.transpose(-1, -2)  # [N, Hkv, Hq / Hkv * Q, S]
    if key_scale is not None:
        logits *= key_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    apart = logits.view(count, key.shape[1], -1, steps, logits.shape[-1])
    apart.masked_fill_(~visible.unsqueeze(2), float("-inf"))
    top = logits.amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.to(exact).view(1, key.shape[1], -1, 1).repeat_interleave(steps, 2)
    if sink is not None:
        top = torch.maximum(top, sink)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    if value_scale is not None:
        weights *= value_scale * value_factor
    result = (weights @ value) / total.clamp_min(1e-38)
    lse = top + total.log()
    return result.reshape(query.shape), lse.view(count, heads, steps)


def attend_values(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    """torch's own attention in the query's dtype, for what needs neither a log-sum-exp nor changed logits.

    query [N, Hq, Q, D], key and value [N, Hkv, S, D], finite everywhere; each query sees something.
    """
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped
    )


def blank(part: torch.Tensor, existing: torch.Tensor, least: int) -> torch.Tensor:
    """Rows that hold nothing, from row `least` on, set to 0 in place: 0 times what lies there must not be NaN.

    part [N, H, S, ...], existing [N, 1 or H, S].
    """
    if least < part.shape[2]:
        part[:, :, least:].masked_fill_(~existing[:, :, least:, None], 0)
    return part


def finite(section: Section, existing: torch.Tensor, least: int) -> Section:
    """A gathered section with its empty rows blanked, as `blank` does."""
    codes = section.codes
    raw = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
    blank(raw, existing, least)
    return Section(codes, None if section.scales is None else blank(section.scales, existing, least))


def _numbers(section: Section, exact: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Rows [N, H, S, D], scales [N, H, 1, S] still to be multiplied, if any, and a factor of theirs."""
    if section.scales is None or section.scales.shape[-1] > 1:
        return section.values(exact), None, 1.0
    rows, factor = decode(section.codes)
    return rows.to(exact), section.scales.to(exact).transpose(-1, -2), factor
