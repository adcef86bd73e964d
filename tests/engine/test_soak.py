"""Thousands of requests of mixed lengths, many of whose clients go away: memory stays flat, and nothing is left.

The server, the step loop, the scheduler and the pool are the real ones in a process of their own, so that memory is
theirs alone; only the model is a stand-in that costs nothing. ULLAGE_TEST_REQUESTS sets the number of requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

REQUESTS = int(os.environ.get("ULLAGE_TEST_REQUESTS", "10000"))
WARM_UP = 0.3
"""Share of the requests after which memory must be flat: caches are full and every path was taken."""
CLIENTS = 24
LEAST_S = 60.0

SERVER = """
import sys
from ullage_engine.build import LoadedEngine
from ullage_engine.engine import Engine
from ullage_engine.readings import EngineIdentity
from ullage_engine.eviction import Protection
from ullage_engine.fake_engine import tiny_tokenizer
from ullage_engine.fake_runner import FakeRunner
from ullage_engine.loop import EngineLoop, LoopLimits
from ullage_engine.main import main
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.scheduler import Scheduler

def build(config):
    blocks, size, tokenizer = 28, 16, tiny_tokenizer()
    pool = BlockPool(blocks, size, PrefixIndex("soak", size))
    engine = Engine(
        identity=EngineIdentity(model="fake", version="0"),
        runner=FakeRunner(blocks, size, len(tokenizer)),
        pool=pool,
        scheduler=Scheduler(pool, max_batch_tokens=64, max_sequences=8, prefix_reuse=True),
        protection=Protection(first_tokens=16, recent_tokens=16),
    )
    loop = EngineLoop(engine, LoopLimits(max_model_len=400, max_queue=256, max_sequences=8), frozenset())
    loop.start()
    return LoadedEngine(loop, tokenizer)

sys.exit(main(sys.argv[1:], build))
"""


@dataclass(frozen=True, slots=True)
class Server:
    """The program under load."""

    pid: int
    port: int
    admin: str

    def resident(self) -> int:
        """Bytes of memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.admin}/admin/v1/kv", timeout=LEAST_S).json()
        return found

    def when_idle(self) -> dict[str, Any]:
        """The state once no request is left; what clients that went away left behind takes a few steps to end."""
        end = time.monotonic() + LEAST_S
        while True:
            state = self.snapshot()
            if state["requests"]["running"] + state["requests"]["waiting"] == 0:
                return state
            assert time.monotonic() < end, f"requests are left: {state['requests']}"
            time.sleep(0.05)


@pytest.fixture
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER, "--model", "m", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen([*command, "--admin", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline().removeprefix("ready: "))
        try:
            yield Server(process.pid, ready["port"], ready["admin"])
        finally:
            process.terminate()
            assert process.wait(timeout=LEAST_S) == 0


async def one_request(port: int, random: Random) -> str:
    """One client's life: `whole` when it read its answer to the end, else how it went away."""
    count = min(100, int(random.lognormvariate(1.6, 0.9)) + 1)
    prompt = [random.randrange(256) for _ in range(min(280, int(random.lognormvariate(3.2, 1.0)) + 1))]
    if random.random() < 0.3:
        prompt = [*range(64), *prompt][:280]
    fate = random.choices(("whole", "no body", "no answer", "first bytes"), (70, 5, 15, 10))[0]
    fields = {"model": "fake", "prompt": prompt, "max_tokens": count, "temperature": random.choice((0, 1))}
    body = json.dumps(fields | {"stream": random.random() < 0.5, "n": random.choices((1, 3), (95, 5))[0]}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + (body[: len(body) // 2] if fate == "no body" else body))
        await writer.drain()
        if fate == "first bytes":
            await reader.read(200)
        elif fate == "whole":
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
            assert answer.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"}")), answer[-100:]
    finally:
        writer.close()
    return fate


async def load(port: int, count: int, seed: int) -> Counter[str]:
    """`count` requests by clients that each send the next when the last is over."""
    left, fates = iter(range(count)), Counter[str]()

    async def one_client() -> None:
        for index in left:
            fates[await one_request(port, Random(f"{seed}/{index}"))] += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(one_client())
    return fates


@pytest.mark.timeout(60 + REQUESTS * 0.1)
def test_memory_is_flat_and_nothing_is_left(server: Server) -> None:
    warm = int(REQUESTS * WARM_UP)
    asyncio.run(load(server.port, warm, seed=1))
    before = server.when_idle()
    memory, files = server.resident(), server.open_files()
    fates = asyncio.run(load(server.port, REQUESTS - warm, seed=2))
    after = server.when_idle()
    print(f"{fates}; {memory / 1e6:.1f} -> {server.resident() / 1e6:.1f} MB, {files} -> {server.open_files()} files")
    assert sum(fates.values()) == REQUESTS - warm
    assert len(fates) == 4
    assert after["blocks"]["active"] == 0
    assert after["slots"]["filled"] == 0
    assert after["requests"]["outstanding_blocks"] == 0
    counters = after["counters"]
    assert counters["admitted"] == counters["finished"] + counters["aborted"]
    assert counters["failed"] == 0
    assert counters["aborted"] > before["counters"]["aborted"] > 0
    assert counters["preemptions"] > 0
    assert counters["prefix_hit_tokens"] > 0
    assert server.resident() <= memory * 1.02
    assert server.open_files() <= files + 2
