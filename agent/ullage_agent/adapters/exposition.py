"""Reads the lines of interest of a Prometheus exposition, and judges them by a metric contract. Pure.

`_created` lines are noise (a time of birth for every counter) and are skipped; lines that no contract names are
skipped unparsed, which is most of a 60 kB exposition. Freshness: a metric that a contract names is looked for in
every answer, so one that an engine stops exporting becomes a violation at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

from ullage_agent.adapters.contract import Field, Ledger, Scalar
from ullage_agent.errors import EngineProtocolError
from ullage_agent.histogram import Histogram, add, from_cumulative

Labels = dict[str, str]
_PARTS = ("_bucket", "_created", "_sum", "_count")


@dataclass(frozen=True)
class ExpositionContract:
    """What is promised by name. Each name is looked for under its aliases too, in order."""

    prefix: str
    """What the engine's own names begin with: renamed metrics are guessed among these."""
    fields: tuple[Field, ...]
    infos: tuple[str, ...] = ()
    """Metrics whose labels are of interest."""
    histograms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Name of each histogram for the agent, and its names for engines. An absent one is no violation: engines
    offer some by option only."""
    rank_label: str = "engine"
    """Label that tells data-parallel ranks apart."""
    replica_labels: tuple[str, ...] = ()
    """Labels of parallel workers that all report the same thing: the greatest of their values counts."""
    part_labels: tuple[str, ...] = ()
    """Labels that, where they say anything, mark a part of a number that is told as a whole too: left out."""

    @cached_property
    def names(self) -> frozenset[str]:
        promised = (name for item in self.fields for name in (item.source, *item.aliases))
        buckets = (f"{name}_bucket" for _, names in self.histograms for name in names)
        return frozenset((*promised, *self.infos, *buckets))


@dataclass(slots=True)
class Exposition:
    """The samples of interest, by name: labels and value of each."""

    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    other_names: set[str] = field(default_factory=set)
    """The engine's names that the contract does not know: where a renamed metric would be found."""


def parse_exposition(body: bytes, contract: ExpositionContract, path: str) -> Exposition:
    """Read the lines that the contract names.

    Raises:
        EngineProtocolError: one of them is no line of an exposition.
    """
    result = Exposition()
    wanted: list[str] = []
    for line in body.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in contract.names:
            wanted.append(line)
        elif name.startswith(contract.prefix) and not name.endswith(_PARTS):
            result.other_names.add(name)
    try:
        for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
            for sample in family.samples:
                if any(sample.labels.get(label) for label in contract.part_labels):
                    continue
                result.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise EngineProtocolError(f"{path}: not a Prometheus exposition ({error})") from error
    return result


def find(exposition: Exposition, promised: Field, ledger: Ledger) -> list[tuple[Labels, float]]:
    """Samples of a promised metric; a violation where there are none."""
    for name in (promised.source, *promised.aliases):
        if name in exposition.samples:
            return exposition.samples[name]
    ledger.absent(promised, exposition.other_names)
    return []


def by_rank(
    exposition: Exposition,
    promised: Field,
    contract: ExpositionContract,
    ledger: Ledger,
    *,
    where: tuple[str, str] | None = None,
) -> dict[str, Scalar | None]:
    """A promised number of each rank: summed over other labels, the greatest of replicas. None: a part is bad.

    `where` is a label and the value that samples must have to count.
    """
    ranks: dict[str, dict[tuple[str, ...], Scalar | None]] = {}
    for labels, raw in find(exposition, promised, ledger):
        if where is not None and labels.get(where[0]) != where[1]:
            continue
        value = ledger.accept(promised, whole(raw) if promised.kind == "int" else float(raw))
        replicas = ranks.setdefault(labels.get(contract.rank_label, ""), {})
        replica = tuple(labels.get(name, "") for name in contract.replica_labels)
        replicas[replica] = _plus(replicas.get(replica, 0), value)
    return {rank: _greatest(replicas.values()) for rank, replicas in ranks.items()}


def total(ranks: Mapping[str, Scalar | None]) -> Scalar | None:
    """Sum over ranks; None when there are none or one is unknown."""
    result: Scalar | None = 0
    for value in ranks.values():
        result = _plus(result, value)
    return result if ranks else None


def read_histograms(exposition: Exposition, contract: ExpositionContract, ledger: Ledger) -> dict[str, Histogram]:
    """The histograms that are there, summed over ranks. One that is no cumulative histogram is a violation."""
    found: dict[str, Histogram] = {}
    for attribute, names in contract.histograms:
        name = next((name for name in names if f"{name}_bucket" in exposition.samples), None)
        if name is None:
            continue
        merged = _histogram(exposition.samples[f"{name}_bucket"], contract)
        if merged is None:
            ledger.report(name, "out_of_range", "its buckets are no cumulative histogram")
        else:
            found[attribute] = merged
    return found


def whole(value: float) -> int | float:
    """Expositions write counts as floats; one that is no whole number stays a float, to be judged."""
    number = float(value)  # the parser gives whole numbers as int
    return int(number) if number.is_integer() else number


def digits(text: str | None) -> object:
    """A count out of a label; what is none stays as it is, to be judged."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else text


def first_label(samples: Iterable[tuple[Labels, float]], name: str) -> str | None:
    """The first value of a label, cut to a readable length."""
    return next((labels[name][:256] for labels, _ in samples if name in labels), None)


def _histogram(samples: list[tuple[Labels, float]], contract: ExpositionContract) -> Histogram | None:
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for labels, count in samples:
        key = tuple(sorted((name, text) for name, text in labels.items() if name != "le"))
        try:
            series.setdefault(key, []).append((float(labels.get("le", "nan")), float(count)))
        except ValueError:
            return None
    ranks: dict[str, dict[tuple[str, ...], list[Histogram]]] = {}
    for key, pairs in series.items():
        part, named = from_cumulative(pairs), dict(key)
        if part is None:
            return None
        replica = tuple(named.get(name, "") for name in contract.replica_labels)
        ranks.setdefault(named.get(contract.rank_label, ""), {}).setdefault(replica, []).append(part)
    sums = [[add(parts) for parts in replicas.values()] for replicas in ranks.values()]
    if any(whole is None for replicas in sums for whole in replicas):
        return None
    # parallel workers say the same thing: keep the one that says most
    return add(max((w for w in replicas if w is not None), key=lambda item: item.count) for replicas in sums)


def _plus(one: Scalar | None, other: Scalar | None) -> Scalar | None:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return None


def _greatest(values: Iterable[Scalar | None]) -> Scalar | None:
    numbers = list(values)
    known = [value for value in numbers if isinstance(value, int | float)]
    return max(known) if known and len(known) == len(numbers) else None
