"""How early, how surely and how falsely does the risk score warn? On recorded traces and simulated scenarios.

    python bench/risk_traces.py [--scenarios 200] [--first 0] [--output bench/results]

An alarm is a score of at least 85. Alarms at most 30 s apart are one episode. An event (memory ran out, after a minute
without) counts as foreseen when an episode began before it and lasted until at most 60 s before it; its lead is the
time from that beginning, at most 120 s, and 0 when it was not foreseen. An episode is a false alarm when from its
beginning to 60 s after its end memory was never what was missing; one that the end of the recording leaves open is not
counted. How many of the false ones saw at least 97 % in use until then is told as `near_misses`; false they remain. All
detectors are judged alike, on the same readings. Every third scenario is held out: nothing was tuned on it, and its
figures stand apart.

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
from dataclasses import dataclass
from pathlib import Path

from risk_plot import plot_trace
from risk_simulator import Point, Scenario, build

from ullage_agent.adapters.vllm import parse_metrics
from ullage_agent.analysis import Analysis, Findings, Surroundings

ALARM = 85.0
MERGE_S = 30.0
AFTER_S = 60.0
MAX_LEAD_S = 120.0
HELD_OUT = 3
"""Every third scenario."""
NEAR_MISS = 0.97
TRACES = Path(__file__).parents[1] / "tests" / "agent" / "traces"
FIRST_PREEMPTION_S = 17.0
"""Of the pressure trace."""

Alarms = list[tuple[float, bool]]


@dataclass(frozen=True)
class Tally:
    """What one detector did in some scenarios."""

    leads: tuple[float, ...] = ()
    """Seconds of each event; 0 when it was not foreseen."""
    foreseen: int = 0
    false_alarms: int = 0
    near_misses: int = 0
    """Of the false alarms."""
    hours: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            (*self.leads, *other.leads), self.foreseen + other.foreseen,
            self.false_alarms + other.false_alarms, self.near_misses + other.near_misses, self.hours + other.hours,
        )  # fmt: skip

    def figures(self) -> dict[str, float | int | None]:
        leads = sorted(self.leads)
        return {
            "recall": round(self.foreseen / len(leads), 4) if leads else None,
            "lead_p50_s": round(statistics.median(leads), 1) if leads else None,
            "lead_p10_s": round(leads[len(leads) // 10], 1) if leads else None,
            "false_alarms_per_hour": round(self.false_alarms / self.hours, 3) if self.hours else None,
            "events": len(leads),
            "false_alarms": self.false_alarms,
            "near_misses": self.near_misses,
            "hours": round(self.hours, 2),
        }


def episodes(alarms: Alarms) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at, on in alarms:
        if not on:
            continue
        if found and at - found[-1][1] <= MERGE_S:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


def tally(alarms: Alarms, scenario: Scenario) -> Tally:
    events, duration = scenario.events, scenario.duration
    short = (*scenario.events, *scenario.shortages)
    spells = episodes(alarms)
    leads = []
    for event in events:
        before = [event - begin for begin, end in spells if begin < event and event <= end + AFTER_S]
        leads.append(min(MAX_LEAD_S, max(before, default=0.0)))
    false = [
        (begin, end)
        for begin, end in spells
        if end + AFTER_S <= duration and not any(begin <= moment <= end + AFTER_S for moment in short)
    ]
    near = sum(_nearly_full(scenario, begin, end + AFTER_S) for begin, end in false)
    return Tally(tuple(leads), sum(lead > 0 for lead in leads), len(false), near, duration / 3600)


def _nearly_full(scenario: Scenario, begin: float, end: float) -> bool:
    return any(_usage(point) >= NEAR_MISS for at, point in _read(scenario.points) if begin <= at <= end)


# -- detectors -----------------------------------------------------------------------------------------------------


def ours(points: Iterable[Point]) -> Iterator[tuple[float, Findings]]:
    analysis = Analysis()
    for point in points:
        if point.reading is not None:
            yield point.at, analysis.take(point.reading, point.at, point.around)


def score_alarms(points: Sequence[Point]) -> dict[str, Alarms]:
    """Of the whole score, and of the greatest of its terms but the classic one."""
    whole: Alarms = []
    rest: Alarms = []
    for at, found in ours(points):
        terms = found.risk.terms
        whole.append((at, (found.risk.score or 0.0) >= ALARM))
        rest.append((at, max((value for name, value in terms.items() if name != "classic"), default=0.0) >= ALARM))
    return {"ullage": whole, "ullage without classic": rest}


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


def detect(points: Sequence[Point]) -> dict[str, Alarms]:
    """Alarms of every detector."""
    return {**score_alarms(points), **{name: alarms_of(points) for name, alarms_of in BASELINES.items()}}


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
        for detector, found_alarms in detect(points).items():
            alarms = [at for at, on in found_alarms if on]
            lead = None if truth is None or not alarms else round(truth - alarms[0], 1)
            entry = results.setdefault(detector, {})
            if truth is not None:
                entry["pressure_lead_s"] = lead
            else:
                entry["load_alarms"] = float(len(episodes([(at, True) for at in alarms])))
    return results


# -- scenarios -----------------------------------------------------------------------------------------------------


def judge_scenarios(scenarios: Iterable[tuple[int, Scenario]]) -> dict[str, dict[str, Tally]]:
    """By detector: tallies of `tuned`, `held_out` and every family."""
    results: dict[str, dict[str, Tally]] = {name: {} for name in DETECTORS}
    for number, scenario in scenarios:
        part = "held_out" if is_held_out(number) else "tuned"
        for detector, alarms in detect(scenario.points).items():
            one = tally(alarms, scenario)
            for key in (part, scenario.family, scenario.flavour):
                results[detector][key] = results[detector].get(key, Tally()) + one
    return results


def is_held_out(number: int) -> bool:
    """A third of each family and of each kind of engine."""
    return (number // 9 + number % 9) % HELD_OUT == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario: others than were looked at")
    parser.add_argument("--output", type=Path, help="folder for the results and plots")
    arguments = parser.parse_args(argv)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    traces = judge_traces(arguments.output)
    for detector, figures in traces.items():
        print(f"trace  {detector:22} {figures}")
    results = judge_scenarios((number, build(number)) for number in _numbers(arguments.first, arguments.scenarios))
    document = summary(results, traces)
    for detector, parts in results.items():
        for part, one in parts.items():
            print(f"{detector:22} {part:12} {one.figures()}")
    print(f"{time.process_time() - began:.0f} s of CPU")
    if arguments.output is not None:
        by_part = {name: {part: one.figures() for part, one in parts.items()} for name, parts in results.items()}
        text = json.dumps({**document, "parts": by_part}, indent=1)
        (arguments.output / "risk_traces.json").write_text(text + "\n")
    print(json.dumps(document))
    return 0


def _numbers(first: int, count: int) -> range:
    return range(first, first + count)


def summary(results: dict[str, dict[str, Tally]], traces: dict[str, dict[str, float | None]]) -> dict[str, object]:
    def figures(detector: str) -> dict[str, object]:
        tuned = results[detector].get("tuned", Tally())
        held = results[detector].get("held_out", Tally())
        return {**(tuned + held).figures(), "held_out": held.figures(), "traces": traces[detector]}

    baselines = {name: figures(name) for name in DETECTORS if not name.startswith("ullage")}
    return {**figures("ullage"), "baselines": baselines, "without_classic": figures("ullage without classic")}


if __name__ == "__main__":
    sys.exit(main())
