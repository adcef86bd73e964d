"""The arithmetic of memory and money. Pure.

KV bytes of one token, with K and V of every layer and head:

    2 x layers x KV heads x (head size x bytes of an element + scale groups x 4)

A cache type of 8 bits keeps one float32 scale for each (token, head) and group of up to 128 channels, for keys and for
values. A block holds a fixed number of tokens and its sections start on 16-byte boundaries, which for usual shapes adds
nothing. The engine's own layout gives the same number; a test holds the two together.

Money: a step makes one token for each sequence, so a million tokens cost

    price per hour / 3600 x seconds of a step / sequences x 10^6
"""

from __future__ import annotations

from dataclasses import dataclass

from .shape import ModelShape

ALIGN = 16
SCALE_BYTES = 4
SCALE_GROUP = 128
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One way to keep keys and values."""

    name: str
    element_bytes: int
    scaled: bool
    """Whether it has scales."""
    kept: float = 1.0
    """Share of the context's tokens that stay in the cache."""


CACHES = (
    Cache(name="fp16", element_bytes=2, scaled=False),
    Cache(name="fp8", element_bytes=1, scaled=True),
    Cache(name="int8", element_bytes=1, scaled=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a cache is cut."""

    tokens: int = 16
    """Of one block."""
    scale_group: int | None = None
    """Channels that share a scale; None: up to 128; 0: no scales are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the model runs on, all accelerators together."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    """Bytes a second; None: not known."""
    count: int = 1
    """Accelerators that share the model by tensor parallelism."""
    reserve: float = 0.1
    """Share of the memory that is left to driver, allocator and other processes."""
    price_per_hour: float | None = None
    """Of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of it."""

    context: int
    """Tokens of one sequence, prompt and answer."""
    concurrency: int | None = None
    """Sequences that should run at once; None: as many as fit."""
    batch_tokens: int = 512
    """Most tokens of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of one step with n sequences: `base + each * n`."""

    base: float
    each: float = 0.0

    def step_s(self, sequences: int) -> float:
        return self.base + self.each * sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes besides the cache."""

    weights: int
    step: int
    """Activations of the largest step, without the rows of logits."""
    row: int
    """Logits of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One cache on the machine."""

    cache: Cache
    token_bytes: float
    sequence_bytes: int
    sequences: int
    """As many as fit at once."""
    used: int
    """Sequences that the figures below are for."""
    fits: bool
    """Whether as many as were asked for fit."""
    lacking_bytes: int
    """Memory that is missing for those asked for."""
    cache_bytes: int
    """Of the sequences used."""
    floor_s: float | None
    """Least seconds of a step: weights and cache are read once from memory."""
    step_s: float | None
    """Seconds of a step as given or measured, else the floor."""
    tokens_per_s: float | None
    cost: float | None
    """Money for a million generated tokens."""


def block_bytes(shape: ModelShape, cache: Cache, blocks: Blocks) -> int:
    """Bytes of one block of all layers and KV heads."""
    if shape.latent is not None:
        return shape.cache_layers * _section(shape.latent, cache, blocks)
    return shape.cache_layers * shape.kv_heads * 2 * _section(shape.head_size, cache, blocks)


def token_bytes(shape: ModelShape, cache: Cache, blocks: Blocks) -> float:
    """Cache bytes of one token."""
    return block_bytes(shape, cache, blocks) / blocks.tokens


def sequence_bytes(shape: ModelShape, cache: Cache, blocks: Blocks, context: int) -> int:
    """Cache bytes of one sequence: whole blocks, of the tokens that stay."""
    kept = -(-round(context * cache.kept * MILLION) // MILLION)
    return -(-kept // blocks.tokens) * block_bytes(shape, cache, blocks)


def activation_bytes(shape: ModelShape, tokens: int) -> tuple[int, int]:
    """Bytes of the largest activations of a step (float32, one layer at a time), and of each sequence's logits."""
    return 4 * tokens * (6 * shape.hidden + 3 * shape.intermediate), 4 * 2 * shape.vocabulary


def replicated(shape: ModelShape, count: int) -> float:
    """How often the cache is held: KV heads are dealt out to accelerators, and copied where there are too few."""
    if shape.latent is not None:
        return float(count)
    return max(1.0, count / shape.kv_heads)


def fit(
    shape: ModelShape,
    cache: Cache,
    blocks: Blocks,
    machine: Machine,
    load: Load,
    memory: Memory,
    pace: Pace | None,
    measured_token_bytes: float | None = None,
) -> Fit:
    """What one cache allows. `pace` None: the memory's bandwidth sets the pace."""
    each = sequence_bytes(shape, cache, blocks, load.context)
    per_token = token_bytes(shape, cache, blocks)
    if measured_token_bytes is not None:
        each, per_token = round(each * measured_token_bytes / per_token), measured_token_bytes
    each = round(each * replicated(shape, machine.count))
    left = int(machine.memory_bytes * (1 - machine.reserve)) - memory.weights - memory.step
    most = max(0, left // (each + memory.row))
    used = most if load.concurrency is None else load.concurrency
    lacking = max(0, used * (each + memory.row) - max(0, left)) + max(0, -left)
    fits = most >= max(1, used)
    floor = None
    if machine.bandwidth is not None and used:
        floor = (memory.weights + used * each) / machine.bandwidth
    step = pace.step_s(used) if pace is not None else floor
    rate = used / step if step and fits else None
    return Fit(
        cache=cache,
        token_bytes=per_token,
        sequence_bytes=each,
        sequences=most,
        used=used,
        fits=fits,
        lacking_bytes=lacking,
        cache_bytes=used * each,
        floor_s=floor,
        step_s=step,
        tokens_per_s=rate,
        cost=None if rate is None or machine.price_per_hour is None else cost(machine.price_per_hour, rate),
    )


def cost(price_per_hour: float, tokens_per_s: float) -> float:
    """Money for a million tokens."""
    return price_per_hour / 3600 / tokens_per_s * MILLION


def _section(width: int, cache: Cache, blocks: Blocks) -> int:
    """Bytes of the keys (or values) of one head in one layer of one block."""
    group = blocks.scale_group if blocks.scale_group is not None else min(SCALE_GROUP, width)
    codes = _aligned(blocks.tokens * width * cache.element_bytes)
    if not cache.scaled or group == 0:
        return codes
    return codes + _aligned(blocks.tokens * -(-width // group) * SCALE_BYTES)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
