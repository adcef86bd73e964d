"""Recordings of one agent: what it read and what was done, compact, for replay. `docs/recording.md` has the format.

One JSON object a line, gzip where the name ends in `.gz`. The first line says what the file is; a sample line holds
only the values that changed since the sample before it, so that an idle engine costs a few bytes a second. `Reader`
gives whole samples back, and reads a file whose end is missing as far as it goes.

Errors:
    RecordError (ValueError): not a recording, or of a newer version.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ullage_agent.adapters.base import Reading
from ullage_agent.analysis import Surroundings
from ullage_agent.errors import ConfigError
from ullage_agent.histogram import Histogram
from ullage_agent.wire import ActionResult, EngineIdentity, Snapshot, Violation

log = logging.getLogger(__name__)

FORMAT = "ullage-recording"
VERSION = 1
MAX_BYTES = 512 << 20
"""Writing ends here: a recorder must not fill the disk of a pod."""
WHOLE_EVERY = 600
"""A sample line with every value comes this often, so that a reader may start in the middle."""


class RecordError(ValueError):
    """Not a recording that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One reading, as `Analysis.take` needs it, and the score it got then."""

    at: float
    """Monotonic seconds since the recording began."""
    reading: Reading
    around: Surroundings
    score: float | None
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFailure:
    """A reading that failed."""

    at: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAction:
    """An action that ended."""

    at: float
    origin: str
    reason: str
    result: ActionResult


Entry = RecordedSample | RecordedFailure | RecordedAction


class Recorder:
    """Appends to one file. Used from the event loop only; a full disk ends the recording, not the agent."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._last: dict[str, Any] = {}
        self._began: float | None = None
        self._count = 0
        self._written = 0
        try:
            raw: BinaryIO = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}; give a file that can be written") from error
        packed = gzip.GzipFile(fileobj=raw, mode="wb", filename="", compresslevel=6) if path.suffix == ".gz" else raw
        self._file: io.BufferedIOBase | BinaryIO | None = packed
        self._raw = raw
        self._write({"format": FORMAT, "version": VERSION})

    def sample(
        self, at: float, reading: Reading, around: Surroundings, score: float | None, terms: Mapping[str, float]
    ) -> None:
        """Enter a reading; `at` is monotonic."""
        values = flatten(reading, around)
        whole = self._count % WHOLE_EVERY == 0
        changed = values if whole else {name: value for name, value in values.items() if self._last.get(name) != value}
        gone = [] if whole else [name for name in self._last if name not in values]
        line: dict[str, Any] = {"t": self._since(at), "s": changed, "r": score, "k": dict(terms)}
        if gone:
            line["-"] = gone
        if whole:
            line["w"] = 1
        self._last, self._count = values, self._count + 1
        self._write(line)

    def failure(self, at: float, error: str) -> None:
        """Enter that a reading failed."""
        self._write({"t": self._since(at), "e": error})

    def action(self, at: float, origin: str, reason: str, result: ActionResult) -> None:
        """Enter how an action ended."""
        self._write({"t": self._since(at), "a": msgspec.to_builtins(result), "o": origin, "y": reason})

    def close(self) -> None:
        """End the file; safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
                self._raw.close()
            except OSError as error:
                log.error("the recording could not be ended: %s", error)

    def _since(self, at: float) -> float:
        if self._began is None:
            self._began = at
        return round(at - self._began, 3)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = msgspec.json.encode(line) + b"\n"
        try:
            self._file.write(data)
            if self._count % 16 == 0:
                self._file.flush()
        except OSError as error:
            log.error("the recording ends here: %s", error)
            self.close()
            return
        self._written += len(data)
        if self._written >= self._max_bytes:
            log.warning("the recording ends here: it has reached %d bytes", self._max_bytes)
            self.close()


def read_recording(path: Path) -> Iterator[Entry]:
    """The entries of a recording, in order. One that was cut off ends where it was cut.

    Raises:
        RecordError: not a recording, or a line of it makes no sense.
        OSError: the file cannot be read.
    """
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        lines = _lines(gzip.GzipFile(fileobj=raw) if packed else raw)
        _check_header(next(lines, b""), path)
        values: dict[str, Any] = {}
        for number, line in enumerate(lines, start=2):
            if not line.endswith(b"\n"):
                return  # the agent was killed while writing it
            try:
                entry = msgspec.json.decode(line)
                values = _advance(values, entry)
                yield _entry(entry, values)
            except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
                raise RecordError(f"{path}: line {number} makes no sense ({error})") from error


def flatten(reading: Reading, around: Surroundings) -> dict[str, Any]:
    """A reading as names and plain values; None values are left out."""
    found: dict[str, Any] = {}
    for name in Snapshot.__slots__:
        value = getattr(reading.snapshot, name)
        if name == "ranks":
            value = msgspec.to_builtins(value) or None
        found[f"s.{name}"] = value
    found |= {f"i.{name}": getattr(reading.identity, name) for name in EngineIdentity.__slots__}
    for name, histogram in reading.histograms.items():
        found[f"h.{name}"] = [["+Inf" if math.isinf(le) else le, count] for le, count in histogram.buckets]
    found["v"] = msgspec.to_builtins(reading.violations) or None
    found["d"] = msgspec.to_builtins(around.devices) or None
    found["m"] = msgspec.to_builtins(around.host)
    found["c"] = around.canary_error
    return {name: value for name, value in found.items() if value is not None}


def unflatten(values: Mapping[str, Any]) -> tuple[Reading, Surroundings]:
    """The inverse of `flatten`."""
    parts: dict[str, dict[str, Any]] = {"s": {}, "i": {}, "h": {}}
    for key, value in values.items():
        kind, _, name = key.partition(".")
        if name:
            parts[kind][name] = value
    histograms = {
        name: Histogram(tuple((math.inf if le == "+Inf" else float(le), float(count)) for le, count in pairs))
        for name, pairs in parts["h"].items()
    }
    reading = Reading(
        snapshot=msgspec.convert(parts["s"], type=Snapshot),
        identity=msgspec.convert(parts["i"], type=EngineIdentity),
        violations=msgspec.convert(values.get("v", ()), type=tuple[Violation, ...]),
        histograms=histograms,
    )
    plain = {"devices": values.get("d", ()), "host": values.get("m"), "canary_error": values.get("c")}
    return reading, msgspec.convert(plain, type=Surroundings)


def _advance(values: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    if "s" not in entry:
        return values
    base = {} if entry.get("w") else {name: value for name, value in values.items() if name not in entry.get("-", ())}
    return {**base, **entry["s"]}


def _entry(entry: dict[str, Any], values: dict[str, Any]) -> Entry:
    at = float(entry["t"])
    if "e" in entry:
        return RecordedFailure(at=at, error=str(entry["e"]))
    if "a" in entry:
        result = msgspec.convert(entry["a"], type=ActionResult)
        return RecordedAction(at=at, origin=str(entry["o"]), reason=str(entry["y"]), result=result)
    reading, around = unflatten(values)
    return RecordedSample(at=at, reading=reading, around=around, score=entry["r"], terms=entry["k"])


def _lines(file: gzip.GzipFile | BinaryIO) -> Iterator[bytes]:
    while True:
        try:
            line = file.readline()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return  # a packed file that was cut off
        if not line:
            return
        yield line


def _check_header(line: bytes, path: Path) -> None:
    try:
        header = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path} is no recording of ullage-agent ({error})") from error
    if header.get("format") != FORMAT:
        raise RecordError(f"{path} is no recording of ullage-agent")
    if header.get("version") != VERSION:
        raise RecordError(f"{path}: version {header.get('version')!r} of the format is not {VERSION}; upgrade ullage")
