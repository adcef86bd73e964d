"""A plan in words, and as one JSON document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables import columns
from .planning import Plan, Request, corrected, make_plan, money
from .sums import Fit

GIB = 1 << 30


def text(plan: Plan) -> str:
    """The plan for people."""
    parts = [_model(plan), _machine(plan), "", _table(plan)]
    parts += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(parts)


def ladder_text(request: Request) -> str:
    """The example's assumptions, taken back one by one, as a table."""
    rows = []
    for name, variant in corrected(request):
        wide, narrow = make_plan(variant).fits[:2]
        rows.append(
            (name, str(wide.sequences), str(narrow.sequences), _price(wide), _price(narrow), change(wide, narrow))
        )
    header = ("assumption taken back", "fp16 seqs", "fp8 seqs", "fp16 $/M", "fp8 $/M", "change")
    return columns(header, rows)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs; bytes, seconds, and null where something is not known."""
    request, shape = plan.request, plan.shape
    return {
        "model": {
            "name": shape.name,
            "layers": shape.layers,
            "queryHeads": shape.heads,
            "kvHeads": shape.kv_heads,
            "headSize": shape.head_size,
            "sharing": shape.sharing,
            "parameters": shape.parameters,
            "weightBytes": plan.weight_bytes,
            "weightSource": plan.weight_source,
        },
        "machine": {
            "name": request.machine.name,
            "count": request.machine.count,
            "memoryBytes": request.machine.memory_bytes,
            "bandwidthBytesPerSecond": request.machine.bandwidth,
            "reserve": request.machine.reserve,
            "pricePerHour": request.machine.price_per_hour,
            "activationBytes": plan.memory.step,
        },
        "context": request.load.context,
        "concurrency": request.load.concurrency,
        "caches": [_fit_dict(found) for found in plan.fits],
        "notes": list(plan.notes),
    }


def ladder_dict(request: Request) -> list[dict[str, Any]]:
    """`ladder_text` for programs."""
    return [
        {"assumption": name, "caches": [_fit_dict(found) for found in make_plan(variant).fits[:2]]}
        for name, variant in corrected(request)
    ]


def size(count: float) -> str:
    """`1.5 GiB`, `48 KiB`."""
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {unit}" if count < 1000 * limit else f"{count / limit:,.0f} {unit}"
    return f"{count:g} B"


def change(base: Fit, other: Fit) -> str:
    """How much cheaper the other is."""
    if not base.cost or other.cost is None:
        return "–"
    return f"{100 * (other.cost / base.cost - 1):+.0f} %".replace("-", "−")


def _model(plan: Plan) -> str:
    shape = plan.shape
    heads = f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_size}"
    if shape.latent is not None:
        heads = f"{shape.heads} heads, {shape.latent} channels kept for each token"
    return (
        f"{shape.name}: {shape.layers} layers, {heads} ({shape.sharing}); "
        f"weights {size(plan.weight_bytes)} ({plan.weight_source})"
    )


def _machine(plan: Plan) -> str:
    machine, load = plan.request.machine, plan.request.load
    several = f"{machine.count} x " if machine.count > 1 else ""
    asked = "" if load.concurrency is None else f", {load.concurrency} at once"
    price = "" if machine.price_per_hour is None else f", ${machine.price_per_hour:g}/h"
    activations = f", activations {size(plan.memory.step)}" if plan.memory.step else ""
    return (
        f"{several}{machine.name}: {size(machine.memory_bytes)}, {100 * machine.reserve:g} % in reserve{activations}"
        f"{price}; sequences of {load.context:,} tokens{asked}"
    )


def _table(plan: Plan) -> str:
    asked = plan.request.load.concurrency is not None
    header = ["cache", "KV/token", "KV/sequence", "fit at once"]
    header += ["asked", "KV memory"] if asked else ["KV memory"]
    header += ["step", "tokens/s", "$/M tokens", "change"]
    base = plan.fits[0]
    rows = [_row(found, base, asked=asked) for found in plan.fits]
    return columns(header, rows)


def _row(found: Fit, base: Fit, *, asked: bool) -> list[str]:
    verdict = ["fits" if found.fits else f"lacks {size(found.lacking_bytes)}"] if asked else []
    return [
        found.cache.name,
        size(found.token_bytes),
        size(found.sequence_bytes),
        f"{found.sequences:,}",
        *verdict,
        size(found.cache_bytes),
        "–" if found.step_s is None or not found.fits else f"{1000 * found.step_s:.3g} ms",
        "–" if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}",
        _price(found),
        "" if found is base else change(base, found),
    ]


def _price(found: Fit) -> str:
    return "–" if found.cost is None else money(found.cost)


def _fit_dict(found: Fit) -> dict[str, Any]:
    return {
        "cache": found.cache.name,
        "keptShare": found.cache.kept,
        "bytesPerToken": found.token_bytes,
        "bytesPerSequence": found.sequence_bytes,
        "maxSequences": found.sequences,
        "sequences": found.used,
        "fits": found.fits,
        "lackingBytes": found.lacking_bytes,
        "cacheBytes": found.cache_bytes,
        "floorSeconds": found.floor_s,
        "stepSeconds": found.step_s,
        "tokensPerSecond": found.tokens_per_s,
        "dollarsPerMillionTokens": found.cost,
    }


def fits_somewhere(fits: Sequence[Fit]) -> bool:
    """Whether any cache holds what was asked for."""
    return any(found.fits for found in fits)
