"""What block sizes cost on a mix of lengths: the slots of last blocks that hold nothing. Pure.

A sequence of prompt p that writes an answer of a tokens holds p, p + 1, … p + a of them, for one step each; at every
moment its last block is filled in part. The waste of a size is the share of empty slots over all these moments and all
sequences of the mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage_agent.histogram import Histogram

from ..errors import InputError
from ..replay.data import Recording

SIZES = (8, 16, 32)
MIN_FINISHED = 20
POINTS = 12
"""Lengths by which a distribution is stood for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths of prompts and answers in tokens, each equally likely."""

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    source: str
    hit_ratio: float | None = None
    """Share of prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCost:
    """One block size."""

    tokens: int
    waste: float
    """Share of the allocated slots."""
    blocks: float
    """Blocks that a sequence holds on average: entries of its block table."""
    lost_prefix: float
    """Tokens of a shared prefix that are computed again because they fill no block, on average."""


def cost(mix: Mix, size: int) -> SizeCost:
    """What one size costs."""
    held = allocated = moments = 0
    for prompt in mix.prompts:
        for answer in mix.answers:
            steps = answer + 1
            held += steps * prompt + answer * steps // 2
            allocated += size * (_blocks_through(prompt + answer, size) - _blocks_through(prompt - 1, size))
            moments += steps
    return SizeCost(
        tokens=size,
        waste=1 - held / allocated,
        blocks=allocated / size / moments,
        lost_prefix=(size - 1) / 2,
    )


def from_recording(recording: Recording) -> Mix:
    """The mix that a recording's engine served.

    Raises:
        InputError: the engine told too little, or too few requests ended.
    """
    moments = [moment.reading for moment in recording.moments if moment.reading is not None]
    first, last = moments[0], moments[-1]
    hit = _hit_ratio(recording)
    answers, prompts = (_since(first.histograms, last.histograms, name) for name in ("answer_tokens", "prompt_tokens"))
    if answers is not None and prompts is not None and answers.count >= MIN_FINISHED:
        source = f"{answers.count:.0f} requests of {recording.source}"
        return Mix(prompts=points(prompts), answers=points(answers), source=source, hit_ratio=hit)
    now, before = last.snapshot, first.snapshot
    ended = _gain(before.finished_total, now.finished_total)
    prompt, answer = (
        _gain(getattr(before, name), getattr(now, name)) for name in ("prompt_tokens_total", "generated_tokens_total")
    )
    if not ended or ended < MIN_FINISHED or prompt is None or answer is None:
        raise InputError(
            f"RECORDING: {recording.source} shows {ended or 0} ended requests with their lengths; {MIN_FINISHED} are "
            "needed: record for longer, or give --prompt-tokens and --answer-tokens"
        )
    return Mix(
        prompts=_spread(prompt / ended), answers=_spread(answer / ended), hit_ratio=hit,
        source=f"{ended} requests of {recording.source}, of which only means are known",
    )  # fmt: skip


def from_means(prompt: int, answer: int) -> Mix:
    """A mix around two means."""
    return Mix(prompts=_spread(prompt), answers=_spread(answer), source="the means that were given")


def points(histogram: Histogram) -> tuple[int, ...]:
    """A few lengths that stand for a distribution."""
    found = (histogram.quantile((index + 0.5) / POINTS) for index in range(POINTS))
    return tuple(max(1, round(value)) for value in found if value is not None)


def advised(costs: Sequence[SizeCost]) -> SizeCost:
    """The largest size whose waste is within one point of the smallest size's: fewer entries at hardly more waste."""
    least = min(cost.waste for cost in costs)
    return max((cost for cost in costs if cost.waste <= least + 0.01), key=lambda cost: cost.tokens)


def _blocks_through(tokens: int, size: int) -> int:
    """Sum of the blocks that 0, 1, … `tokens` tokens take."""
    if tokens <= 0:
        return 0
    whole, rest = divmod(tokens, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)


def _spread(mean: float) -> tuple[int, ...]:
    """Lengths around a mean, from half to one and a half of it."""
    return tuple(max(1, round(mean * (0.5 + (index + 0.5) / POINTS))) for index in range(POINTS))


def _since(first: object, last: object, name: str) -> Histogram | None:
    before, now = (found.get(name) if isinstance(found, dict) else None for found in (first, last))
    return now.since(before) if isinstance(now, Histogram) else None


def _hit_ratio(recording: Recording) -> float | None:
    states = [moment.reading.snapshot for moment in recording.moments if moment.reading is not None]
    asked = _gain(states[0].prefix_query_tokens_total, states[-1].prefix_query_tokens_total)
    found = _gain(states[0].prefix_hit_tokens_total, states[-1].prefix_hit_tokens_total)
    return found / asked if asked and found is not None else None


def _gain(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None or now < before else now - before
