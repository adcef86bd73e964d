"""Clients that go away, probes, addresses, and stopping well."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ullage_engine.config import ServerConfig, TcpAddress, UnixAddress
from ullage_engine.errors import ConfigError
from ullage_engine.fake_core import FakeCore, Gate
from ullage_engine.fake_engine import FakeEngine
from ullage_engine.main import main, parse_arguments
from ullage_engine.request import GenerationRequest, TokenOutput
from ullage_engine.server import Stop, bind, serve

Open = Callable[..., Any]
LOCAL = TcpAddress("127.0.0.1", 0)


def waits(core: FakeCore, *, first: bool) -> Gate:
    """Script: every request waits at a gate, after its first token or before any."""
    gate = core.gate()

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        if first:
            yield TokenOutput(request_id=request.request_id, token=65)
        yield gate
        yield TokenOutput(request_id=request.request_id, token=65, finish_reason="length")

    core.script = script
    return gate


async def eventually(core: FakeCore, condition: Callable[[FakeCore], bool]) -> None:
    assert await asyncio.to_thread(core.wait_for, condition), (core.live, core.aborted)


async def open_raw(addresses: dict[str, Any], body: dict[str, Any]) -> tuple[Any, asyncio.StreamWriter]:
    """Send a completion by hand, to be able to just close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", addresses["port"])
    data = json.dumps({"model": "fake", "prompt": "x"} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_is_aborted(
    core: FakeCore, open_engine: Open, stream: bool, first: bool, n: int
) -> None:
    waits(core, first=first)
    async with open_engine() as addresses:
        reader, writer = await open_raw(addresses, {"stream": stream, "n": n})
        await eventually(core, lambda core: len(core.live) == n)
        if stream and first:
            await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        await eventually(core, lambda core: not core.live)
    assert sorted(core.aborted) == sorted(request.request_id for request in core.submitted)


async def test_a_client_that_stays_is_not_aborted(core: FakeCore, open_engine: Open) -> None:
    gate = waits(core, first=True)
    async with open_engine() as addresses, httpx.AsyncClient(base_url=addresses["public"]) as http:
        answer = asyncio.ensure_future(http.post("/v1/completions", json={"model": "fake", "prompt": "x"}))
        await eventually(core, lambda core: len(core.live) == 1)
        gate.open()
        assert (await answer).json()["choices"][0]["finish_reason"] == "length"
    assert core.aborted == []


async def test_half_a_body_and_gone(core: FakeCore, open_engine: Open) -> None:
    async with open_engine() as addresses:
        _, writer = await asyncio.open_connection("127.0.0.1", addresses["port"])
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"model":')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=addresses["public"]) as http:
            assert (await http.get("/health")).status_code == 200
    assert core.submitted == []


async def test_probes_follow_the_step_clock(core: FakeCore, open_engine: Open) -> None:
    async with (
        open_engine(health_step_age_s=60.0, ready_step_age_s=10.0) as addresses,
        httpx.AsyncClient(base_url=addresses["public"]) as http,
    ):
        for age, health, ready in ((0.0, 200, 200), (9.9, 200, 200), (10.1, 200, 503), (60.1, 503, 503)):
            core.age_s = age
            answers = [await http.get("/health"), await http.get("/ready")]
            assert [answer.status_code for answer in answers] == [health, ready]
        assert "has not moved for 60.1 s" in answers[0].json()["reason"]
        core.age_s = 0.0
        core.set_draining(True)
        drained = await http.get("/ready")
        assert (drained.status_code, drained.json()["reason"]) == (503, "draining")
        assert (await http.get("/health")).status_code == 200


def start(core: FakeCore, tokenizer: Any, **settings: Any) -> tuple[Stop, asyncio.Future[Any], asyncio.Task[None]]:
    config = ServerConfig(**{"public": LOCAL, "admin": LOCAL} | settings)
    stop = Stop()
    addresses: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    serving = serve(FakeEngine(core, tokenizer), bind(config), config, stop=stop, announce=addresses.set_result)
    return stop, addresses, asyncio.create_task(serving)


async def test_stopping_lets_requests_finish(core: FakeCore, tokenizer: Any) -> None:
    gate = waits(core, first=True)
    stop, addresses, task = start(core, tokenizer, drain_seconds=60.0)
    async with httpx.AsyncClient(base_url=(await addresses)["public"], timeout=30) as http:
        body = {"model": "fake", "prompt": "x"}
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            parts = answer.aiter_text()
            received = await anext(parts)
            stop.ask()
            await eventually(core, lambda core: core.draining)
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            async with httpx.AsyncClient(base_url=(await addresses)["admin"]) as admin:
                resumed = await admin.post("/admin/v1/resume", json={})
            assert resumed.json() == {"draining": True}, "a server that is stopping does not open again"
            assert core.draining
            assert not task.done()
            gate.open()
            async for part in parts:
                received += part
    await task
    assert received.endswith("data: [DONE]\n\n")
    assert core.aborted == []


async def test_stopping_is_bounded(core: FakeCore, tokenizer: Any) -> None:
    """Requests that never end are given up when the drain's time is over, and their clients told why."""
    waits(core, first=True)
    stop, addresses, task = start(core, tokenizer, drain_seconds=0.1)
    plain, stream = await open_raw(await addresses, {}), await open_raw(await addresses, {"stream": True})
    await eventually(core, lambda core: len(core.live) == 2)
    stop.ask()
    answers = [(await reader.read()).decode() for reader, _ in (plain, stream)]
    await task
    assert answers[0].startswith("HTTP/1.1 500 ")
    assert answers[1].startswith("HTTP/1.1 200 ")
    assert all("the server is stopping" in answer and "[DONE]" not in answer for answer in answers)
    assert sorted(core.aborted) == sorted(request.request_id for request in core.submitted)
    for _, writer in (plain, stream):
        writer.close()
        await writer.wait_closed()


async def test_asked_twice_the_server_stops_at_once(core: FakeCore, tokenizer: Any) -> None:
    waits(core, first=True)
    stop, addresses, task = start(core, tokenizer, drain_seconds=600.0)
    _, writer = await open_raw(await addresses, {})
    await eventually(core, lambda core: len(core.live) == 1)
    stop.ask()
    stop.ask()
    await task
    assert core.aborted == [core.submitted[0].request_id]
    writer.close()
    await writer.wait_closed()


def test_a_port_in_use_ends_the_start_before_the_model_loads(capfd: pytest.CaptureFixture[str]) -> None:
    def build(_: Any) -> Any:
        raise AssertionError("the model must not be loaded")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--model", "m", "--host", "127.0.0.1", "--port", str(port)], build) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith(f"error: --port: 127.0.0.1:{port} cannot be had")
        assert "0 for any free one" in err
        assert err.count("\n") == 1
        admin = f"127.0.0.1:{port}"
        assert main(["--model", "m", "--port", "0", "--host", "127.0.0.1", "--admin", admin], build) == 2
        assert capfd.readouterr().err.startswith(f"error: --admin: {admin} cannot be had")
    assert main(["--model", "m", "--host", "no.such.host.invalid", "--port", "0"], build) == 2
    assert capfd.readouterr().err.startswith("error: --host: 'no.such.host.invalid'")


def test_the_admin_socket_is_private_and_cleaned_up(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    config = ServerConfig(public=LOCAL, admin=UnixAddress(path))
    first = bind(config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.admin is not None
    first.admin.listen()
    with pytest.raises(ConfigError, match="in use by another process"):
        bind(config)
    first.public.close()
    first.admin.close()  # as after a crash: the file stays
    assert path.exists()
    second = bind(config)
    second.close()
    second.close()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        bind(config)
    assert path.read_text() == "precious"
    for bad, why in ((tmp_path / "none" / "a", "cannot be had"), (tmp_path / ("x" * 200), "longer than")):
        with pytest.raises(ConfigError, match=why):
            bind(ServerConfig(public=LOCAL, admin=UnixAddress(bad)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org"])
def test_the_admin_side_is_never_opened_to_others(host: str) -> None:
    with pytest.raises(ConfigError, match="could be reached from outside"):
        bind(ServerConfig(public=LOCAL, admin=TcpAddress(host, 0)))


async def test_admin_over_a_unix_socket(core: FakeCore, open_engine: Open, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with open_engine(admin=UnixAddress(path)) as addresses:
        assert addresses["admin"] == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            assert (await http.get("/admin/v1/kv")).json()["instance"] == "fake"
    assert not path.exists()


async def test_without_an_admin_address_there_is_no_admin(core: FakeCore, open_engine: Open) -> None:
    async with open_engine(admin=None) as addresses:
        assert addresses["admin"] is None


PROGRAM = """
import sys
from ullage_engine.fake_core import FakeCore
from ullage_engine.fake_engine import FakeEngine, tiny_tokenizer
from ullage_engine.main import main
sys.exit(main(sys.argv[1:], lambda config: FakeEngine(FakeCore(model_name=config.model).start(), tiny_tokenizer())))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_from_ready_to_signal(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "a.sock"
    command = [sys.executable, "-c", PROGRAM, "--model", "m", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(
        [*command, "--admin", f"unix:{path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("ready: {")
            ready = json.loads(line.removeprefix("ready: "))
            assert ready["admin"] == f"unix:{path}"
            assert ready["model"] == "m"
            assert httpx.get(f"{ready['public']}/ready").status_code == 200
        finally:
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err
    assert not path.exists()


LOADING = """
import sys, time
from ullage_engine.main import main
def load(config):
    print("loading", flush=True)
    time.sleep(60)
sys.exit(main(sys.argv[1:], load))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_model_loads_leaves_no_socket(tmp_path: Path, number: signal.Signals, status: int) -> None:
    path = tmp_path / "a.sock"
    command = [sys.executable, "-c", LOADING, "--model", "m", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(
        [*command, "--admin", f"unix:{path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        assert path.exists()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert not path.exists()


def test_a_user_without_a_home_still_gets_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config, _ = parse_arguments(["--model", "m"])
    assert config.cache_dir is not None
    assert config.cache_dir.is_absolute()
