"""A small program that takes `ullage-engine`'s arguments and speaks its contracts, with a simulated pool.

Run as `python stub_engine.py BEHAVIOUR [engine arguments]`. Behaviours: `serve`; `stubborn` (ignores SIGTERM);
`slow` (never gets ready); `refuse` (its arguments cannot work); `crash` (dies while starting); `die` (dies when the
first chat comes); `break` (answers chats with 500).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 100, 16, 1000
TOKENS_PER_S = 60.0
"""Of all chats together."""
CHARACTERS_PER_BLOCK = 36
ARGUMENTS = "arguments: "
COUNTERS = (
    *("admitted", "finished", "failed", "aborted", "preemptions", "recomputed_tokens", "prompt_tokens"),
    *("generated_tokens", "prefix_query_tokens", "prefix_hit_tokens", "evicted_blocks", "evicted_tokens"),
)


@dataclass
class Chat:
    """One running request, in blocks and tokens."""

    blocks: int
    left: int
    dropped: int = 0


@dataclass
class Pool:
    """The simulated engine: what chats hold, what finished ones left cached."""

    chats: list[Chat] = field(default_factory=list)
    cached: int = 0
    readings: int = 0
    finished: int = 0
    generated: int = 0
    limit: int | None = None
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def hot(self) -> int:
        return min(BLOCKS, sum(chat.blocks for chat in self.chats))

    def make_room(self) -> None:
        self.cached = min(self.cached, BLOCKS - self.hot)

    def snapshot(self) -> dict[str, object]:
        self.readings += 1
        free = BLOCKS - self.hot - self.cached
        outstanding = sum(-(-chat.left // BLOCK_TOKENS) for chat in self.chats)
        counters = dict.fromkeys(COUNTERS, 0)
        return {
            "version": 1, "instance": self.instance, "sequence": self.readings, "model": "stub", "engine_version": "0",
            "block_tokens": BLOCK_TOKENS, "block_bytes": BLOCK_BYTES,
            "blocks": {"total": BLOCKS, "free": free, "active": self.hot, "cached": self.cached, "in_flight": 0,
                       "pinned": 0},
            "largest_free_run": free, "slots": {"allocated": self.hot * 16, "filled": self.hot * 16},
            "requests": {"running": len(self.chats), "waiting": 0, "outstanding_blocks": outstanding},
            "counters": counters | {"finished": self.finished, "generated_tokens": self.generated},
            "allocator": {"reserved_bytes": 0, "allocated_bytes": 0}, "host": None, "disk": None,
            "step": {"number": self.readings, "age_s": 0.0},
            "admission": {"max_prompt_tokens": self.limit, "max_total_blocks": None, "expires_in_s": None,
                          "draining": False},
        }  # fmt: skip

    def evict(self, ratio: float) -> int:
        wanted = round(ratio * (self.hot + self.cached))
        cached = min(wanted, self.cached)
        self.cached -= cached
        freed = cached
        for chat in self.chats:
            part = min(chat.blocks - 2, wanted - freed)
            if part > 0:
                chat.blocks, chat.dropped, freed = chat.blocks - part, chat.dropped + part, freed + part
        return freed


class Stub:
    """The HTTP side."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.pool = Pool()

    def public(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/ready", self.ready)
        return app

    def admin(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/admin/v1/kv", self.kv)
        app.router.add_post("/admin/v1/kv/evict", self.evict)
        app.router.add_post("/admin/v1/admission", self.admission)
        return app

    async def ready(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def kv(self, _: web.Request) -> web.Response:
        return web.json_response(self.pool.snapshot())

    async def evict(self, request: web.Request) -> web.Response:
        freed = self.pool.evict((await request.json())["ratio"])
        return web.json_response({
            "blocks_freed": freed, "bytes_freed": freed * BLOCK_BYTES, "dropped": freed, "demoted": 0,
            "cached_blocks": 0, "sequences_touched": 1, "tokens_dropped": freed * BLOCK_TOKENS,
            "eligible_blocks": freed, "requested_blocks": freed, "duration_ms": 1.0, "dry_run": False,
        })  # fmt: skip

    async def admission(self, request: web.Request) -> web.Response:
        self.pool.limit = (await request.json())["max_prompt_tokens"]
        return web.json_response({"max_prompt_tokens": self.pool.limit, "max_total_blocks": None, "expires_in_s": 9})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if self.behaviour == "die":
            print("fatal: the stub was told to die", flush=True)
            os._exit(3)
        if self.behaviour == "break":
            return web.json_response({"error": {"message": "broken on purpose"}}, status=500)
        body = await request.json()
        characters = sum(len(message["content"]) for message in body["messages"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = Chat(blocks=characters // CHARACTERS_PER_BLOCK + 1, left=body["max_tokens"])
        self.pool.chats.append(chat)
        try:
            await self._generate(chat, response)
        finally:
            self.pool.chats.remove(chat)
            self.pool.cached += chat.blocks
            self.pool.make_room()
        usage = {"prompt_tokens": characters // 5, "completion_tokens": body["max_tokens"]}
        self.pool.finished += 1
        await _send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _generate(self, chat: Chat, response: web.StreamResponse) -> None:
        while chat.left:
            await asyncio.sleep(4 * len(self.pool.chats) / TOKENS_PER_S)
            done = min(4, chat.left)
            chat.left -= done
            self.pool.generated += done
            if chat.left % BLOCK_TOKENS == 0:
                chat.blocks += 1
            self.pool.make_room()
            await _send(response, {"choices": [{"index": 0, "delta": {"content": "word "}}]})


async def _send(response: web.StreamResponse, payload: object) -> None:
    await response.write(f"data: {json.dumps(payload)}\n\n".encode())


async def serve(stub: Stub, host: str, port: int, admin: str) -> None:
    runners = []
    for app in (stub.public(), stub.admin()):
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
    await web.TCPSite(runners[0], host, port).start()
    await web.UnixSite(runners[1], admin.removeprefix("unix:")).start()
    print("ready:", json.dumps({"public": "http://{}:{}".format(*runners[0].addresses[0][:2])}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if stub.behaviour == "stubborn" else stop.set
    )
    await stop.wait()
    for runner in runners:
        await runner.cleanup()


def main() -> int:
    behaviour = sys.argv[1]
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--port", "--admin"):
        parser.add_argument(flag, required=True)
    known, _ = parser.parse_known_args(sys.argv[2:])
    print(ARGUMENTS + json.dumps(sys.argv[2:]), flush=True)
    print(f"pid {os.getpid()}", flush=True)
    if behaviour == "refuse":
        print("error: --kv-memory: 41943040 bytes do not fit; lower it", file=sys.stderr, flush=True)
        return 2
    if behaviour == "crash":
        raise RuntimeError("the stub was told to crash")
    if behaviour == "slow":
        print("converting the model", flush=True)
        time.sleep(600)
    asyncio.run(serve(Stub(behaviour), known.host, int(known.port), known.admin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
