"""How early, how surely and how falsely does the risk score warn? On recorded traces and simulated scenarios.

    python bench/risk_traces.py [--scenarios 200] [--first 0] [--output bench/results] [--name risk_traces]
    python bench/risk_traces.py --first 0 2000    # two sets as one

An alarm is a score of at least 85. All detectors are judged alike (`risk_judge.py`), on the same readings. Every third
scenario is held out: nothing was tuned on it, and its figures stand apart. Beside each baseline stands what the score
does at another alarm level, with no more false alarms than the baseline has (`at_equal_false_alarms`), with a 90 %
interval of the recall that it gains (`recall_gain`).

The last line is JSON: figures over all scenarios, over the held-out ones, of the recorded traces, and of the baselines.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from risk_judge import ALARM, LEVELS, NEAR_MISS, Alarms, Tally, at_equal_false_alarms, episodes, recall_gain, tally
from risk_plot import plot_trace, plot_tradeoff
from risk_simulator import Point, Scenario, build

from ullage_agent.adapters.vllm import parse_metrics
from ullage_agent.analysis import Analysis, Findings, Surroundings

HELD_OUT = 3
"""Every third scenario."""
TRACES = Path(__file__).parents[1] / "tests" / "agent" / "traces"
FIRST_PREEMPTION_S = 17.0
"""Of the pressure trace."""

Scores = list[tuple[float, float, float]]
"""Moment, whole score, and the greatest of its terms but the classic one."""


# -- detectors -----------------------------------------------------------------------------------------------------


def ours(points: Iterable[Point]) -> Iterator[tuple[float, Findings]]:
    analysis = Analysis()
    for point in points:
        if point.reading is not None:
            yield point.at, analysis.take(point.reading, point.at, point.around)


def scores(points: Sequence[Point]) -> Scores:
    def rest(terms: dict[str, float]) -> float:
        return max((value for name, value in terms.items() if name != "classic"), default=0.0)

    return [(at, found.risk.score or 0.0, rest(found.risk.terms)) for at, found in ours(points)]


def usage_above(limit: float) -> Callable[[Sequence[Point]], Alarms]:
    return lambda points: [(at, _usage(point) > limit) for at, point in _read(points)]


def classic_formula(points: Sequence[Point]) -> Alarms:
    """As first published: external over free blocks; 1 without any, 0 where the engine tells nothing."""
    alarms = []
    for at, point in _read(points):
        assert point.reading is not None
        state = point.reading.snapshot
        external = 0.0
        if state.free_blocks == 0:
            external = 1.0
        elif state.free_blocks and state.largest_free_run_blocks is not None:
            external = 1.0 - state.largest_free_run_blocks / state.free_blocks
        alarms.append((at, 100 * (0.6 * _usage(point) + 0.4 * external) >= ALARM))
    return alarms


def classic_of_neighbours(points: Sequence[Point]) -> Alarms:
    """The same with external over free and cached blocks, by their longest run of neighbours; where runs are known."""
    alarms = []
    for at, point in _read(points):
        assert point.reading is not None
        state = point.reading.snapshot
        external = 0.0
        if point.neighbours is not None:
            available = (state.free_blocks or 0) + (state.reclaimable_blocks or 0)
            external = 1.0 - min(point.neighbours, available) / available if available else 1.0
        alarms.append((at, 100 * (0.6 * _usage(point) + 0.4 * external) >= ALARM))
    return alarms


def linear_extrapolation(points: Sequence[Point]) -> Alarms:
    """A least-squares line through the last 30 s of usage, alarm when it is full within 30 s."""
    alarms: Alarms = []
    recent: list[tuple[float, float]] = []
    for at, point in _read(points):
        recent = [(then, usage) for then, usage in (*recent, (at, _usage(point))) if at - then <= 30.0]
        alarms.append((at, len(recent) >= 3 and _line_reaches(recent, at + 30.0) >= 1.0))
    return alarms


BASELINES: dict[str, Callable[[Sequence[Point]], Alarms]] = {
    "usage>0.90": usage_above(0.90),
    "usage>0.95": usage_above(0.95),
    "classic": classic_formula,
    "classic, neighbours": classic_of_neighbours,
    "linear": linear_extrapolation,
}
DETECTORS = ("ullage", "ullage without classic", *BASELINES)


def detect(points: Sequence[Point], scored: Scores) -> dict[str, Alarms]:
    """Alarms of every detector."""
    return {
        "ullage": [(at, whole >= ALARM) for at, whole, _ in scored],
        "ullage without classic": [(at, rest >= ALARM) for at, _, rest in scored],
        **{name: alarms_of(points) for name, alarms_of in BASELINES.items()},
    }


def _read(points: Sequence[Point]) -> Iterator[tuple[float, Point]]:
    return ((point.at, point) for point in points if point.reading is not None)


def _usage(point: Point) -> float:
    """The greatest share in use of pool, device and control group: a baseline sees what the score sees."""
    assert point.reading is not None
    state = point.reading.snapshot
    shares = [(state.hot_blocks or 0) / (state.total_blocks or 1)]
    shares += [(device.used_bytes or 0) / (device.total_bytes or 1) for device in point.around.devices]
    if point.around.host is not None:
        shares.append((point.around.host.used_bytes or 0) / (point.around.host.limit_bytes or 1))
    return max(shares)


def _line_reaches(points: list[tuple[float, float]], at: float) -> float:
    times, values = zip(*points, strict=True)
    line = statistics.linear_regression(times, values)
    return line.intercept + line.slope * at


# -- recorded traces -----------------------------------------------------------------------------------------------


def load_trace(name: str) -> list[Point]:
    text = lzma.decompress((TRACES / name).read_bytes()).decode()
    parts = re.split(r"^### scrape ([\d.]+)\n", text, flags=re.MULTILINE)[1:]
    begin = float(parts[0])
    return [
        Point(at=float(stamp) - begin, reading=parse_metrics(body.encode(), float(stamp)), around=Surroundings())
        for stamp, body in zip(parts[::2], parts[1::2], strict=True)
    ]


def judge_traces(output: Path | None) -> dict[str, dict[str, float | None]]:
    results: dict[str, dict[str, float | None]] = {}
    for name, truth in (("pressure", FIRST_PREEMPTION_S), ("load", None)):
        points = load_trace(f"vllm-0.32-{name}.prom.xz")
        found = list(ours(points))
        if output is not None:
            plot_trace(output / f"risk_trace_{name}.svg", name, points, found, truth)
        for detector, found_alarms in detect(points, scores(points)).items():
            alarms = [at for at, on in found_alarms if on]
            lead = None if truth is None or not alarms else round(truth - alarms[0], 1)
            entry = results.setdefault(detector, {})
            if truth is not None:
                entry["pressure_lead_s"] = lead
            else:
                entry["load_alarms"] = float(len(episodes([(at, True) for at in alarms])))
    return results


# -- scenarios -----------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What all detectors did in all scenarios."""

    parts: dict[str, dict[str, Tally]] = field(default_factory=lambda: {name: {} for name in DETECTORS})
    """By detector: tallies of `tuned`, `held_out` and every family."""
    single: dict[str, list[Tally]] = field(default_factory=lambda: {name: [] for name in DETECTORS})
    """By detector: the tally of each scenario."""
    levels: dict[float, list[Tally]] = field(default_factory=lambda: {level: [] for level in LEVELS})
    """Of the score, by the level that counts as an alarm: the tally of each scenario."""

    @property
    def curve(self) -> dict[float, Tally]:
        return {level: sum(tallies, Tally()) for level, tallies in self.levels.items()}

    def whole(self, detector: str) -> Tally:
        return sum(self.single[detector], Tally())


def judge_scenarios(scenarios: Iterable[tuple[int, Scenario]]) -> Verdict:
    verdict = Verdict()
    for number, scenario in scenarios:
        part = "held_out" if is_held_out(number) else "tuned"
        scored = scores(scenario.points)
        nearly_full = partial(_nearly_full, scenario)
        for detector, alarms in detect(scenario.points, scored).items():
            one = tally(alarms, scenario, nearly_full)
            verdict.single[detector].append(one)
            for key in (part, scenario.family, scenario.flavour):
                verdict.parts[detector][key] = verdict.parts[detector].get(key, Tally()) + one
        for level in LEVELS:
            alarms = [(at, whole >= level) for at, whole, _ in scored]
            verdict.levels[level].append(tally(alarms, scenario, nearly_full))
    return verdict


def _nearly_full(scenario: Scenario, begin: float, end: float) -> bool:
    return any(_usage(point) >= NEAR_MISS for at, point in _read(scenario.points) if begin <= at <= end)


def is_held_out(number: int) -> bool:
    """A third of each family and of each kind of engine."""
    return (number // 9 + number % 9) % HELD_OUT == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument(
        "--first", type=int, nargs="+", default=[0], help="number of the first scenario, or of each set's first"
    )
    parser.add_argument("--output", type=Path, help="folder for the results and plots")
    parser.add_argument("--name", default="risk_traces", help="of the results in it")
    arguments = parser.parse_args(argv)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    traces = judge_traces(arguments.output)
    for detector, figures in traces.items():
        print(f"trace  {detector:22} {figures}")
    numbers = [first + number for first in arguments.first for number in range(arguments.scenarios)]
    verdict = judge_scenarios((number, build(number)) for number in numbers)
    document = summary(verdict, traces)
    for detector, parts in verdict.parts.items():
        for part, one in parts.items():
            print(f"{detector:22} {part:12} {one.figures()}")
    print(f"{time.process_time() - began:.0f} s of CPU")
    if arguments.output is not None:
        save(verdict, document, arguments.output, arguments.name)
    print(json.dumps(document))
    return 0


def summary(verdict: Verdict, traces: dict[str, dict[str, float | None]]) -> dict[str, object]:
    def figures(detector: str) -> dict[str, object]:
        held = verdict.parts[detector].get("held_out", Tally())
        return {**verdict.whole(detector).figures(), "held_out": held.figures(), "traces": traces[detector]}

    def equal(detector: str) -> dict[str, object]:
        gain = recall_gain(verdict.levels, verdict.single[detector])
        return {
            **at_equal_false_alarms(verdict.curve, verdict.whole(detector)),
            "recall_gain": None if gain is None else [round(bound, 3) for bound in gain],
        }

    return {
        **figures("ullage"),
        "baselines": {name: figures(name) for name in BASELINES},
        "without_classic": figures("ullage without classic"),
        "at_equal_false_alarms": {name: equal(name) for name in BASELINES},
    }


def save(verdict: Verdict, document: dict[str, object], folder: Path, name: str) -> None:
    by_part = {key: {part: one.figures() for part, one in parts.items()} for key, parts in verdict.parts.items()}
    whole = verdict.curve
    curve = {f"{level:g}": one.figures() for level, one in whole.items()}
    text = json.dumps({**document, "parts": by_part, "curve": curve}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")

    def place(one: Tally) -> tuple[float, float]:
        return one.false_alarms / one.hours, 100 * one.recall

    plot_tradeoff(
        folder / f"{name}_tradeoff.svg",
        [(*place(whole[level]), f"{level:g}") for level in sorted(whole)],
        [(*place(verdict.whole(key)), key) for key in BASELINES],
        f"{ALARM:g}",
    )


if __name__ == "__main__":
    sys.exit(main())
