"""Tables, charts and the headline of `eviction_quality`, from the results of all contestants.

Two measures of the same answers: the share of the score that is left, and the nats that a token of the right answer
loses, which still tells methods apart where greedy decoding finds every answer. Non-goal: running anything.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from lines import Chart, svg

CAN = 0.9
"""Score of the full cache below which a question is beyond the model."""
SURE = 0.5
"""Probability of an answer's least likely token, below which the full cache itself may say something else next time."""
HEADLINE = 0.2
HIGHEST = 1.0
"""Nats at the top of a chart. Who loses more has forgotten the answer, and how thoroughly does not matter."""
DRAWS = 2000
"""Resamplings for an interval."""


@dataclass(frozen=True, slots=True)
class Result:
    """Scores of one contestant on one context."""

    length: int
    context: str
    setting: str
    side: str
    """`ullage` or `kvpress`."""
    method: str | None
    """None: the full cache."""
    keep: float
    scores: dict[str, float]
    sure: dict[str, float] = field(default_factory=dict)
    """Of the full cache, by task: the probability of the right answer's least likely token."""
    blocks: int = 0
    freed: int = 0
    nats: dict[str, float] = field(default_factory=dict)
    """By task: mean negative log likelihood of a token of the right answer, after the right ones before it."""


class Results:
    """All results so far, kept in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        known = path.read_text().splitlines() if path is not None and path.exists() else []
        self.all = [Result(**json.loads(line)) for line in known]

    def add(self, results: Sequence[Result]) -> None:
        self.all += results
        if self._path is not None:
            with self._path.open("a") as file:
                file.writelines(json.dumps({n: getattr(r, n) for n in Result.__slots__}) + "\n" for r in results)

    def has(self, length: int, context: str, setting: str, side: str) -> bool:
        return any((r.length, r.context, r.setting, r.side) == (length, context, setting, side) for r in self.all)


Key = tuple[str, str, str, float]
"""Side, setting, method, budget."""
Found = Mapping[Key, Mapping[str, list[float]]]
"""A measure by task, one value for each context whose question of that task counts."""


def counted(results: Sequence[Result], least: float) -> Iterator[tuple[Result, Result, str]]:
    """Every result of a method with its side's full cache, for each task that this can do; text counts always."""
    whole = {(r.side, r.length, r.context, r.setting): r for r in results if r.method is None}
    for r in results:
        if r.method is None:
            continue
        full = whole[r.side, r.length, r.context, r.setting]
        for task in r.scores:
            if task == "text" or (full.scores[task] >= CAN and full.sure[task] >= least):
                yield r, full, task


def retention(results: Sequence[Result], least: float = SURE) -> Found:
    """Score over the full cache's."""
    found: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r, full, task in counted(results, least):
        found[r.side, r.setting, str(r.method), r.keep][task].append(r.scores[task] / full.scores[task])
    return found


def losses(results: Sequence[Result], least: float = SURE) -> Found:
    """Nats that a token of a right answer loses against the full cache, wherever they were measured."""
    found: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r, full, task in counted(results, least):
        if task in r.nats and task in full.nats:
            found[r.side, r.setting, str(r.method), r.keep][task].append(r.nats[task] - full.nats[task])
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def overall(tasks: Mapping[str, list[float]]) -> float:
    """Mean over all answers; text is told apart, as it is no answer."""
    return mean([value for task, values in tasks.items() if task != "text" for value in values])


# -- tables and charts -----------------------------------------------------------------------------------------------


def tables(results: Sequence[Result], keeps: Sequence[float], setting: str, least: float) -> Iterator[str]:
    """Lines of both tables; the second only if there is something to say."""
    yield from table(retention(results, least), keeps, setting, setting)
    lost = losses(results, least)
    if any(key[1] == setting for key in lost):
        yield ""
        yield from table(lost, keeps, setting, f"{setting}, nats lost")


def table(found: Found, keeps: Sequence[float], setting: str, heading: str) -> Iterator[str]:
    rows = _rows(found, setting)
    tasks = list(dict.fromkeys(t for key, by_task in found.items() if key[1] == setting for t in by_task))
    yield (
        f"{heading:28}"
        + "".join(f"{f'keep {keep:.0%}':>10}" for keep in keeps)
        + "   at 20 %, of so many answers: "
        + ", ".join(tasks)
    )
    for side, method in rows:
        line = [overall(found.get((side, setting, method, keep), {})) for keep in keeps]
        at = found.get((side, setting, method, HEADLINE), {})
        detail = "  ".join(f"{mean(at.get(task, [])):.3f}/{len(at.get(task, []))}" for task in tasks)
        yield f"{side + ' ' + method:28}" + "".join(f"{value:10.3f}" for value in line) + f"   {detail}"


def picture(results: Sequence[Result], keeps: Sequence[float], settings: Sequence[str], least: float) -> str:
    """A row of charts for each measure, a chart for each setting."""

    def charts(found: Found, top: float) -> list[Chart]:
        return [_chart(found, keeps, setting, top) for setting in settings if _rows(found, setting)]

    left = charts(retention(results, least), 1.0)
    rows = [("Share of the full cache's score that is left, by share of entries kept", left)]
    lost = charts(losses(results, least), HIGHEST)
    if lost:
        rows.append(
            (f"Nats lost per token of a right answer, by share of entries kept (above {HIGHEST:g}: not drawn)", lost)
        )
    return svg(*rows)


def _chart(found: Found, keeps: Sequence[float], setting: str, top: float) -> Chart:
    rows = _rows(found, setting)
    names = {row: f"{row[1]} (kvpress)" if row[0] == "kvpress" else row[1] for row in rows}
    lines = {names[row]: [overall(found.get((row[0], setting, row[1], keep), {})) for keep in keeps] for row in rows}
    lines = {name: values for name, values in lines.items() if not all(math.isnan(value) for value in values)}
    dashed = frozenset(name for row, name in names.items() if row[0] == "kvpress")
    title = "question asked after eviction" if setting == "unseen" else "question read before eviction"
    return Chart(title, [f"{keep:.0%}" for keep in keeps], lines, dashed, top)


def _rows(found: Found, setting: str) -> list[tuple[str, str]]:
    """Side and method."""
    return list(dict.fromkeys((side, method) for side, s, method, _ in found if s == setting))


# -- one line --------------------------------------------------------------------------------------------------------


def headline(results: Sequence[Result], keeps: Sequence[float], setting: str, least: float = SURE) -> dict[str, Any]:
    """At the budget of 20 %, or the nearest there is."""
    keep = min(keeps, key=lambda k: abs(k - HEADLINE))
    left, lost = (_by_side(found, setting, keep) for found in (retention(results, least), losses(results, least)))
    cut = [r for r in results if r.side == "ullage" and r.method is not None and (r.setting, r.keep) == (setting, keep)]
    freed = sum(r.freed for r in cut) / max(1, sum(r.blocks for r in cut))
    return {
        "keep": keep,
        "retention": left["ullage"],
        "kvpress": left["kvpress"],
        "bytes_freed_ratio": round(freed, 4),
        "nats": lost["ullage"],
        "kvpress_nats": lost["kvpress"],
        "nats_gain": gain(results, keep, setting, least),
    }


def _by_side(found: Found, setting: str, keep: float) -> dict[str, dict[str, float]]:
    by_side: dict[str, dict[str, float]] = {"ullage": {}, "kvpress": {}}
    for (side, s, method, k), tasks in found.items():
        if (s, k) == (setting, keep) and tasks.keys() - {"text"}:
            by_side[side][method] = round(overall(tasks), 4)
    return by_side


def gain(results: Sequence[Result], keep: float, setting: str, least: float = SURE) -> dict[str, Any] | None:
    """What our best policy loses less than the best method of kvpress, in nats per token of a right answer.

    Over the answers that count on both sides, with a 90 % interval, which takes two contexts at least. None without
    such answers. Who is best is judged by the same answers, on either side.
    """
    lost: dict[str, dict[str, dict[tuple[int, str, str], float]]] = defaultdict(lambda: defaultdict(dict))
    for r, full, task in counted(results, least):
        if (r.setting, r.keep) == (setting, keep) and task != "text" and task in r.nats and task in full.nats:
            lost[r.side][str(r.method)][r.length, r.context, task] = r.nats[task] - full.nats[task]
    if not (lost["ullage"] and lost["kvpress"]):
        return None
    ours, theirs = (min(lost[side], key=_mean_of(lost[side])) for side in ("ullage", "kvpress"))
    differences: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (length, context, task), nats in lost["ullage"][ours].items():
        other = lost["kvpress"][theirs].get((length, context, task))
        if other is not None:
            differences[length, context].append(other - nats)
    if not differences:
        return None
    middle, low, high = (round(value, 4) for value in interval(list(differences.values())))
    bounds = {"low": low, "high": high} if len(differences) > 1 else {"low": None, "high": None}
    return {"policy": ours, "against": theirs, "mean": middle, **bounds, "contexts": len(differences)}


def _mean_of(methods: Mapping[str, Mapping[Any, float]]) -> Callable[[str], float]:
    return lambda method: mean(list(methods[method].values()))


def interval(groups: Sequence[Sequence[float]], draws: int = DRAWS, seed: int = 7) -> tuple[float, float, float]:
    """Mean of all values and its 90 % bootstrap interval, whole groups resampled: values of one group go together.

    Says nothing of groups that were never seen: with few groups it is too narrow, and of one it is a point.
    """
    parts = [(sum(group), len(group)) for group in groups]
    draw = Random(seed)

    def middle(chosen: Sequence[tuple[float, int]]) -> float:
        return sum(total for total, _ in chosen) / sum(count for _, count in chosen)

    means = sorted(middle(draw.choices(parts, k=len(parts))) for _ in range(draws))
    return middle(parts), means[round(0.05 * (draws - 1))], means[round(0.95 * (draws - 1))]
