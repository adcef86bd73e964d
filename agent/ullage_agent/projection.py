"""How many tokens present and coming work will hold in the next minutes, by the lengths that were learned. Pure.

A fluid model of continuous batching: every running sequence gains tokens at one pace and ends as answers used to
end. The ages of those running are not told by engines; they are taken to have come in evenly over as long a time as
fits the tokens they hold now. With arrivals at a steady pace the model stays level, as such a server does, where a
straight line through its growth would not.

    held(t) = running · mean over ages x of S(x + r·t)/S(x) · (prompt + x + r·t)
            + waiting · S(r·t) · (prompt + r·t)
            + arrivals · ∫ S(r·u) · (prompt + r·u) du,   u from 0 to t

with S(x) the share of answers longer than x tokens, and r the tokens a second of one sequence.

Beside the mean goes its variance: each request ends or not by itself, prompts differ, arrivals come at random
(Poisson), and their pace is known only as well as it was counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from ullage_agent.lengths import Lengths
from ullage_agent.passage import Spread

CELLS = 96
"""Most cells that lengths are divided into."""
STEPS = 48
"""Steps in time."""


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
    prompt_deviation: float = 0.0
    """Standard deviation of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Present and coming work apart, because arrivals enter linearly: mean and variance of the tokens held."""

    times: tuple[float, ...]
    present: tuple[float, ...]
    """Tokens of those who run or wait now."""
    present_variance: tuple[float, ...]
    coming: tuple[float, ...]
    """Tokens of those who will have come by then, for one arrival a second."""
    coming_variance: tuple[float, ...]
    forgetting: float
    """Share of the requests that ends each second."""

    def spread(self, arrivals_per_s: float, arrivals_variance: float) -> Spread:
        """The distribution of what is held, at a pace of arrivals known to some variance."""
        means = [now + arrivals_per_s * new for now, new in zip(self.present, self.coming, strict=True)]
        variances = [
            now + arrivals_per_s * new + arrivals_variance * mean * mean
            for now, new, mean in zip(self.present_variance, self.coming_variance, self.coming, strict=True)
        ]
        return Spread(times=self.times, means=means, variances=variances, forgetting=self.forgetting)


def project(load: Load, lengths: Lengths, horizon_s: float) -> Outlook:
    """Tokens held over `horizon_s` seconds."""
    pause = horizon_s / STEPS
    cell = pause * load.tokens_per_s
    cells = max(1, min(CELLS, round(lengths.longest() / cell)))
    survival = [lengths.survival(index * cell) for index in range(cells + STEPS + 2)]
    # a request holds a token at least: nearly nothing would make `scale` nearly infinite
    prompt, own = max(1.0, load.prompt_tokens), load.prompt_deviation**2
    # what a request holds at an age, and its square, times the chance that it gets so old
    size = [prompt + index * cell for index in range(len(survival))]
    alive = list(map(mul, survival, size))
    alive_2 = [share * (tokens * tokens + own) for share, tokens in zip(survival, size, strict=True)]
    ages = _ages(load, survival, cell, cells)
    total = sum(ages)
    ages = [weight * load.running / total for weight in ages] if total else ages
    weights = [weight / survival[index] if survival[index] else 0.0 for index, weight in enumerate(ages)]
    weights_2 = [w / survival[index] if survival[index] else 0.0 for index, w in enumerate(weights)]
    held_now = sum(map(mul, weights, alive))
    scale = load.held_tokens / held_now if held_now else 0.0  # shared prefixes hold less, half-filled blocks more
    sure = [share * square for share, square in zip(survival, alive_2, strict=True)]
    rows = [(0.0, load.held_tokens, 0.0, 0.0, 0.0)]
    came = came_2 = 0.0
    for step in range(1, STEPS + 1):
        came += pause * (alive[step] + alive[step - 1]) / 2
        came_2 += pause * (alive_2[step] + alive_2[step - 1]) / 2
        ends = sum(map(mul, weights, alive_2[step:])) - sum(map(mul, weights_2, sure[step:]))
        rows.append(
            (
                step * pause,
                scale * sum(map(mul, weights, alive[step:])) + load.waiting * alive[step],
                max(0.0, scale * scale * ends) + load.waiting * max(0.0, alive_2[step] - alive[step] ** 2),
                came,
                came_2,
            )
        )
    columns = [tuple(column) for column in zip(*rows, strict=True)]
    return Outlook(
        times=columns[0], present=columns[1], present_variance=columns[2], coming=columns[3],
        coming_variance=columns[4], forgetting=load.tokens_per_s / max(1.0, lengths.answer_mean),
    )  # fmt: skip


def _ages(load: Load, survival: list[float], cell: float, cells: int) -> list[float]:
    """How many running sequences there are of each age: as many as survive of arrivals that have gone on for the
    time at which the mean fits what is held. Without such a time, all have one age, or arrivals go on for ever."""
    if not load.running:
        return [1.0]
    wanted = max(0.0, load.held_tokens / load.running - load.prompt_tokens)
    weights: list[float] = []
    total = moment = 0.0
    for index in range(cells + 1):
        weights.append(survival[index])
        total += survival[index]
        moment += survival[index] * index * cell
        if total and moment / total >= wanted:
            return weights
    older = min(cells, round(wanted / cell))
    if survival[older]:
        return weights if wanted <= 1.5 * moment / max(total, 1e-9) else [0.0] * older + [1.0]
    return weights
