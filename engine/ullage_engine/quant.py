"""Cache types and their numbers: how keys and values become bytes and come back.

Purpose: the torch reference for quantise-on-write and dequantise-on-read. Non-goal: where the bytes lie
(`layout` knows) and when they are written (`attention` does).

FP8 is OCP e4m3 ("fn": no infinities, largest value 448); INT8 is symmetric. Both carry one float32 scale per
(token, KV head, group of channels): `scale = max(absmax, EPS) / limit`, so that the greatest channel of a group
maps to the greatest code and one strong channel costs the others no range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KvType = Literal["fp8", "int8", "bf16", "fp32"]

EPS = 1e-12
"""Least absmax: keeps the scale of an all-zero group a normal number."""


@dataclass(frozen=True, slots=True)
class CacheType:
    """One way to store a key or value element."""

    name: KvType
    element: torch.dtype
    limit: float | None
    """Greatest magnitude of a code; None: stored as it is, without scales."""

    @property
    def element_bytes(self) -> int:
        return self.element.itemsize

    @property
    def quantised(self) -> bool:
        return self.limit is not None


CACHE_TYPES: dict[KvType, CacheType] = {
    "fp8": CacheType("fp8", torch.float8_e4m3fn, 448.0),
    "int8": CacheType("int8", torch.int8, 127.0),
    "bf16": CacheType("bf16", torch.bfloat16, None),
    "fp32": CacheType("fp32", torch.float32, None),
}


def quantise(values: torch.Tensor, kind: CacheType, group: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of `values` [..., D].

    Returns codes [..., D] of `kind.element` and scales [..., D // group] float32, or None where the type has none.
    Non-finite values are the model's fault and stay visible: their group's scale becomes non-finite too.
    """
    if kind.limit is None:
        return values.to(kind.element), None
    grouped = values.float().view(*values.shape[:-1], values.shape[-1] // group, group)
    scales = grouped.abs().amax(-1).clamp_min(EPS) / kind.limit
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-kind.limit, kind.limit).flatten(-2)
    if kind.name == "int8":
        scaled = scaled.round()
    return scaled.to(kind.element), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., D] of `dtype` from codes [..., D] and scales [..., G]; the product is taken in float32."""
    if scales is None:
        return codes.to(dtype)
    values, factor = decode(codes)
    grouped = values.view(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return (grouped * (scales * factor).unsqueeze(-1)).view(codes.shape).to(dtype)


def decode(codes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """float32 numbers proportional to the codes, and the factor that makes them equal (folded into scales for free).

    torch casts e4m3 element by element on the CPU (16 times slower). Its bits, moved to where float16 keeps sign,
    exponent and mantissa, are the same number 2^8 times smaller, because the exponents' biases are 7 and 15;
    subnormals included. NaN codes are lost in this, but only a NaN scale, which is kept, ever writes them.
    """
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        bits = codes.view(torch.int8).to(torch.int16)  # the sign is extended into the upper byte
        return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float(), 256.0
    return codes.float(), 1.0
