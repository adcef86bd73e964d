"""Reads a file of recorded data: a recording of `ullage-agent --record`, or Prometheus' answer to a range query."""

from __future__ import annotations

from pathlib import Path

from ullage_agent.record import RecordedAction, RecordedFailure, RecordedSample, RecordError, read_recording

from ..errors import InputError
from .data import Act, Moment, Recording
from .prometheus import from_prometheus


def read_file(path: Path, pod: str | None = None) -> Recording:
    """The recording in a file of either kind.

    Raises:
        InputError: neither kind, empty, or of several engines without `pod`.
    """
    try:
        with path.open("rb") as file:
            head = file.read(65536)
        recorded = head.startswith(b"\x1f\x8b") or b"ullage-recording" in head.partition(b"\n")[0]
        found = from_recording(path) if recorded else from_prometheus(path, pod)
    except OSError as error:
        raise InputError(f"FILE: {path}: {error.strerror}; give a recording or a Prometheus answer") from error
    except RecordError as error:
        raise InputError(f"FILE: {error}") from error
    if not any(moment.reading for moment in found.moments):
        raise InputError(f"FILE: {path} holds no reading of an engine")
    return found


def from_recording(path: Path) -> Recording:
    """A recording of an agent."""
    moments: list[Moment] = []
    acts: list[Act] = []
    base: float | None = None
    for entry in read_recording(path):
        match entry:
            case RecordedSample():
                base = entry.reading.snapshot.sampled_at - entry.at if base is None else base
                moments.append(
                    Moment(
                        at=entry.at,
                        wall=base + entry.at,
                        reading=entry.reading,
                        around=entry.around,
                        score=entry.score,
                    )
                )
            case RecordedFailure():
                moments.append(Moment(at=entry.at, wall=(base or 0.0) + entry.at, reading=None, error=entry.error))
            case RecordedAction():
                result = entry.result
                acts.append(
                    Act(
                        at=entry.at,
                        action=result.action,
                        outcome=result.outcome,
                        origin=entry.origin,
                        message=result.message,
                    )
                )
    while moments and moments[0].reading is None:  # before the first reading there is no clock
        moments.pop(0)
    return Recording(source=f"recording {path.name}", moments=tuple(moments), acts=tuple(acts))
