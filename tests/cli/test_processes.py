"""Children: watched, told apart when they die, stopped by force where needed, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ullage_cli.errors import ChildDied, InputError
from ullage_cli.processes import ChildSpec, Supervisor, leashed

READY_THEN_WAIT = 'print("ready: {\\"port\\": 7}", flush=True); import time; time.sleep(600)'
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY_THEN_WAIT
WITH_GRANDCHILD = (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    'print("grandchild", child.pid, flush=True); ' + READY_THEN_WAIT
)


def spec(tmp_path: Path, code: str, name: str = "child") -> ChildSpec:
    return ChildSpec(name=name, argv=(sys.executable, "-c", code), log=tmp_path / "logs" / f"{name}.log")


async def gone(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_ready_line_is_read_and_everything_is_logged(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, 'print("loading", flush=True); ' + READY_THEN_WAIT))
        assert await child.ready(30) == {"port": 7}
        assert child.last_line == "loading"
    assert child.log.read_text() == 'loading\nready: {"port": 7}\n'
    assert not alive(child.pid)


async def test_progress_is_shown_without_the_logs_prefix(tmp_path: Path) -> None:
    code = "print('2026-01-01 10:00:00,123 INFO ullage_engine.models: converting a: b')"
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, code))
        await child.ended
        assert child.last_line == "converting a: b"


async def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        async with Supervisor() as supervisor:
            child = supervisor.start(spec(tmp_path, f'print("{text}")'))
            await child.ended
    assert child.log.read_text() == "second\n"
    assert child.log.with_suffix(".old").read_text() == "first\n"


async def test_early_death_tells_the_last_lines(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, 'print("one\\ntwo"); raise SystemExit("three")'))
        with pytest.raises(ChildDied) as caught:
            await child.ready(30)
    assert str(caught.value) == f"child ended with status 1: one | two | three (log: {child.log})"


async def test_a_refusal_is_passed_through(tmp_path: Path) -> None:
    code = 'import sys; print("error: --kv-memory 1KiB is too small", file=sys.stderr); sys.exit(2)'
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, code, "engine-0"))
        with pytest.raises(InputError, match=r"^engine-0: --kv-memory 1KiB is too small$"):
            await child.ready(30)


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        missing = ChildSpec(name="engine-0", argv=("/nowhere/ullage-engine",), log=tmp_path / "e.log")
        child = supervisor.start(missing)
        with pytest.raises(ChildDied, match="cannot start /nowhere/ullage-engine: No such file"):
            await child.ready(30)


async def test_a_killed_child_is_reported_by_its_signal(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, READY_THEN_WAIT))
        await child.ready(30)
        os.kill(child.pid, signal.SIGKILL)
        assert str(await supervisor.first_death()).startswith("child was killed by signal 9: ")


async def test_silence_is_bounded(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, "import time; time.sleep(600)"))
        with pytest.raises(TimeoutError, match=r"child was not ready within 0\.05 s"):
            await child.ready(0.05)


async def test_stopping_escalates_to_a_kill(tmp_path: Path) -> None:
    async with Supervisor(grace_s=0.1) as supervisor:
        child = supervisor.start(spec(tmp_path, STUBBORN))
        await child.ready(30)
    assert child.ended.result() == -signal.SIGKILL


async def test_grandchildren_go_too_and_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async with Supervisor(grace_s=600) as supervisor:
        child = supervisor.start(spec(tmp_path, WITH_GRANDCHILD))
        await child.ready(30)
        grandchild = int(child.last_line.split()[1])
        assert alive(grandchild)
    await asyncio.wait_for(gone(grandchild), 30)


async def test_cancelled_while_stopping_still_leaves_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(grace_s=600)
    child = supervisor.start(spec(tmp_path, STUBBORN))
    await child.ready(30)
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not alive(child.pid)


PARENT = """
import asyncio, pathlib, sys
from ullage_cli.processes import ChildSpec, Supervisor

async def main():
    async with Supervisor() as supervisor:
        for name in ("a", "b"):
            child = supervisor.start(ChildSpec(
                name=name, argv=(sys.executable, "-c", {code!r}), log=pathlib.Path({folder!r}) / name))
            await child.ready(60)
            print(child.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_kill_9_of_the_parent_leaves_no_child(tmp_path: Path) -> None:
    source = textwrap.dedent(PARENT).format(code=STUBBORN, folder=str(tmp_path))
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", source, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    children = [int(await parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in children)
    parent.kill()
    await parent.wait()
    for pid in children:
        await asyncio.wait_for(gone(pid), 30)


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    command = list(leashed(("echo", "started")))
    command[4] = "1" if os.getpid() != 1 else "2"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("cut", [1, 7, 100])
async def test_output_in_pieces_is_read_by_lines(tmp_path: Path, cut: int) -> None:
    code = textwrap.dedent(f"""
        import os, time
        text = b"progress 1\\rprogress 2\\rready: {{\\"port\\": 1}}\\nafter"
        for start in range(0, len(text), {cut}):
            os.write(1, text[start:start + {cut}])
    """)
    async with Supervisor() as supervisor:
        child = supervisor.start(spec(tmp_path, code))
        await child.ended
        assert await child.ready(30) == {"port": 1}
        assert list(child.lines) == ["progress 1", "progress 2", "after"]
