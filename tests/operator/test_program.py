"""The operator's command line: bad settings end in one line and status 2; odd environments do not matter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Kubectl

UNKNOWN_USER = """
import pwd, sys
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from ullage_operator.main import main
sys.exit(main(sys.argv[1:]))
"""

HUNG = """
import asyncio, sys
from ullage_operator import watches
async def hung(*, ready_flag, **_):
    ready_flag.set()
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
watches.Watches.__init__.__kwdefaults__["operate"] = hung
from ullage_operator.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "ullage_operator.main"]
    kept = {k: v for k, v in os.environ.items() if k not in ("USER", "LOGNAME", "LNAME", "USERNAME", "KUBECONFIG")}
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, **environment},
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--http-port=99999"], "--http-port: 99999 is outside 0..65535"),
        (["--sweep-seconds=0"], "--sweep-seconds: 0 is outside 0.05..60"),
        (["--kubeconfig=/nonexistent"], "--kubeconfig: /nonexistent is not a file; give a readable one"),
    ],
)
def test_bad_settings(arguments: list[str], expected: str) -> None:
    assert expected in refused(run(*arguments))


def test_nobody_at_the_other_end(tmp_path: Path) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "c", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    line = refused(run(f"--kubeconfig={tmp_path / 'config'}"))
    assert "the API server does not answer" in line
    assert "check --kubeconfig" in line


@pytest.mark.envtest
def test_a_port_in_use(operator_kubeconfig: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = (f"--kubeconfig={operator_kubeconfig}", "--http-host=127.0.0.1", f"--http-port={port}")
        assert f"--http-port: 127.0.0.1:{port} cannot be bound" in refused(run(*options))


@pytest.mark.envtest
@pytest.mark.parametrize("code", [UNKNOWN_USER, HUNG], ids=["unknown user", "hung watches"])
def test_odd_environments(operator_kubeconfig: Path, kubectl: Kubectl, code: str) -> None:
    """As in a pod with an arbitrary UID, no passwd entry and no USER; and with watches that do not hear of the end."""
    kept = {k: v for k, v in os.environ.items() if k not in ("USER", "LOGNAME", "LNAME", "USERNAME")}
    options = [f"--kubeconfig={operator_kubeconfig}", "--http-port=0", f"--namespace={kubectl.namespace}"]
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONUNBUFFERED": "1"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), process.stderr.read()
    finally:
        process.terminate()
        output, errors = process.communicate(timeout=30)
    assert (output, process.returncode) == ("", 0), errors
