"""What to set, from what was measured; in words and as a document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..tables import columns
from .lengths import Mix, SizeCost, advised
from .measure import Measured

STEP = 1.25
"""A cache type is worth it only where it saves a fifth of the bytes at least."""


def size_text(mix: Mix, costs: Sequence[SizeCost]) -> str:
    """Block sizes side by side, and the one to take."""
    rows = [[str(c.tokens), f"{100 * c.waste:.1f} %", f"{c.blocks:.1f}", f"{c.lost_prefix:.1f}"] for c in costs]
    table = columns(["block size", "empty slots", "blocks of a sequence", "prefix tokens lost"], rows)
    best = advised(costs)
    hit = "" if mix.hit_ratio is None else f" Prefix hits were {100 * mix.hit_ratio:.0f} % of prompt tokens."
    verdict = f"blockSize: {best.tokens}   ({100 * best.waste:.1f} % of the slots stay empty)"
    return f"lengths of {mix.source}.{hit}\n\n{table}\n\n{verdict}"


def type_text(reference_bytes: float | None, found: Sequence[Measured], target: float) -> str:
    """Cache types side by side, and the one to take."""
    rows = [["bf16", _bytes(reference_bytes), "–", "–", "–"]]
    for one in found:
        quality = one.quality
        figures = [f"{quality.kl:.5f}", f"{quality.worst:.4f}", f"{quality.top1:.3f}"]
        rows.append([one.candidate.name, _bytes(one.token_bytes), *figures])
    table = columns(["cache", "B/token", "KL", "worst", "same top token"], rows)
    positions = found[0].quality.positions if found else 0
    best = choose(reference_bytes, found, target)
    if best is None:
        verdict = f"type: bf16   (no narrower cache stays below a KL of {target:g})"
    else:
        verdict = f"type: {best.candidate.kind}   (KL {best.quality.kl:.5f}, below the target of {target:g})"
        if best.candidate.kept_layers:
            verdict += f"\nextraArgs: [--kv-bf16-layers={','.join(map(str, best.candidate.kept_layers))}]"
    return (
        f"{table}\n\n{verdict}\nnote: {positions} positions of one text, by the 20 likeliest tokens; KL depends on "
        "the text, so compare caches with each other. Try your own by --text."
    )


def choose(reference_bytes: float | None, found: Sequence[Measured], target: float) -> Measured | None:
    """The smallest cache that stays within the target; of equal size the closest to the reference."""
    good = [one for one in found if one.quality.kl <= target and _saves(reference_bytes, one)]
    return min(good, key=lambda one: (one.token_bytes or 0.0, one.quality.kl), default=None)


def as_dict(
    mix: Mix | None, costs: Sequence[SizeCost], reference_bytes: float | None, found: Sequence[Measured], target: float
) -> dict[str, Any]:
    """For programs; parts that were not measured are left out."""
    document: dict[str, Any] = {}
    if mix is not None:
        document["lengths"] = {"source": mix.source, "prefixHitRatio": mix.hit_ratio}
        document["blockSizes"] = [asdict(cost) for cost in costs]
        document["blockSize"] = advised(costs).tokens
    if found:
        best = choose(reference_bytes, found, target)
        document["referenceBytesPerToken"] = reference_bytes
        document["caches"] = [
            {
                "cache": one.candidate.kind,
                "bf16Layers": list(one.candidate.kept_layers),
                "bytesPerToken": one.token_bytes,
                **asdict(one.quality),
            }
            for one in found
        ]
        document["type"] = "bf16" if best is None else best.candidate.kind
        document["bf16Layers"] = [] if best is None else list(best.candidate.kept_layers)
    return document


def _saves(reference_bytes: float | None, one: Measured) -> bool:
    if reference_bytes is None or one.token_bytes is None:
        return True
    return one.token_bytes * STEP <= reference_bytes


def _bytes(size: float | None) -> str:
    return "–" if size is None else f"{size:,.0f}"
