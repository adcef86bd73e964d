"""What the agent costs beside an engine: CPU, memory, and the time from a poll's beginning to its metrics.

    python bench/agent_overhead.py [--seconds 300] [--output bench/results]

The real program runs against a server in this process that answers with a recorded vLLM exposition of about 60 kB,
with counters that move, once a second. CPU is the agent's own user and system time over the run, while it is scraped
every 15 seconds as in production; memory is its greatest resident size; latency is the agent's own figure of a poll,
from its beginning to the published metrics (request, parsing, analysis), over another minute. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

TRACE = Path(__file__).parents[1] / "tests" / "agent" / "traces" / "vllm-0.32-load.txt.xz"
SCRAPE_EVERY_S = 15.0
WARM_UP_S = 5.0
LATENCY_POLLS = 60
HERTZ = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Exposition:
    """The recorded exposition, with every counter and histogram growing at each request as under steady load."""

    def __init__(self) -> None:
        text = lzma.decompress(TRACE.read_bytes()).decode()
        self._parts = re.split(r"(?m)^(vllm:\w+_(?:total|bucket|count){[^}]*}) (\S+)$", text)
        self.size = len(text)
        self.served = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.served += 1
        texts, names, values = self._parts[0::3], self._parts[1::3], self._parts[2::3]
        grown = (
            f"{name} {float(round(float(value) * (1 + self.served / 5)))}"
            for name, value in zip(names, values, strict=True)
        )
        return web.Response(text="".join(part for pair in zip(texts, [*grown, ""], strict=True) for part in pair))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


def peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


async def measure(seconds: float) -> dict[str, float]:
    exposition = Exposition()
    app = web.Application()
    app.router.add_get("/metrics", exposition.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    arguments = ("--engine", "vllm", "--engine-url", f"http://127.0.0.1:{port}", "--metrics-host", "127.0.0.1")
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ullage_agent.main", *arguments, "--metrics-port", "0", "--log-level", "error",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert agent.stdout is not None
        ready = (await agent.stdout.readline()).decode().partition(": ")[2]
        url = json.loads(ready)["metrics"]
        await asyncio.sleep(WARM_UP_S)
        return {**await _watch(agent.pid, url, seconds), "exposition_bytes": float(exposition.size)}
    finally:
        agent.terminate()
        await agent.wait()
        await runner.cleanup()


async def _watch(pid: int, url: str, seconds: float) -> dict[str, float]:
    """First the cost, with one scrape every 15 s; then the latency of each poll, which takes a scrape a second."""
    async with aiohttp.ClientSession() as session:
        began, cpu_began = time.monotonic(), cpu_seconds(pid)
        while time.monotonic() - began < seconds:
            await asyncio.sleep(SCRAPE_EVERY_S)
            await _poll_duration(session, url)
        elapsed = time.monotonic() - began
        used, memory = cpu_seconds(pid) - cpu_began, peak_rss(pid)
        durations = []
        for _ in range(LATENCY_POLLS):
            await asyncio.sleep(1.0)
            durations.append(await _poll_duration(session, url))
    durations.sort()
    return {
        "cpu_percent": round(100 * used / elapsed, 3),
        "rss_mb": round(memory / 1e6, 1),
        "poll_p99_ms": round(1000 * durations[int(0.99 * (len(durations) - 1))], 2),
        "poll_p50_ms": round(1000 * durations[len(durations) // 2], 2),
        "polls": float(len(durations)),
        "seconds": round(elapsed, 1),
    }


async def _poll_duration(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found = re.search(r'source_duration_seconds\{source="engine"\} (\S+)', text)
    if found is None or 'source_up{source="engine"} 1.0' not in text:
        raise RuntimeError("the agent did not read the exposition")
    return float(found[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--output", type=Path, help="folder for the result")
    arguments = parser.parse_args(argv)
    figures = asyncio.run(measure(arguments.seconds))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "agent_overhead.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
