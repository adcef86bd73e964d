"""`ullage up` from start to end, with real agents and a stub engine: what it says, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from ullage_cli.commands import run as ullage
from ullage_cli.launch import in_manifest_words
from ullage_cli.main import end_at_once_when_interrupted
from ullage_cli.records import RecordFolder
from ullage_engine.main import parse_arguments
from ullage_operator.arguments import engine_arguments
from ullage_operator.manifest import load_manifest
from ullage_operator.model import Remediation

DRIVER = Path(__file__).with_name("drive_up.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def manifest(model: Path, port: int, replicas: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": "ullage.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"source": str(model)},
            "engine": {"port": port, "kvCache": {"memory": "40Mi"}},
            "agent": {"pollSeconds": 0.2},
            "replicas": {"min": replicas, "max": replicas},
            "remediation": {"settleSeconds": 0.5, "evict": {"cooldownSeconds": 2}},
        },
    }


class Place:
    """A manifest, a state folder and a temporary folder of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.port = free_port()

    def write(self, *, replicas: int = 1) -> Path:
        path = self.folder / "service.yaml"
        path.write_text(yaml.safe_dump(manifest(self.model, self.port, replicas)))
        return path

    def processes(self) -> list[psutil.Process]:
        """Processes that this test's folder is named in, the driver included."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.folder) in word for word in words):
                found.append(process)
        return found

    def records(self) -> list[dict[str, Any]]:
        return [yaml.safe_load(path.read_text()) for path in (self.state / "remediations").glob("*.yaml")]

    def log(self, name: str) -> str:
        path = self.state / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def leftovers(self) -> list[str]:
        return [path.name for path in self.temporary.iterdir()]


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="ul-"))  # short: Unix sockets lie below it
    yield Place(folder)
    shutil.rmtree(folder)


class Run:
    """A running driver and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, text: str) -> str:
        """Read on until a line contains `text`."""
        assert self.process.stdout is not None
        while line := (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode():
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"{text!r} never came: {self.lines} {(await self.errors())}")

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await asyncio.wait_for(self.process.stderr.read(), 60)).decode()

    async def end(self) -> int:
        assert self.process.stdout is not None
        rest = await asyncio.wait_for(self.process.stdout.read(), 90)
        self.lines += rest.decode().splitlines()
        return await asyncio.wait_for(self.process.wait(), 30)

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.lines[-1]))


@asynccontextmanager
async def driving(place: Place, behaviour: str, *flags: str, replicas: int = 1) -> AsyncIterator[Run]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(DRIVER), behaviour, str(place.write(replicas=replicas)), str(place.state), *flags),
        env={**os.environ, "TMPDIR": str(place.temporary)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Run(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gone(place)


async def gone(place: Place) -> None:
    """Wait until no process of the test runs; the kernel kills orphans a moment after their parent's end."""
    deadline = asyncio.get_running_loop().time() + 30
    while place.processes():
        assert asyncio.get_running_loop().time() < deadline, place.processes()
        await asyncio.sleep(0.05)


def assert_clean(place: Place) -> None:
    assert place.processes() == []
    assert place.leftovers() == []


RESULT_KEYS = [
    "risk_peak", "risk_after", "bytes_freed", "blocks_freed", "remediations",
    "requests_ok", "requests_failed", "tokens_per_s", "seconds",
]  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_demo_from_start_to_end(place: Place, replicas: int) -> None:
    async with driving(place, "serve", "--demo-load", replicas=replicas) as run:
        status = await run.end()
        assert_clean(place)
        errors = await run.errors()
    assert (status, errors) == (0, ""), run.lines
    assert list(run.result) == RESULT_KEYS
    assert run.result["risk_peak"] >= 85
    assert run.result["risk_after"] <= 60
    assert run.result["requests_failed"] == 0
    assert run.result["requests_ok"] > 2
    assert run.result["tokens_per_s"] > 0
    records = place.records()
    assert run.result["remediations"] == len(records) > 0
    assert run.result["blocks_freed"] == sum(each["status"].get("blocksFreed", 0) for each in records) > 0
    assert run.result["bytes_freed"] == run.result["blocks_freed"] * 1000
    shares = [each["spec"]["parameters"]["ratio"] for each in records if each["spec"]["action"] == "evict"]
    assert min(shares) >= 0.2  # of the hot blocks, and the cached ones besides
    assert all(any(f"* decided: evict {share * 100:.0f} %" in line for line in run.lines) for share in shares)
    assert any("* done: evict" in line for line in run.lines)
    if replicas == 2:
        assert all("pid" in place.log(f"engine-{index}") for index in range(2))


async def test_records_of_an_earlier_run_stay_and_do_not_count(place: Place, effective: Remediation) -> None:
    folder = RecordFolder(place.state / "remediations")
    folder.open()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    status = effective.status.model_copy(update={"proposed_at": yesterday.replace(microsecond=0)})
    effective = effective.model_copy(update={"status": status})
    await folder.save(effective)
    async with driving(place, "serve", "--short") as run:
        assert await run.end() == 0
        assert run.result["remediations"] == 0
    assert [Remediation.read(each) for each in place.records()] == [effective]


async def test_a_record_that_an_earlier_run_left_running_is_ended_and_does_not_count(
    place: Place, make_record: Callable[..., Remediation]
) -> None:
    folder = RecordFolder(place.state / "remediations")
    folder.open()
    lately = f"{datetime.now(UTC) - timedelta(minutes=5):%Y-%m-%dT%H:%M:%SZ}"
    await folder.save(make_record(proposedAt=lately, answeredAt=lately, bytesFreed=42000, blocksFreed=42))
    async with driving(place, "serve") as run:
        await run.until("serving: risk")
        run.process.send_signal(signal.SIGINT)
        assert await run.end() == 0
    assert [run.result[key] for key in ("remediations", "bytes_freed", "blocks_freed")] == [0, 0, 0]
    assert not any(" * " in line for line in run.lines), "\n".join(run.lines)
    [record] = place.records()
    assert Remediation.read(record).final


async def test_without_a_load_it_serves_until_ctrl_c(place: Place) -> None:
    async with driving(place, "serve") as run:
        await run.until("serving: risk")
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{place.port}/v1/chat/completions",
                json={"messages": [{"content": "hello"}], "max_tokens": 4},
            ) as answer,
        ):
            assert answer.status == 200
            assert b"[DONE]" in await answer.read()
        await run.until("ok 1")
        run.process.send_signal(signal.SIGINT)
        assert await run.end() == 0
        assert_clean(place)
    assert (run.result["requests_ok"], run.result["requests_failed"]) == (1, None)


@pytest.mark.parametrize(
    ("behaviour", "moment", "number"),
    [
        ("slow", "converting the model", signal.SIGINT),
        ("slow", "converting the model", signal.SIGTERM),
        ("serve", "OpenAI API at", signal.SIGINT),
        ("serve", "load: ramp", signal.SIGINT),
        ("serve", "load: ramp", signal.SIGTERM),
        ("serve", "load: ramp", signal.SIGHUP),
        ("serve", "* decided", signal.SIGINT),
    ],
)
async def test_a_signal_at_any_moment_leaves_nothing(
    place: Place, behaviour: str, moment: str, number: signal.Signals
) -> None:
    async with driving(place, behaviour, "--demo-load") as run:
        await run.until(moment)
        run.process.send_signal(number)
        assert await run.end() == 130
        assert_clean(place)
        assert await run.errors() == ""
    if "load" in moment or "decided" in moment:
        assert any(line.startswith("Cut short by a signal, in phase ") for line in run.lines)


async def test_a_demo_that_the_duration_cuts_short_is_not_done(place: Place) -> None:
    async with driving(place, "serve", "--demo-load", "--short") as run:
        assert await run.end() == 130
        assert_clean(place)
        assert await run.errors() == ""
    [line] = [line for line in run.lines if line.startswith("Cut short by the end of --duration, in phase ")]
    assert "the demo was not done" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_in_the_first_milliseconds_leaves_nothing(place: Place, number: signal.Signals) -> None:
    for delay in (0.0, 0.1, 0.3, 0.6, 0.9):  # while modules are imported, and while children start
        async with driving(place, "slow") as run:
            await run.until("begun")
            await asyncio.sleep(delay)
            run.process.send_signal(number)
            assert await run.end() in (130, -number)
            assert_clean(place)
            assert await run.errors() == ""


async def test_a_signal_before_the_program_begins_leaves_nothing(place: Place) -> None:
    """While Python itself starts, where an interrupt may be lost in Python's own hands: a person repeats it."""
    async with driving(place, "slow") as run:
        ended = asyncio.create_task(run.end())
        while not ended.done():
            run.process.send_signal(signal.SIGINT)
            await asyncio.wait((ended,), timeout=5)
        assert ended.result() in (130, -signal.SIGINT, 1)
        assert_clean(place)


INTERRUPTED_IN_A_FINALIZER = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ullage_cli.commands":
            Finalized()

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["version"]
from ullage_cli.main import main
sys.exit(main())
"""


async def test_an_interrupt_during_the_imports_is_not_lost() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED_IN_A_FINALIZER),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, *output) == (-signal.SIGINT, b"", b"")


def test_a_program_started_with_interrupts_ignored_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_at_once_when_interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_second_ctrl_c_does_not_wait_for_a_stubborn_engine(place: Place) -> None:
    async with driving(place, "stubborn") as run:
        await run.until("serving: risk")
        run.process.send_signal(signal.SIGINT)
        await run.until("stopping")
        run.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(run.end(), 5) == 0
        assert_clean(place)


async def test_kill_9_leaves_no_process_and_the_next_run_is_not_hindered(place: Place) -> None:
    async with driving(place, "stubborn") as run:
        await run.until("serving: risk")
        assert len(place.processes()) >= 3
        run.process.kill()
        await gone(place)
    async with driving(place, "serve", "--short") as run:
        assert await run.end() == 0


async def test_a_refusal_of_the_engine_is_passed_through(place: Place) -> None:
    async with driving(place, "refuse") as run:
        assert await run.end() == 2
        assert await run.errors() == (
            "error: InferenceService/demo: engine-0: spec.engine.kvCache.memory: 41943040 bytes do not fit; lower it\n"
        )
        assert_clean(place)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME", None])
async def test_models_are_converted_into_the_folder_that_the_engine_uses_by_itself(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(place.folder / "kept"))
    alone, _ = parse_arguments(["--model", "m"])
    async with driving(place, "refuse") as run:
        assert await run.end() == 2
    [line] = [line for line in place.log("engine-0").splitlines() if line.startswith("arguments: ")]
    engine, _ = parse_arguments(json.loads(line.removeprefix("arguments: ")))
    assert engine.cache_dir == alone.cache_dir


async def test_an_engine_that_crashes_while_starting_is_told_in_one_line(place: Place) -> None:
    async with driving(place, "crash") as run:
        assert await run.end() == 1
        errors = await run.errors()
        assert_clean(place)
    assert errors.startswith("error: engine-0 ended with status 1: ")
    assert "RuntimeError: the stub was told to crash (log: " in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_engine_that_dies_later_ends_the_run_with_its_last_words(place: Place, replicas: int) -> None:
    async with driving(place, "die", "--demo-load", replicas=replicas) as run:
        assert await run.end() == 1
        errors = await run.errors()
        assert_clean(place)
    assert "ended with status 3: " in errors
    assert "fatal: the stub was told to die (log: " in errors
    assert run.result["requests_failed"] > 0


@pytest.mark.parametrize(
    ("method", "part"), [("starting", "ullage_cli.up"), ("update", "sweeps"), ("__exit__", "__main__")]
)
async def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_the_log(place: Place, method: str, part: str) -> None:
    async with driving(place, "serve", "--demo-load", f"--broken={method}") as run:
        assert await run.end() == 1
        assert_clean(place)
        errors = await run.errors()
    log = place.state / "logs" / "ullage.log"
    assert errors == f"error: {part} broke: ValueError: broken on purpose (log: {log})\n"
    assert "Traceback" in log.read_text()
    assert "in broken" in log.read_text()
    if method == "update":
        assert list(run.result) == RESULT_KEYS


async def test_failed_requests_are_counted_named_and_set_the_status(place: Place) -> None:
    async with driving(place, "break", "--demo-load") as run:
        assert await run.end() == 1
        errors = await run.errors()
    assert run.result["requests_failed"] >= 3
    assert any("HTTP 500" in line and "broken on purpose" in line for line in run.lines)
    assert errors.startswith(f"error: {run.result['requests_failed']} requests failed, the first because of: HTTP 500")


async def test_two_runs_do_not_share_a_state_folder(place: Place) -> None:
    async with driving(place, "serve") as first:
        await first.until("serving: risk")
        place.port = free_port()
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, str(DRIVER), "serve", str(place.write()), str(place.state)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await second.communicate()
        assert second.returncode == 2
        assert errors.decode() == (
            f"error: --state-dir: {place.state} is in use by another `ullage up`; stop it or name another folder\n"
        )


async def test_a_port_in_use_starts_nothing(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", place.port))
        taken.listen()
        async with driving(place, "serve") as run:
            assert await run.end() == 2
            assert await run.errors() == (
                f"error: InferenceService/demo: spec.engine.port: {place.port} cannot be bound on 127.0.0.1 "
                "(address already in use); stop what uses it or choose another port\n"
            )
    assert not place.state.exists()


BAD = [
    (("spec", "engine", "kvCache", "memory"), 48, "spec.engine.kvCache.memory", "48"),
    (("spec", "engine", "kvCache", "memory"), "48 MB", "spec.engine.kvCache.memory", "48Mi"),
    (("spec", "replicas", "min"), 3, "spec.replicas.min", "raise max"),
    (("spec", "engine", "kvCach"), {}, "spec.engine.kvCach", "kvCache"),
    (("spec", "model", "source"), "/nowhere/model.gguf", "spec.model.source", "does not exist"),
    (("spec", "model", "source"), "package://no_such_package/x.gguf", "spec.model.source", "install it"),
    (("spec", "model", "source"), "package://yaml/x.gguf", "spec.model.source", "check the file's name"),
    (("spec", "model", "source"), "package://yaml", "spec.model.source", "package://MODULE/FILE"),
    (("spec", "model", "source"), "pyproject.toml", "spec.model.source", ".gguf"),
    (("spec", "model", "source"), "/tmp", "spec.model.source", "config.json"),
    (
        ("spec", "engine", "speculation"),
        {"method": "draft", "draftModel": "/nowhere/draft.gguf"},
        "spec.engine.speculation.draftModel",
        "does not exist",
    ),
    (("spec", "suspend"), True, "spec.suspend", "false"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "field", "remedy"), BAD, ids=[f"{'.'.join(b[0])}={b[1]}" for b in BAD])
def test_bad_input_is_one_line_with_object_field_value_and_remedy(
    place: Place, capsys: pytest.CaptureFixture[str], path: tuple[str, ...], value: object, field: str, remedy: str
) -> None:
    document = manifest(place.model, place.port)
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    file = place.folder / "bad.yaml"
    file.write_text(yaml.safe_dump(document))
    assert ullage(["up", str(file), "--state-dir", str(place.state), "--plain"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: InferenceService/demo: ")
    assert field in captured.err
    assert remedy in captured.err
    assert captured.err.count("\n") == 1
    assert not place.state.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up"], "Missing argument"),
        (["up", "/nowhere.yaml"], "/nowhere.yaml: No such file or directory"),
        (["up", "/tmp"], "/tmp: Is a directory"),
        (["up", "x.yaml", "--duration", "0"], "--duration: 0 is not above 0"),
        (["up", "x.yaml", "--duration", "soon"], "--duration"),
        (["up", "x.yaml", "--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert ullage(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_flags_become_fields() -> None:
    said = "--max-model-len: 1024 tokens do not fit; raise --kv-memory or lower --max-model-length"
    assert in_manifest_words(said) == (
        "spec.model.maxLength: 1024 tokens do not fit; raise spec.engine.kvCache.memory or lower --max-model-length"
    )


def test_every_flag_made_from_a_manifest_has_its_field(place: Place) -> None:
    service = load_manifest(place.write())
    flags = {word.partition("=")[0] for word in engine_arguments(service, host="h", port=1, admin="unix:a")}
    for flag in flags - {"--host", "--admin", "--served-name"}:
        assert in_manifest_words(flag).startswith("spec."), flag


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ullage([]) == 0
    assert "up" in capsys.readouterr().out
    assert ullage(["version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"
