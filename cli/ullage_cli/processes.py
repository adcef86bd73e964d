"""Child processes: started on a leash, watched, stopped within a bound.

Every child has its own process group (a Ctrl-C in the terminal reaches only us, and we end the children in
order), dies with us even after a kill -9 (`leash.py`), and logs to its own file. No restarts: that is a
cluster's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from . import leash
from .errors import ChildDied, InputError

READY_PREFIX = "ready: "
ERROR_PREFIX = "error: "
_LOG_PREFIX = re.compile(r"^[0-9-]{10}[ T]\S+ (?:DEBUG|INFO|WARNING|ERROR) (?:\S+: )?")
_KEPT_LINES = 20
_SHOWN_LINES = 3
_REFUSED = 2
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run: `argv`, with `env` added to ours. Output goes to `log`; the one before becomes `.old`."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One started child process and what it has printed."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes]) -> None:
        """Take charge of a process whose output comes through a pipe; a loop must be running."""
        self.name = spec.name
        self.log = spec.log
        self.pid = process.pid
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = process
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._read_output(spec.log), name=f"{spec.name} output")
        self.ended = asyncio.create_task(self._end(), name=f"{spec.name} end")

    @property
    def last_line(self) -> str:
        """The newest thing it printed, for a progress display: without time, level and logger."""
        return _LOG_PREFIX.sub("", self.lines[-1]) if self.lines else ""

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """The JSON of its `ready:` line.

        Raises:
            ChildDied: it ended first.
            InputError: it ended first because it refused its arguments.
            TimeoutError: neither within `timeout_s`.
        """
        await asyncio.wait((self._ready, self.ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        if self.ended.done():
            raise self.death(self.ended.result())
        raise TimeoutError(f"{self.name} was not ready within {timeout_s:g} s: {self.last_line} (log: {self.log})")

    def death(self, status: int) -> ChildDied | InputError:
        """The error that tells how it ended, with the last lines it printed."""
        complaints = [line for line in self.lines if line.startswith(ERROR_PREFIX)]
        if status == _REFUSED and complaints:
            return InputError(f"{self.name}: {complaints[-1].removeprefix(ERROR_PREFIX)}")
        shown = complaints[-1:] or list(self.lines)[-_SHOWN_LINES:]
        return ChildDied(self.name, status, " | ".join(shown), self.log)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone, if it still runs."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill its whole process group; what already ended stays ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, wait `grace_s`, then kill its process group. Returns when it is gone."""
        self.signal(signal.SIGTERM)
        await asyncio.wait((self.ended,), timeout=grace_s)
        if not self.ended.done():
            self.kill()
        await self.ended

    async def _end(self) -> int:
        status = await _exit_of(self._process)
        self.kill()  # what it started and left behind, which may hold the pipe open
        await asyncio.wait((self._output,), timeout=_DRAIN_S)
        self._output.cancel()
        return status

    async def _read_output(self, log: Path) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout
        )
        try:
            await self._copy_output(stream, log)
        finally:
            transport.close()

    async def _copy_output(self, stream: asyncio.StreamReader, log: Path) -> None:
        partial = b""
        with log.open("wb") as file:
            while chunk := await stream.read(65536):
                _append(file, chunk)
                *whole, partial = (partial + chunk).replace(b"\r", b"\n").split(b"\n")
                for line in whole:
                    self._take_line(line.decode(errors="replace").strip())
                partial = partial[-65536:]
        self._take_line(partial.decode(errors="replace").strip())

    def _take_line(self, line: str) -> None:
        if line.startswith(READY_PREFIX) and not self._ready.done():
            try:
                self._ready.set_result(json.loads(line.removeprefix(READY_PREFIX)))
            except json.JSONDecodeError:
                self.lines.append(f"a ready line that is not JSON: {line}")
        elif line:
            self.lines.append(line)


class Supervisor:
    """All children of one run. An async context: leaving it ends every child, whatever happened inside."""

    def __init__(self, *, grace_s: float = 8.0) -> None:
        self.children: list[Child] = []
        self._grace_s = grace_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self, spec: ChildSpec) -> Child:
        """Start a child; it is watched from here on. Never waits, so that no cancellation can lose the child.

        Raises:
            InputError: the log cannot be written.
        """
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            if spec.log.exists():
                spec.log.replace(spec.log.with_suffix(".old"))
        except OSError as error:
            raise InputError(f"--state-dir: cannot write {spec.log}: {error.strerror}") from error
        process = subprocess.Popen(  # noqa: S603 - no shell; the arguments are ours and the manifest's
            leashed(spec.argv),
            env={**os.environ, **spec.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        child = Child(spec, process)
        self.children.append(child)
        return child

    async def first_death(self) -> ChildDied | InputError:
        """Wait until any child has ended by itself; returns the error that tells how."""
        await asyncio.wait([child.ended for child in self.children], return_when=asyncio.FIRST_COMPLETED)
        dead = next(child for child in self.children if child.ended.done())
        return dead.death(dead.ended.result())

    async def stop(self) -> None:
        """End all children together, the unwilling ones by force; a cancellation meanwhile leaves none."""
        stopping = asyncio.gather(*(child.stop(self._grace_s) for child in self.children))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self.kill()
            await stopping
            raise

    def kill(self) -> None:
        """Kill all children now."""
        for child in self.children:
            child.kill()


def leashed(argv: Sequence[str]) -> tuple[str, ...]:
    """The command that runs `argv` so that it dies with this process."""
    return (sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *argv)


async def _exit_of(process: subprocess.Popen[bytes]) -> int:
    """The status of a process when it ends, whoever still holds its pipes (asyncio's own waits for those)."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def tell(status: int) -> None:
        if not exited.done():
            exited.set_result(status)

    def wait() -> None:
        loop.call_soon_threadsafe(tell, process.wait())

    threading.Thread(target=wait, name=f"waits for {process.pid}", daemon=True).start()
    return await exited


def _append(file: IO[bytes], chunk: bytes) -> None:
    file.write(chunk)
    file.flush()
