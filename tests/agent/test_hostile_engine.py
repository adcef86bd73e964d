"""Engines that answer badly at the level of bytes: every reading ends, with an error that says why."""

from typing import Any

import pytest

from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig
from ullage_agent.adapters.transport import EngineHttp, parse_endpoint
from ullage_agent.clock import ManualClock
from ullage_agent.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
GZIPPED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"

ANSWERS = {
    "nothing": (b"", False),
    "not HTTP": (b"SSH-2.0-OpenSSH_9\r\n\r\n", False),
    "half a body": (b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"version": 1', False),
    "half a chunk": (CHUNKED + b'5\r\n{"ve', False),
    "bad chunk size": (CHUNKED + b"zz\r\n", False),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000, False),
    "compressed unasked": (GZIPPED, False),
}


@pytest.mark.parametrize("name", ["ullage", "vllm", "sglang"])
@pytest.mark.parametrize("case", sorted(ANSWERS))
async def test_broken_answers(name: str, case: str, raw_server: Any, clock: ManualClock) -> None:
    url = await raw_server(*ANSWERS[case])
    adapter = BUILTIN_ADAPTERS[name](AdapterConfig(url=url, clock=clock, read_timeout_s=5.0))
    if name != "ullage" and case == "compressed unasked":
        reading = await adapter.read()  # bytes that hold no metric: every promise is broken
        assert all(violation.problem == "missing" for violation in reading.violations)
        assert reading.snapshot.hot_blocks is None
    else:
        with pytest.raises(EngineError):
            await adapter.read()
    await adapter.close()


@pytest.mark.parametrize("name", ["ullage", "vllm", "sglang"])
@pytest.mark.parametrize(
    "data",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", CHUNKED + b"1\r\n{\r\n"],
    ids=["silent", "headers stop", "chunks stop"],
)
async def test_an_engine_that_stops_is_not_waited_for(
    name: str, data: bytes, raw_server: Any, clock: ManualClock
) -> None:
    url = await raw_server(data, True)
    adapter = BUILTIN_ADAPTERS[name](AdapterConfig(url=url, clock=clock, read_timeout_s=0.1))
    with pytest.raises(EngineTimeout, match=r"within 0\.1 s"):
        await adapter.read()
    await adapter.close()


@pytest.mark.parametrize("name", ["ullage", "vllm", "sglang"])
async def test_ten_megabytes_are_cut_off(name: str, raw_server: Any, clock: ManualClock, http_answer: Any) -> None:
    url = await raw_server(http_answer(b" " * 10_000_000), False)
    adapter = BUILTIN_ADAPTERS[name](AdapterConfig(url=url, clock=clock, read_timeout_s=20.0))
    with pytest.raises(EngineProtocolError, match="longer than"):
        await adapter.read()
    await adapter.close()


async def test_redirects_are_not_followed(raw_server: Any) -> None:
    target = await raw_server(b"", True)
    url = await raw_server(f"HTTP/1.1 302 Found\r\nLocation: {target}/x\r\nContent-Length: 0\r\n\r\n".encode(), False)
    http = EngineHttp(parse_endpoint(url), max_bytes=100)
    assert (await http.get("/", timeout_s=5.0)).status == 302
    await http.close()


async def test_refused_connection_names_the_place(clock: ManualClock) -> None:
    http = EngineHttp(parse_endpoint("http://127.0.0.1:1"), max_bytes=100)
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:1"):
        await http.get("/", timeout_s=5.0)
    await http.close()
