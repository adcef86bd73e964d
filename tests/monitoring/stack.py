"""Debian's Prometheus and Alertmanager as processes of a test, on free loopback ports, and what they are asked.

Under CI both must be there; elsewhere a test that needs one is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml
from cluster import eventually
from controlplane import free_port
from processes import http_get

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "manifests" / "monitoring"
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
}
"""Debian's package of each program."""


def program(name: str) -> str:
    """Path of a program; without it the test is skipped, or fails under CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed; on Debian: apt-get install {PACKAGES[name]}"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return found


class _Server:
    """A process with an HTTP port; entering waits until it says that it is ready."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        """What is run."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = self.command()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            eventually(f"{command[0]}: {self.log()}", self._ready, within_s=30)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def log(self) -> str:
        """End of what it wrote."""
        file = self.folder / "log"
        return file.read_text(errors="replace")[-2000:] if file.exists() else ""

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            return bool(http_get(f"{self.url}/-/ready"))
        except OSError:
            return False

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)


class Prometheus(_Server):
    """Prometheus with a configuration given as what its YAML says."""

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        super().__init__(folder)
        self._configuration = configuration
        self.began = time.time()

    def command(self) -> Sequence[str]:
        file = self.folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(self._configuration, sort_keys=False))
        return (
            program("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        )

    def get(self, path: str, **parameters: str | Sequence[str]) -> Any:
        """Data of an API call."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        answer = json.loads(http_get(f"{self.url}/api/v1/{path}?{query}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """Series of an expression now."""
        return list(self.get("query", query=expr)["result"])

    def over_time(self, expr: str, *, until: float | None = None) -> list[dict[str, Any]]:
        """Series of an expression since this Prometheus began, each with its samples."""
        end = time.time() + 1 if until is None else until
        window = {"start": f"{self.began:.0f}", "end": f"{end:.0f}", "step": "1"}
        return list(self.get("query_range", query=expr, **window)["result"])

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Labels of each firing alert of that name."""
        alerts = self.get("alerts")["alerts"]
        return [a["labels"] for a in alerts if a["labels"]["alertname"] == alert and a["state"] == "firing"]


class Alertmanager(_Server):
    """Alertmanager with a configuration given as what its YAML says."""

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        super().__init__(folder)
        self._configuration = configuration

    def command(self) -> Sequence[str]:
        file = self.folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump(self._configuration, sort_keys=False))
        return (
            program("prometheus-alertmanager"),
            f"--config.file={file}",
            f"--storage.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--cluster.listen-address=",
            "--log.level=debug",
        )
