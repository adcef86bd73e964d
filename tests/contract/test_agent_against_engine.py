"""The real engine as a process, with the real model: its clients, and the agent's adapter beside it."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ullage_agent.adapters.base import AdapterConfig
from ullage_agent.adapters.ullage import UllageAdapter
from ullage_agent.clock import SystemClock
from ullage_agent.wire import ActionRequest

pytestmark = pytest.mark.model
FLAGS = (
    "--served-name smollm2 --kv-memory 20MiB --threads 1 --protected-tokens 16 --recent-tokens 16 --port 0 "
    "--numerics invariant"
)
"""Invariant, since a prefix hit computes fewer rows at once, and matrix products may round differently for it."""


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A running `ullage-engine`: what its ready line says, and where its admin socket is."""
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "-m", "ullage_engine.main", "--model", str(model_folder), "--host", "127.0.0.1"]
    command += ["--admin", f"unix:{folder}/a.sock", *FLAGS.split()]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("ready: "), (folder / "log").read_text()
            yield {"socket": f"unix:{folder}/a.sock", **json.loads(line.removeprefix("ready: "))}
        finally:
            process.terminate()
            process.stdout.close()
            assert process.wait(60) == 0, (folder / "log").read_text()
            assert not (folder / "a.sock").exists()


@pytest.fixture
async def adapter(engine: dict[str, Any]) -> AsyncIterator[UllageAdapter]:
    made = UllageAdapter.from_config(AdapterConfig(url=engine["socket"], clock=SystemClock()))
    yield made
    await made.close()


@pytest.fixture
async def client(engine: dict[str, Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine['public']}/v1", api_key="none", max_retries=0) as made:
        yield made


async def chat(client: openai.AsyncOpenAI, question: str, tokens: int = 12) -> openai.types.chat.ChatCompletion:
    return await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0
    )


async def test_snapshot_keeps_the_contract_and_counts_what_clients_did(
    adapter: UllageAdapter, client: openai.AsyncOpenAI
) -> None:
    before = await adapter.read()
    assert before.violations == ()
    answer = await chat(client, "What is the capital of France?")
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    reading = await adapter.read()
    after = reading.snapshot
    assert (
        after.generated_tokens_total == (before.snapshot.generated_tokens_total or 0) + answer.usage.completion_tokens
    )
    assert after.prompt_tokens_total == (before.snapshot.prompt_tokens_total or 0) + answer.usage.prompt_tokens
    for name, count in {"ttft": 1, "inter_token": answer.usage.completion_tokens - 1, "end_to_end": 1}.items():
        assert reading.histograms[name].count == before.histograms[name].count + count
    assert after.hot_blocks == 0
    assert after.reclaimable_blocks
    assert (after.free_blocks or 0) + after.reclaimable_blocks == after.total_blocks


async def test_streamed_and_whole_answers_are_the_same_and_warm_equals_cold(client: openai.AsyncOpenAI) -> None:
    question = "Why is the sky blue? Answer in one sentence."
    whole = await chat(client, question, 20)
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    async for part in stream:
        pieces += [choice.delta.content or "" for choice in part.choices]
        usage = part.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0


async def test_evict_frees_cached_blocks_for_real(adapter: UllageAdapter, client: openai.AsyncOpenAI) -> None:
    await chat(client, "Name three rivers in Europe and three in Asia, and say where each of them begins.")
    before = (await adapter.read()).snapshot
    result = await adapter.act("evict", ActionRequest(ratio=1.0), "evict-1")
    after = (await adapter.read()).snapshot
    assert result.outcome == "Succeeded"
    assert result.blocks_freed == before.reclaimable_blocks
    assert result.bytes_freed == result.blocks_freed * (before.block_bytes or 0)
    assert after.free_blocks == after.total_blocks
    assert (await adapter.act("evict", ActionRequest(ratio=1.0), "evict-2")).outcome == "Ineffective"


async def test_eviction_from_a_running_request_lets_it_finish(
    adapter: UllageAdapter, client: openai.AsyncOpenAI
) -> None:
    answer = asyncio.create_task(chat(client, "Tell me a long story about a lighthouse keeper. " * 8, 60))
    dropped = 0
    for attempt in itertools.count():
        result = await adapter.act("evict", ActionRequest(ratio=0.5), f"live-{attempt}")
        dropped += result.dropped_blocks if result.sequences_touched else 0
        if dropped or answer.done():
            break
    done = await answer
    assert dropped > 0, "no cold block of the running request was found"
    assert done.usage is not None
    assert done.choices[0].finish_reason in {"length", "stop"}


async def test_throttle_refuses_long_prompts_with_a_time_to_retry(
    adapter: UllageAdapter, client: openai.AsyncOpenAI
) -> None:
    await adapter.act("throttle", ActionRequest(max_prompt_tokens=60, ttl_s=30.0), "throttle-1")
    with pytest.raises(openai.RateLimitError, match="limited to 60 tokens") as refused:
        await chat(client, "word " * 200)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    await chat(client, "Hi", 2)
    await adapter.act("release", ActionRequest(), "release-1")
    await chat(client, "word " * 200, 2)


async def test_a_request_longer_than_the_pool_is_refused_at_once(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceed the context of 1712 tokens") as refused:
        await chat(client, "Hi", 5000)
    assert refused.value.code == "context_length_exceeded"
