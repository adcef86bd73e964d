"""Curves of straight pieces, by which measurements become points or chances. Pure."""

from __future__ import annotations

Curve = tuple[tuple[float, float], ...]
"""Corners, ascending in x; straight lines between, flat outside."""


def points_on_curve(value: float, curve: Curve) -> float:
    """Straight lines between the curve's corners (ascending in x), flat outside them."""
    left_x, left_y = curve[0]
    if value <= left_x:
        return left_y
    for right_x, right_y in curve[1:]:
        if value <= right_x:
            share = (value - left_x) / (right_x - left_x)
            return left_y + share * (right_y - left_y)
        left_x, left_y = right_x, right_y
    return left_y
