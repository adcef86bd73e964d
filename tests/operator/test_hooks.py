"""The programs that run inside pods: as processes, side by side, as a node runs them; against a real agent."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ullage_agent.adapters.simulation import PoolSpec
from ullage_operator.hooks import command

GONE = "http://127.0.0.1:9/metrics"
WITHIN_S = 60.0


async def start(hook: str, *arguments: object) -> asyncio.subprocess.Process:
    """A hook as the kubelet would run it."""
    program, *rest = command(hook)
    assert program == "python3"
    return await asyncio.create_subprocess_exec(sys.executable, *rest, *map(str, arguments))


async def ended(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), WITHIN_S)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110  files signal nothing
            await asyncio.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The volume that engine and agent share."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def secrets_of(agent: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "token").write_text(agent.credentials.token)
    (folder / "ca.crt").write_text(agent.credentials.trusted)
    return folder


async def drain(agent: Any, run: Path, tmp_path: Path) -> asyncio.subprocess.Process:
    port = agent.agent.action_address[1]
    return await start("drain", run, secrets_of(agent, tmp_path), port, 0, 30)


async def test_the_engine_s_end_waits_until_the_agent_has_drained_it(
    start_agent: Any, run: Path, tmp_path: Path
) -> None:
    agent = await start_agent(PoolSpec())
    leave = await start("leave", run, 30, GONE)
    await until((run / "leaving").exists)
    assert not (run / "drained").exists()
    assert await ended(await drain(agent, run, tmp_path)) == 0
    assert await ended(leave) == 0
    await agent.polled()
    assert agent.agent.board.report().snapshot.draining is True
    assert not (run / "leaving").exists(), "a later restart of the agent alone must drain nothing"


async def test_a_restart_of_the_agent_alone_drains_nothing(start_agent: Any, run: Path, tmp_path: Path) -> None:
    agent = await start_agent(PoolSpec())
    assert await ended(await drain(agent, run, tmp_path)) == 0
    assert not any(run.iterdir())  # noqa: ASYNC240
    await agent.polled()
    assert agent.agent.board.report().snapshot.draining is not True


async def test_a_note_that_a_killed_hook_left_behind_drains_nothing(
    start_agent: Any, run: Path, tmp_path: Path
) -> None:
    agent = await start_agent(PoolSpec())
    (run / "leaving").touch()
    os.utime(run / "leaving", (1, 1))
    assert await ended(await drain(agent, run, tmp_path)) == 0
    assert not (run / "draining").exists()


async def test_an_agent_that_is_gone_holds_nobody_up(start_agent: Any, run: Path, tmp_path: Path) -> None:
    agent = await start_agent(PoolSpec())
    secrets = secrets_of(agent, tmp_path)
    (run / "leaving").touch()
    assert await ended(await start("drain", run, secrets, 9, 0, 30)) == 0
    assert (run / "drained").exists()


async def test_an_engine_whose_agent_has_no_hook_waits_by_its_own_metrics(run: Path) -> None:
    counts, asked = [1, 0], threading.Event()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left = counts.pop(0) if len(counts) > 1 else counts[0]
            asked.set()
            text = f'vllm:num_requests_running{{engine="0"}} {left}.0\nvllm:num_requests_waiting 0.0\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        leave = await start("leave", run, 60, f"http://127.0.0.1:{server.server_address[1]}/metrics")
        assert await ended(leave) == 0
        server.shutdown()
    assert asked.is_set()
    assert counts == [0]


async def test_neither_agent_nor_metrics_hold_nobody_up(run: Path) -> None:
    (run / "drained").touch()  # of an earlier end: it says nothing about this one
    began = time.monotonic()
    assert await ended(await start("leave", run, 60, GONE)) == 0
    assert time.monotonic() - began > 2
    assert not any(run.iterdir())  # noqa: ASYNC240


async def test_the_gate_is_one_file_that_runs_without_its_package(run: Path) -> None:
    assert await ended(await start("copy_gate", run)) == 0
    script = "import sys; sys.path.insert(0, sys.argv[1]); import ullage_agent.gate as g; print(g.__file__)"
    loaded = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", "-c", script, str(run), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await loaded.communicate()
    assert output.decode().strip() == str(run / "ullage_agent" / "gate.py")
