"""Our own programs as processes, for tests: started, awaited by their `ready:` line, always ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Program:
    """`python -m MODULE ARGUMENTS`; entering waits until it is ready, leaving stops it and demands a clean end."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.arguments = tuple(arguments)
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}
        """What the `ready:` line said."""

    def __enter__(self) -> Self:
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        status = self.stop()
        if kind is None:
            assert status == 0, f"ended with status {status}:\n{self.log()}"

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._process = None
        return status

    def kill(self) -> None:
        """SIGKILL and wait: as if the machine had died."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """End of its standard error."""
        return self._log.read_text(errors="replace")[-4000:]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _await_ready(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=READY_TIMEOUT_S)
            except queue.Empty:
                raise AssertionError(f"not ready in {READY_TIMEOUT_S:g} s:\n{self.log()}") from None
            assert line is not None, f"ended before it was ready:\n{self.log()}"
            if line.startswith("ready: "):
                self.facts = json.loads(line.removeprefix("ready: "))
                return


def http_get(url: str) -> str:
    """Body of a loopback URL, past any proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return str(response.read().decode())


def metric(text: str, series: str) -> float:
    """Value of one series in an exposition; 0.0 when it has not appeared yet."""
    for line in text.splitlines():
        if line.startswith(f"{series} "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0
