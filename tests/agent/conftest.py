"""What the agent's tests share: a manual clock, an engine that answers the admin JSON, certificates."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ullage_agent.clock import ManualClock

SNAPSHOT: dict[str, Any] = {
    "version": 1,
    "instance": "abc123",
    "sequence": 17,
    "model": "smollm2",
    "engine_version": "0.1.0",
    "block_tokens": 16,
    "block_bytes": 195840,
    "blocks": {"total": 256, "free": 10, "active": 200, "cached": 46, "in_flight": 0, "pinned": 0},
    "cells": {"split_blocks": 4, "total": 360, "used": 200, "spare_blocks": 1},
    "largest_free_run": 4,
    "largest_allocation": 56,
    "slots": {"allocated": 3200, "filled": 3000},
    "requests": {"running": 12, "waiting": 1, "outstanding_blocks": 40},
    "counters": {
        "admitted": 20,
        "finished": 7,
        "failed": 0,
        "aborted": 0,
        "preemptions": 1,
        "recomputed_tokens": 5,
        "prompt_tokens": 900,
        "generated_tokens": 300,
        "prefix_query_tokens": 900,
        "prefix_hit_tokens": 450,
        "evicted_blocks": 0,
        "evicted_tokens": 0,
    },
    "allocator": {"reserved_bytes": 1000, "allocated_bytes": 900},
    "host": None,
    "disk": None,
    "step": {"number": 900, "age_s": 0.02},
    "admission": {
        "max_prompt_tokens": None,
        "max_total_blocks": None,
        "expires_in_s": None,
        "draining": False,
    },
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def snapshot_json() -> dict[str, Any]:
    return copy.deepcopy(SNAPSHOT)


class AdminEngine:
    """Answers the engine's admin JSON; evictions take cached blocks. Its answers can be replaced by path."""

    def __init__(self) -> None:
        self.snapshot = copy.deepcopy(SNAPSHOT)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.posts: list[tuple[str, dict[str, Any], str]] = []
        self.compact = False
        self.resume = True
        self.stopping = False
        self.sparse = 2
        self.dies_after_acting = False
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/admin/v1/kv", self._kv)
        app.router.add_post("/admin/v1/kv/evict", self._evict)
        app.router.add_post("/admin/v1/admission", self._admission)
        app.router.add_post("/admin/v1/drain", self._drain)
        if self.resume:
            app.router.add_post("/admin/v1/resume", self._resume)
        if self.compact:
            app.router.add_post("/admin/v1/kv/compact", self._compact)
        return app

    async def _kv(self, request: web.Request) -> web.Response:
        return self._canned(request) or web.json_response(self.snapshot)

    async def _evict(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        blocks = self.snapshot["blocks"]
        wanted = round(body["ratio"] * (blocks["active"] + blocks["cached"])) if "ratio" in body else 1
        freed = min(wanted, blocks["cached"])
        if not body["dry_run"]:
            blocks["cached"] -= freed
            blocks["free"] += freed
            self.snapshot["sequence"] += 1
        report = {
            "blocks_freed": freed,
            "bytes_freed": freed * 195840,
            "dropped": freed,
            "demoted": 0,
            "cached_blocks": freed,
            "sequences_touched": 0,
            "tokens_dropped": 0,
            "eligible_blocks": blocks["cached"],
            "requested_blocks": wanted,
            "duration_ms": 1.5,
            "dry_run": body["dry_run"],
        }
        return self._canned(request) or web.json_response(report)

    async def _admission(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        answer = {
            "max_prompt_tokens": body["max_prompt_tokens"],
            "max_total_blocks": body["max_total_blocks"],
            "expires_in_s": body["ttl_s"],
        }
        self.snapshot["admission"].update(answer)
        return self._canned(request) or web.json_response(answer)

    async def _drain(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.snapshot["admission"]["draining"] = True
        return self._canned(request) or web.json_response({"drained": True, "in_flight": 0})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.snapshot["admission"]["draining"] = self.stopping
        return self._canned(request) or web.json_response({"draining": self.stopping})

    async def _compact(self, request: web.Request) -> web.Response:
        await self._note(request)
        freed, self.sparse = self.sparse, 0
        report = {
            "cells_moved": 7 * freed,
            "blocks_freed": freed,
            "bytes_freed": freed * 195840,
            "remaining_blocks": 0,
            "before": {"internal": 0.1, "external": 0.5, "split_blocks": 4, "largest_free_run": 4},
            "after": {"internal": 0.1, "external": 0.0, "split_blocks": 4 - freed, "largest_free_run": 4},
            "duration_ms": 2.5,
        }
        return self._canned(request) or web.json_response(report)

    async def _note(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.posts.append((request.path, body, request.headers["Idempotency-Key"]))
        if self.dies_after_acting:
            self.answers["/admin/v1/kv"] = (500, b"gone")
        return body

    def _canned(self, request: web.Request) -> web.Response | None:
        if request.path not in self.answers:
            return None
        status, body = self.answers[request.path]
        return web.Response(status=status, body=body, content_type="application/json")


Serve = Callable[[AdminEngine], Awaitable[AdminEngine]]


@pytest.fixture
async def serve_engine(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serves an engine on a Unix socket and fills in its `url`."""
    runners: list[web.AppRunner] = []

    async def serve(engine: AdminEngine) -> AdminEngine:
        runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        path = tmp_path / f"engine{len(runners)}.sock"
        await web.UnixSite(runner, str(path)).start()
        engine.url = f"unix:{path}"
        return engine

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def engine(serve_engine: Serve) -> AdminEngine:
    return await serve_engine(AdminEngine())


RawServe = Callable[[bytes, bool], Awaitable[str]]


@pytest.fixture
async def raw_server() -> AsyncIterator[RawServe]:
    """Serves bytes as they are: `await raw_server(data, hang)` gives a URL; `hang` keeps the line open after."""
    servers: list[asyncio.Server] = []
    over = asyncio.Event()
    handlers: set[asyncio.Task[None]] = set()

    async def start(data: bytes, hang: bool) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            handlers.add(task)
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(data)
                await writer.drain()
                if hang:
                    await over.wait()
            except (ConnectionError, asyncio.IncompleteReadError):
                return  # the client had enough: what these tests are about
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    over.set()
    for server in servers:
        server.close()
    await asyncio.gather(*handlers)


def http(body: bytes, *, length: int | None = None, status: str = "200 OK") -> bytes:
    """An HTTP answer, with a Content-Length that may lie."""
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


@dataclass(frozen=True)
class TlsFiles:
    cert: Path
    key: Path
    token: Path
    secret: str

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))


def write_pair(
    cert_path: Path, key_path: Path, name: str, password: bytes | None = None, *, expired: bool = False
) -> None:
    """A self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=-1 if expired else 1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    seal = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, seal))


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "token", "0123456789abcdef-secret")
    write_pair(files.cert, files.key, "first")
    files.token.write_text(files.secret + "\n")
    return files


@pytest.fixture
def scenario_file(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    def write(content: dict[str, Any]) -> str:
        path = tmp_path / "scenario.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def http_answer() -> Callable[..., bytes]:
    return http


@pytest.fixture
def make_pair() -> Callable[..., None]:
    return write_pair


@pytest.fixture
def admin_engine() -> type[AdminEngine]:
    return AdminEngine
