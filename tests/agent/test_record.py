"""What is recorded comes back as it was, whatever happened to the file."""

import gzip
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters.base import Reading
from ullage_agent.analysis import Analysis, Surroundings
from ullage_agent.errors import ConfigError
from ullage_agent.histogram import Histogram
from ullage_agent.record import (
    RecordedAction,
    RecordedFailure,
    RecordedSample,
    Recorder,
    RecordError,
    flatten,
    read_recording,
    unflatten,
)
from ullage_agent.wire import ActionResult, Device, EngineIdentity, Host, Rank, Snapshot, Violation

IDENTITY = EngineIdentity(type="fake", instance="i", model="m")
HISTOGRAM = Histogram(((0.5, 1.0), (math.inf, 3.0)))
AROUND = Surroundings(devices=(Device(index=0, total_bytes=9),), host=Host(used_bytes=5), canary_error="x")


def reading(**fields: Any) -> Reading:
    return Reading(
        snapshot=Snapshot(sampled_at=1.0, ranks=(Rank(name="0", hot_blocks=1),), **fields),
        identity=IDENTITY,
        violations=(Violation(metric="m", problem="missing", detail="d"),),
        histograms={"ttft": HISTOGRAM},
    )


def test_nothing_is_lost_in_flattening() -> None:
    original = reading(hot_blocks=5, draining=False, step_age_s=0.5)
    assert unflatten(flatten(original, AROUND)) == (original, AROUND)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_recording_comes_back(tmp_path: Path, name: str) -> None:
    recorder = Recorder(tmp_path / name)
    result = ActionResult(action="evict", outcome="Succeeded", message="freed", blocks_freed=3)
    recorder.sample(100.0, reading(hot_blocks=5, waiting=2), AROUND, 50.0, {"classic": 50.0})
    recorder.sample(101.0, reading(hot_blocks=6), Surroundings(), None, {})
    recorder.failure(102.0, "gone")
    recorder.action(103.5, "reflex", "why", result)
    recorder.close()
    recorder.close()
    first, second, failure, action = read_recording(tmp_path / name)
    assert isinstance(first, RecordedSample) and isinstance(second, RecordedSample)
    assert (first.at, first.reading, first.around) == (0.0, reading(hot_blocks=5, waiting=2), AROUND)
    assert (first.score, first.terms) == (50.0, {"classic": 50.0})
    assert (second.at, second.reading, second.score) == (1.0, reading(hot_blocks=6), None)
    assert second.reading.snapshot.waiting is None
    assert failure == RecordedFailure(at=2.0, error="gone")
    assert action == RecordedAction(at=3.5, origin="reflex", reason="why", result=result)


def test_an_idle_engine_costs_little(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    for second in range(100):
        recorder.sample(float(second), reading(hot_blocks=5), Surroundings(), 0.0, {})
    recorder.close()
    assert (tmp_path / "r").stat().st_size < 100 * 60 + 1500


@pytest.mark.parametrize("name", ["r", "r.gz"])
def test_a_killed_recorder_leaves_a_readable_file(tmp_path: Path, name: str) -> None:
    recorder = Recorder(tmp_path / name)
    for second in range(50):
        recorder.sample(float(second), reading(hot_blocks=second), AROUND, 1.0, {})
    recorder.close()
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    found = list(read_recording(tmp_path / name))
    assert 0 < len(found) < 50
    assert [entry.at for entry in found] == [float(second) for second in range(len(found))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no recording"),
        (b"{}\n", "no recording"),
        (b'{"format": "ullage-recording", "version": 9}\n', "upgrade"),
        (b'{"format": "ullage-recording", "version": 1}\n{"t": 1}\n', "line 2"),
        (b'{"format": "ullage-recording", "version": 1}\n[]\n', "line 2"),
    ],
)
def test_what_is_no_recording_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(RecordError, match=words):
        list(read_recording(tmp_path / "r"))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("r") / "r"
    path.write_bytes(b'{"format": "ullage-recording", "version": 1}\n' + data)
    try:
        list(read_recording(path))
    except RecordError:
        return


def test_a_recording_ends_at_its_bound(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", max_bytes=2000)
    for second in range(1000):
        recorder.sample(float(second), reading(hot_blocks=second), AROUND, 1.0, {})
    assert (tmp_path / "r").stat().st_size < 3000


def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        Recorder(tmp_path / "absent" / "r")


def test_replay_gives_the_same_findings(tmp_path: Path) -> None:
    live, again = Analysis(), Analysis()
    recorder = Recorder(tmp_path / "r.gz")
    scores = []
    for second in range(40):
        item = Reading(
            snapshot=Snapshot(sampled_at=float(second), total_blocks=100, hot_blocks=50 + second), identity=IDENTITY
        )
        found = live.take(item, 5.0 + second)
        scores.append(found.risk.score)
        recorder.sample(5.0 + second, item, Surroundings(), found.risk.score, found.risk.terms)
    recorder.close()
    replayed = [
        again.take(entry.reading, entry.at, entry.around).risk.score
        for entry in read_recording(tmp_path / "r.gz")
        if isinstance(entry, RecordedSample)
    ]
    assert replayed == pytest.approx(scores)
    assert max(score for score in scores if score is not None) >= 85
    assert gzip.decompress((tmp_path / "r.gz").read_bytes()).startswith(b'{"format"')
