"""The agent beside a real vLLM under pressure, with the admission gate loaded into the server.

    python bench/vllm_pressure.py --python VENV/bin/python --model FOLDER [--output bench/results]

Long requests come in faster than a small pool can serve them, as in the recorded pressure trace. At the first alarm
the gate is closed through the agent's own action (prompts above 64 tokens), a long request is tried, and it is opened
again. The last line is JSON: when the score reached 85, when requests first stopped unfinished (inferred) and when
vLLM's own counter moved (seconds from the first request), and what the gate answered.

vLLM is no dependency: it lives in an environment of its own, and of this package it loads one file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from ullage_agent import gate
from ullage_agent.adapters import AdapterConfig
from ullage_agent.adapters.vllm import make_adapter
from ullage_agent.analysis import Analysis
from ullage_agent.clock import SystemClock
from ullage_agent.errors import EngineError
from ullage_agent.wire import ActionRequest

BLOCKS, BLOCK_TOKENS = 96, 32
ALARM = 85.0
START_TIMEOUT_S = 300.0
LONG = "Once upon a time there was a vessel that was never quite full, and this is its story: " * 4


@asynccontextmanager
async def serving(python: str, model: str, port: int, folder: Path) -> AsyncIterator[Process]:
    package = folder / "site" / "ullage_agent"
    package.mkdir(parents=True)
    shutil.copy(gate.__file__, package / "gate.py")
    environment = {
        **os.environ, "PYTHONPATH": str(package.parent), gate.FILE_VARIABLE: str(folder / "gate.json"),
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    with (folder / "vllm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
            "--middleware", "ullage_agent.gate.AdmissionGate", "--num-gpu-blocks-override", str(BLOCKS),
            "--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024", "--max-num-seqs", "64", "--enforce-eager",
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 15)
        await process.wait()


async def until_ready(session: aiohttp.ClientSession, url: str, process: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.returncode is None:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(2.0)
    raise RuntimeError(f"vLLM was not ready within {START_TIMEOUT_S:g} s, or ended")


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> tuple[int, str | None]:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("Retry-After")


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    url = f"http://127.0.0.1:{arguments.port}"
    async with serving(arguments.python, arguments.model, arguments.port, folder) as process:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await until_ready(session, url, process)
            await complete(session, url, "hello", 4)
            return await watch(session, url, arguments, folder)


async def watch(
    session: aiohttp.ClientSession, url: str, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    config = AdapterConfig(url=url, clock=SystemClock(), read_timeout_s=5.0, gate_file=folder / "gate.json")
    adapter, analysis = make_adapter(config), Analysis()
    seen: dict[str, Any] = {"alarm_s": None, "inferred_s": None, "counter_s": None, "peak_score": 0.0, "gate": None}
    seen |= {"failed_reads": 0, "violations": 0, "features": None}
    load = asyncio.create_task(_load(session, url, arguments.requests))
    began = time.monotonic()
    while time.monotonic() - began < arguments.seconds:
        at = time.monotonic()
        try:
            reading = await adapter.read()
            found = analysis.take(reading, at)
            _note(seen, at - began, reading, found)
        except EngineError:
            seen["failed_reads"] += 1
        if seen["alarm_s"] is not None and seen["gate"] is None:
            seen["features"] = adapter.features()
            seen["gate"] = await _try_gate(session, url, adapter)
        await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - at)))
    seen["evict"] = (await adapter.act("evict", ActionRequest(ratio=0.2), "evict")).message
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await adapter.close()
    return seen


def _note(seen: dict[str, Any], at: float, reading: Any, found: Any) -> None:
    score, state = found.risk.score or 0.0, reading.snapshot
    seen["violations"] += len(reading.violations)
    seen["peak_score"] = max(seen["peak_score"], score)
    if score >= ALARM and seen["alarm_s"] is None:
        seen["alarm_s"] = round(at, 1)
    if found.service is not None and (found.service.inferred_preemptions_per_s or 0) > 0 and seen["inferred_s"] is None:
        seen["inferred_s"] = round(at, 1)
    if state.preemptions_total and seen["counter_s"] is None:
        seen["counter_s"] = round(at, 1)
    usage = (state.hot_blocks or 0) / (state.total_blocks or 1)
    print(
        f"{at:6.1f} s  usage {usage:.2f}  running {state.running}  waiting {state.waiting}  score {score:5.1f} "
        f"({found.risk.winner})  preempted {state.preemptions_total}  {found.liveness.state}",
        flush=True,
    )


async def _try_gate(session: aiohttp.ClientSession, url: str, adapter: Any) -> dict[str, Any]:
    closed = await adapter.act("throttle", ActionRequest(max_prompt_tokens=64, ttl_s=30.0), "throttle")
    await asyncio.sleep(2 * gate.LOOK_EVERY_S)
    status, retry_after = await complete(session, url, LONG, 8)
    released = await adapter.act("release", ActionRequest(), "release")
    await asyncio.sleep(2 * gate.LOOK_EVERY_S)
    return {
        "throttle": closed.outcome, "message": closed.message, "long_status": status, "retry_after": retry_after,
        "release": released.outcome,
    }  # fmt: skip


async def _load(session: aiohttp.ClientSession, url: str, requests: int) -> None:
    tasks = []
    for number in range(requests):
        tasks.append(asyncio.create_task(complete(session, url, f"{number} {LONG}", 500)))
        await asyncio.sleep(0.6)
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="Python of an environment that has vLLM")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--output", type=Path, help="folder for the result")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ullage-vllm-") as folder:
        try:
            seen = asyncio.run(run(arguments, Path(folder)))
        except BaseException:
            sys.stderr.write((Path(folder) / "vllm.log").read_text(errors="replace")[-4000:])
            raise
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "vllm_pressure.json").write_text(json.dumps(seen, indent=1) + "\n")
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
