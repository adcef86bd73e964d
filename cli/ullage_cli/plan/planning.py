"""From what was asked to a whole plan: every cache's fit, and what to know before believing it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .shape import KNOWN, ModelShape, from_config
from .sums import CACHES, Blocks, Cache, Fit, Load, Machine, Memory, Pace, activation_bytes, fit, replicated

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter by type; scales of narrow weights are below 4 % and not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that a plan depends on."""

    shape: ModelShape
    machine: Machine
    load: Load
    blocks: Blocks = field(default_factory=Blocks)
    weight_type: str | None = None
    """None: as the files have it, else 16 bits."""
    counted_kv_heads: int | None = None
    """KV heads to count for the cache in place of the model's own."""
    budget: float = 0.2
    """Share of tokens that stay under the last cache of the table."""
    step_ms: float | None = None
    """A step with the 16-bit cache."""
    narrow_step_ms: float | None = None
    """A step with an 8-bit cache; None: the same."""
    count_step: bool = True
    """Whether activations and logits are counted."""
    on_pool: bool = False
    """Whether the memory is that of a cache that was set up already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What came out."""

    request: Request
    weight_bytes: int
    weight_source: str
    memory: Memory
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]

    @property
    def shape(self) -> ModelShape:
        """The model as it was counted."""
        counted = self.request.counted_kv_heads
        return self.request.shape if counted is None else replace(self.request.shape, kv_heads=counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run on a real engine gave for one cache, in place of assumptions."""

    pace: Pace
    token_bytes: float | None


def make_plan(request: Request, measured: dict[str, Measured] | None = None) -> Plan:
    """Work out every cache. `measured` goes by the cache's name."""
    counted = request.counted_kv_heads
    shape = request.shape if counted is None else replace(request.shape, kv_heads=counted)
    weights, source = weigh(request)
    step, row = activation_bytes(shape, request.load.batch_tokens) if request.count_step else (0, 0)
    memory = Memory(weights=weights, step=step * request.machine.count, row=row)
    fits = []
    for cache in caches(request.budget):
        found = (measured or {}).get(cache.name.partition(" ")[0])
        fits.append(
            fit(
                shape,
                cache,
                request.blocks,
                request.machine,
                request.load,
                memory,
                pace_of(request, cache) if found is None else found.pace,
                None if found is None else found.token_bytes,
            )
        )
    return Plan(
        request=request,
        weight_bytes=weights,
        weight_source=source,
        memory=memory,
        fits=tuple(fits),
        notes=(
            *model_notes(request),
            *machine_notes(request, fits),
            *([] if measured else pace_notes(fits, request)),
        ),
    )


def caches(budget: float) -> tuple[Cache, ...]:
    """The rows of the table: each type, and fp8 of which a share of the tokens stays."""
    fp8 = CACHES[1]
    return (*CACHES, replace(fp8, name=f"fp8 + {100 * budget:g} % budget", kept=budget))


def weigh(request: Request) -> tuple[int, str]:
    """Bytes of the weights, and where the number comes from."""
    shape, kind = request.shape, request.weight_type
    if kind is None and shape.file_bytes is not None:
        return shape.file_bytes, "size of the weight files"
    kind = kind or "bf16"
    return round(shape.parameters * WEIGHT_BYTES[kind]), f"{shape.parameters / 1e9:.3g} billion parameters in {kind}"


def pace_of(request: Request, cache: Cache) -> Pace | None:
    """The pace as given; None where none was."""
    wide, narrow = request.step_ms, request.narrow_step_ms
    chosen = wide if cache.element_bytes == 2 else (narrow or wide)
    return None if chosen is None else Pace(base=chosen / 1000)


def model_notes(request: Request) -> list[str]:
    """What to know about the model's cache."""
    shape, counted, notes = request.shape, request.counted_kv_heads, []
    if counted is not None and counted != shape.kv_heads:
        share = counted / shape.kv_heads
        notes.append(
            f"{counted} KV heads are counted, but {shape.name} has {shape.kv_heads} for its {shape.heads} query heads "
            f"({shape.sharing}): its cache is {share:g} times smaller, and {share:g} times as many sequences fit."
        )
    if shape.latent is not None:
        notes.append("Keys and values are compressed (MLA); Ullage's own engine does not serve such models.")
    if shape.cache_layers != shape.layers:
        notes.append(f"Only {shape.cache_layers} of {shape.layers} layers keep keys and values for each token.")
    if shape.windowed:
        notes.append("Some layers attend to a window; all tokens are counted, as Ullage's engine keeps them.")
    if request.blocks.scale_group == 0:
        notes.append(
            f"No scales are counted for 8-bit caches. One float32 for each token, head and 128 channels adds "
            f"{100 * 4 / min(128, shape.head_size):.1f} %; a scale for a whole tensor costs accuracy instead."
        )
    notes.append(
        f"The {100 * request.budget:g} % budget holds after eviction: while a prompt is prefilled all of it is in the "
        "cache, and what is dropped costs quality. Measure yours first."
    )
    return notes


def machine_notes(request: Request, fits: Sequence[Fit]) -> list[str]:
    """What to know about the machine's memory."""
    notes, machine = [], request.machine
    if (machine.reserve == 0 or not request.count_step) and not request.on_pool:
        notes.append(
            "Nothing, or not all, is set aside for activations, logits, the driver and the allocator; servers leave "
            "about a tenth of the memory."
        )
    copies = replicated(request.shape, machine.count)
    if copies > 1:
        notes.append(f"With {machine.count} accelerators KV heads are copied {copies:g} times.")
    most = max((found.used for found in fits), default=0)
    if most > request.load.batch_tokens:
        notes.append(f"{most} sequences need steps of as many tokens; --batch-tokens is {request.load.batch_tokens}.")
    return notes


def pace_notes(fits: Sequence[Fit], request: Request) -> list[str]:
    """Whether the given pace can be kept up."""
    if request.step_ms is None:
        if request.machine.bandwidth is None:
            return ["No pace: give --step-ms, or --bandwidth for a bound from below."]
        return [
            "Steps take what reading weights and cache once from memory takes. That is a bound from below: real steps "
            "are slower, so real prices are higher. --step-ms or --measure says it better."
        ]
    notes = []
    for found in fits[:2]:
        if found.floor_s is None or found.step_s is None or found.step_s >= found.floor_s:
            continue
        there = ""
        if request.machine.price_per_hour is not None and found.cost is not None:
            there = f", so a million tokens cost at least ${money(found.cost * found.floor_s / found.step_s)}"
        notes.append(
            f"{found.cache.name}: {1000 * found.step_s:g} ms is taken for a step of {found.used} sequences as for a "
            "step of one (linear batching). Reading weights and cache once takes at least "
            f"{1000 * found.floor_s:.3g} ms{there}."
        )
    return notes


def money(amount: float) -> str:
    """Two significant digits below 1, cents above."""
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}"


def example() -> Request:
    """The published example: Llama-3-8B on an A100-80GB at $4 an hour with 2,048 tokens."""
    return Request(
        shape=from_config(KNOWN["llama-3-8b"], "llama-3-8b"),
        machine=Machine(
            name="A100-80GB", memory_bytes=80_000_000_000, bandwidth=2039e9, reserve=0.0, price_per_hour=4.0
        ),
        load=Load(context=2048),
        blocks=Blocks(scale_group=0),
        counted_kv_heads=32,
        step_ms=1.5,
        narrow_step_ms=1.4,
        count_step=False,
    )


def corrected(request: Request) -> list[tuple[str, Request]]:
    """The example's assumptions taken back one after the other, each on top of the one before."""
    heads = replace(request, counted_kv_heads=None)
    scales = replace(heads, blocks=replace(request.blocks, scale_group=None))
    room = replace(scales, count_step=True, machine=replace(request.machine, reserve=0.1))
    pace = replace(room, step_ms=None, narrow_step_ms=None)
    return [
        ("as published", request),
        (f"{request.shape.kv_heads} KV heads, as the model has ({request.shape.sharing})", heads),
        ("scales of the 8-bit cache counted", scales),
        ("room for activations, logits and 10 % reserve", room),
        ("steps no faster than memory can be read", pace),
    ]
