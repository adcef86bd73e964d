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
from operator import mul

from ullage_agent.lengths import Lengths

CELLS = 24
"""Resolution of lengths."""
STEPS = 48
"""Most steps in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine holds. Tokens and seconds."""

    held_tokens: float
    running: int
    waiting: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The course in two parts, because arrivals enter it linearly and are the least certain."""

    times: tuple[float, ...]
    present: tuple[float, ...]
    """Tokens of those who run or wait now."""
    coming: tuple[float, ...]
    """Tokens of those who will have come by then, for one arrival a second."""

    def course(self, arrivals_per_s: float) -> Course:
        """The course at a pace of arrivals."""
        held = (now + arrivals_per_s * new for now, new in zip(self.present, self.coming, strict=True))
        return Course(times=self.times, held=tuple(held))


def project(load: Load, lengths: Lengths, horizon_s: float) -> Outlook:
    """Tokens held over `horizon_s` seconds."""
    cell = max(lengths.longest() / CELLS, load.tokens_per_s * horizon_s / STEPS)
    steps = max(1, min(STEPS, round(load.tokens_per_s * horizon_s / cell)))
    survival = [lengths.survival(index * cell) for index in range(CELLS + steps + 1)]
    # a request holds a token at least: nearly nothing would make `scale` nearly infinite
    prompt, pause = max(1.0, load.prompt_tokens), cell / load.tokens_per_s
    # tokens that a request holds at an age, times the chance that it gets so old
    alive = [share * (prompt + index * cell) for index, share in enumerate(survival)]
    ages = _ages(load, survival, cell)
    weights = [weight / survival[index] if survival[index] else 0.0 for index, weight in enumerate(ages)]
    held_now = sum(map(mul, weights, alive))
    scale = load.held_tokens / held_now if held_now else 0.0  # shared prefixes hold less, half-filled blocks more
    times, present, coming, came = [0.0], [load.held_tokens], [0.0], 0.0
    for step in range(1, steps + 1):
        came += pause * (alive[step] + alive[step - 1]) / 2
        times.append(step * pause)
        present.append(scale * sum(map(mul, weights, alive[step:])) + load.waiting * alive[step])
        coming.append(came)
    return Outlook(times=tuple(times), present=tuple(present), coming=tuple(coming))


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
