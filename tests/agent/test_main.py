"""The program: arguments, the ready line, signals, exit status."""

import asyncio
import json
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from ullage_agent.logs import JsonFormatter
from ullage_agent.main import main

POOL = {"pool": {"total": 256, "hot": 200, "cached": 46}}
Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    children: list[asyncio.subprocess.Process] = []

    async def run(*arguments: str) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ullage_agent.main",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ready(child: asyncio.subprocess.Process) -> dict[str, Any]:
    assert child.stdout is not None
    line = (await child.stdout.readline()).decode()
    assert line.startswith("ready: ")
    facts: dict[str, Any] = json.loads(line.removeprefix("ready: "))
    return facts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_until_a_signal(start: Start, scenario_file: Any, tls: Any, number: signal.Signals) -> None:
    child = await start(
        *("--engine", "fake", "--engine-url", scenario_file(POOL), "--poll-seconds", "0.05"),
        *("--metrics-host", "127.0.0.1", "--metrics-port", "0", "--action-host", "127.0.0.1"),
        *("--action-port", "0", "--log-format", "json"),
        *("--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--token-file", str(tls.token)),
    )
    facts = await ready(child)
    token = {"Authorization": f"Bearer {tls.secret}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.client())) as session:
        async with session.get(facts["metrics"] + "/metrics") as answer:
            assert "ullage_agent_source_up" in await answer.text()
        url = facts["actions"] + "/v1/actions/evict"
        async with session.post(url, json={"ratio": 0.1, "reason": "test"}, headers=token) as answer:
            assert (await answer.json())["outcome"] == "Succeeded"
    child.send_signal(number)
    rest, errors = await child.communicate()
    assert (child.returncode, rest) == (0, b"")
    lines = [json.loads(line) for line in errors.splitlines()]
    assert any("evict: Succeeded" in line["message"] for line in lines)


async def test_without_tls_the_ready_line_says_so(start: Start, scenario_file: Any) -> None:
    child = await start(
        *("--engine", "fake", "--engine-url", scenario_file(POOL)),
        *("--metrics-host", "127.0.0.1", "--metrics-port", "0"),
    )
    facts = await ready(child)
    assert facts["actions"] is None
    assert "--token-file" in facts["actions_closed"]


async def test_an_engine_that_is_not_there_does_not_stop_the_start(start: Start, tmp_path: Any) -> None:
    child = await start(
        *("--engine", "ullage", "--engine-url", f"unix:{tmp_path}/none.sock"),
        *("--metrics-host", "127.0.0.1", "--metrics-port", "0"),
    )
    facts = await ready(child)
    async with aiohttp.ClientSession() as session, session.get(facts["metrics"] + "/healthz") as answer:
        assert answer.status == 200


async def test_a_port_in_use_is_one_line(start: Start, scenario_file: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = await start(
            *("--engine", "fake", "--engine-url", scenario_file(POOL)),
            *("--metrics-host", "127.0.0.1", "--metrics-port", str(port)),
        )
        output, errors = await child.communicate()
    assert (child.returncode, output) == (2, b"")
    assert errors.decode() == (
        f"error: --metrics-port {port} is in use on 127.0.0.1; "
        "stop what listens there or give another (0: any free one)\n"
    )


FAKE = ["--engine", "fake", "--engine-url", "nowhere.json"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--engine"),
        (["--engine", "triton", "--engine-url", "x"], "'triton'"),
        (FAKE, "nowhere.json"),
        ([*FAKE, "--metrics-port", "http"], "--metrics-port"),
        ([*FAKE, "--metrics-port", "65536"], "--metrics-port 65536"),
        ([*FAKE, "--action-port", "-1"], "--action-port -1"),
        ([*FAKE, "--poll-seconds", "0"], "--poll-seconds 0"),
        ([*FAKE, "--poll-seconds", "nan"], "--poll-seconds nan"),
        ([*FAKE, "--tls-cert", "x"], "--tls-key and --token-file missing"),
        ([*FAKE, "--tls-cert", "x", "--tls-key", "y", "--token-file", "z"], "--tls-cert x"),
        (["--engine", "vllm", "--engine-url", "localhost"], "http://HOST:PORT"),
        ([*FAKE, "--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        assert main(arguments) == 2
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_json_log_lines_carry_the_traceback() -> None:
    try:
        raise ssl.SSLError("x")
    except ssl.SSLError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "went %s", ("wrong",), sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "went wrong"
    assert entry["level"] == "error"
    assert "SSLError" in entry["traceback"]
