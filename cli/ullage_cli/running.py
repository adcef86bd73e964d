"""Where other commands find a service that `ullage up` runs: a small file in its state folder while it serves.

The file names the process, so that one that a killed run left behind is not believed. It stays when the run ends,
without a process, so that the service of old records can still be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ullage_operator.model import InferenceService

NAME = "running.json"


@contextmanager
def announced(state: Path, service: InferenceService, replicas: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Keep the file in `state` while entered. `replicas` are names and metrics URLs."""
    written = service.write()
    written["metadata"].setdefault("namespace", service.metadata.namespace)
    content = {
        "pid": os.getpid(),
        "service": written,
        "replicas": [{"name": name, "metrics": url} for name, url in replicas],
    }
    _write(state / NAME, content)
    try:
        yield
    finally:
        with suppress(OSError):
            _write(state / NAME, content | {"pid": 0})


def read_running(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """State folders of services that run now, by name, with what their files say."""
    found = []
    for file in sorted(folder.glob(f"*/{NAME}")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if _alive(int(content["pid"])) and content["service"] and content["replicas"]:
                found.append((file.parent, content))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def service_of(state: Path) -> Any:
    """The service of a state folder, whether it runs or not; None where none is told."""
    try:
        return json.loads((state / NAME).read_text(encoding="utf-8")).get("service")
    except (OSError, ValueError, AttributeError):
        return None


def _write(file: Path, content: dict[str, Any]) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    unfinished.replace(file)


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
