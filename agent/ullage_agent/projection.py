"""How many tokens present and coming work will hold in the next minutes, by the lengths that were learned. Pure.

A fluid model of continuous batching: every running sequence gains tokens at one pace and ends as answers used to
end. The ages of those running are not told by engines; they are taken to have come in evenly over as long a time as
fits the tokens they hold now. With arrivals at a steady pace the model stays level, as such a server does, where a
straight line through its growth would not.

    held(t) = running · mean over ages x of S(x + r·t)/S(x) · (prompt + x + r·t)
            + waiting · S(r·t) · (prompt + r·t)
            + arrivals · ∫ S(r·u) · (prompt + r·u) du,   u from 0 to t

with S(x) the share of answers longer than x tokens, and r the tokens a second of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage_agent.lengths import Lengths

CELLS = 40
"""Resolution of lengths, and of time where sequences are fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine holds and gets. Tokens and seconds."""

    held_tokens: float
    running: int
    waiting: int
    arrivals_per_s: float
    tokens_per_s: float
    """Pace of one sequence."""
    prompt_tokens: float
    """What a new request's prompt takes beyond what it shares with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Tokens held at each time from now on."""

    times: tuple[float, ...]
    held: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.held)

    def reaches(self, tokens: float) -> float | None:
        """Seconds until `tokens` are held, straight lines between the times; None if they never are."""
        before_t, before = 0.0, self.held[0]
        for time, held in zip(self.times, self.held, strict=True):
            if held >= tokens:
                if held <= before:
                    return time
                return before_t + (time - before_t) * max(0.0, tokens - before) / (held - before)
            before_t, before = time, held
        return None


def project(load: Load, lengths: Lengths, horizon_s: float) -> Course:
    """The course of tokens held over `horizon_s` seconds."""
    cell = max(lengths.longest() / CELLS, load.tokens_per_s * horizon_s / (4 * CELLS))
    steps = max(1, min(4 * CELLS, round(load.tokens_per_s * horizon_s / cell)))
    survival = [lengths.survival(index * cell) for index in range(CELLS + steps + 1)]
    prompt = load.prompt_tokens
    ages = _ages(load, survival, cell)
    total_age = sum(ages) or 1.0
    held_now = sum(weight * (prompt + index * cell) for index, weight in enumerate(ages)) / total_age
    scale = load.held_tokens / held_now if held_now else 0.0  # shared prefixes hold less, half-filled blocks more
    times, held, came = [0.0], [load.held_tokens], 0.0
    pause = cell / load.tokens_per_s
    for step in range(1, steps + 1):
        old = sum(
            weight * survival[index + step] / survival[index] * (prompt + (index + step) * cell)
            for index, weight in enumerate(ages)
            if weight and survival[index]
        )
        fresh = survival[step] * (prompt + step * cell)
        came += load.arrivals_per_s * pause * (fresh + survival[step - 1] * (prompt + (step - 1) * cell)) / 2
        times.append(step * pause)
        held.append(old / total_age * scale + load.waiting * fresh + came)
    return Course(times=tuple(times), held=tuple(held))


def _ages(load: Load, survival: list[float], cell: float) -> list[float]:
    """How many running sequences there are of each age: as many as survive of arrivals that have gone on for the
    time at which the mean fits what is held. Without such a time, all have one age, or arrivals go on for ever."""
    if not load.running:
        return [1.0]
    wanted = max(0.0, load.held_tokens / load.running - load.prompt_tokens)
    weights: list[float] = []
    total = moment = 0.0
    for index in range(CELLS + 1):
        weights.append(survival[index])
        total += survival[index]
        moment += survival[index] * index * cell
        if total and moment / total >= wanted:
            return weights
    older = min(CELLS, round(wanted / cell))
    if survival[older]:
        return weights if wanted <= 1.5 * moment / max(total, 1e-9) else [0.0] * older + [1.0]
    return weights
