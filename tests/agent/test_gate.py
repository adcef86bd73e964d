"""The admission gate as an engine's server loads it: plain ASGI, one file, one state file."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent import gate
from ullage_agent.gate import AdmissionGate, GateState, StateFile, judge, parse_state, project

Message = MutableMapping[str, Any]


class App:
    """Echoes the body it was given."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def scope(path: str = "/v1/completions", method: str = "POST", **more: Any) -> Message:
    return {"type": "http", "method": method, "path": path, "headers": [], **more}


async def call(
    app: Any, body: bytes, where: Message | None = None, pieces: int = 3
) -> tuple[int, dict[str, str], bytes]:
    step = max(1, len(body) // pieces)
    parts = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
    inbox = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    inbox[-1]["more_body"] = False
    sent: list[Message] = []

    async def receive() -> Message:
        return inbox.pop(0) if inbox else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(where or scope(), receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, sent[1]["body"]


def write(path: Path, **state: Any) -> None:
    path.write_text(json.dumps({"version": 1, "block_tokens": 16, **state}))


def request(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


LONG = request(prompt="word " * 400, max_tokens=10)
SHORT = request(prompt="hello", max_tokens=10)


async def test_open_without_a_file(tmp_path: Path) -> None:
    app = App()
    status, _, _ = await call(AdmissionGate(app, str(tmp_path / "none.json")), LONG)
    assert (status, app.bodies) == (200, [LONG])


async def test_long_prompts_are_refused_while_throttled(tmp_path: Path) -> None:
    file, app = tmp_path / "gate.json", App()
    write(file, max_prompt_tokens=100, expires_at=time.time() + 20)
    gated = AdmissionGate(app, str(file))
    status, headers, body = await call(gated, LONG)
    assert status == 429
    assert 1 <= int(headers["retry-after"]) <= 20
    error = json.loads(body)["error"]
    assert error["code"] == "throttled"
    assert "500 tokens" in error["message"]
    status, _, _ = await call(gated, SHORT)
    assert (status, app.bodies) == (200, [SHORT])


async def test_a_long_answer_takes_blocks_too(tmp_path: Path) -> None:
    file, app = tmp_path / "gate.json", App()
    write(file, max_total_blocks=10)
    status, _, body = await call(AdmissionGate(app, str(file)), request(prompt=[1] * 16, max_tokens=160))
    assert status == 429
    assert b"11 KV blocks" in body
    status, _, _ = await call(AdmissionGate(app, str(file)), request(prompt=[1] * 16, max_tokens=144))
    assert status == 200


async def test_the_gate_opens_when_the_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    write(file, max_prompt_tokens=1, expires_at=time.time() - 1)
    assert (await call(AdmissionGate(App(), str(file)), LONG))[0] == 200


async def test_draining_refuses_everything_that_generates(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    write(file, draining=True)
    gated = AdmissionGate(App(), str(file))
    assert (await call(gated, SHORT))[0] == 503
    assert (await call(gated, b"", scope("/health", "GET")))[0] == 200
    assert (await call(gated, SHORT, scope("/v1/embeddings")))[0] == 200


async def test_a_mounted_application_is_guarded_too(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    write(file, draining=True)
    where = scope("/llm/v1/completions", root_path="/llm")
    assert (await call(AdmissionGate(App(), str(file)), SHORT, where))[0] == 503


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "max_prompt_tokens": -3}'])
async def test_a_file_that_makes_no_sense_opens_the_gate(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gate.json"
    file.write_text(text)
    assert (await call(AdmissionGate(App(), str(file)), LONG))[0] == 200


def test_a_changed_file_is_seen_and_looked_at_rarely(tmp_path: Path) -> None:
    file, now = tmp_path / "gate.json", [0.0]
    state = StateFile(str(file), lambda: now[0])
    assert state.current() == GateState()
    write(file, max_prompt_tokens=7)
    assert state.current() == GateState()
    now[0] += gate.LOOK_EVERY_S
    assert state.current().max_prompt_tokens == 7
    file.unlink()
    now[0] += gate.LOOK_EVERY_S
    assert state.current() == GateState()


async def test_a_body_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 100)
    file = tmp_path / "gate.json"
    write(file, max_prompt_tokens=10_000)
    assert (await call(AdmissionGate(App(), str(file)), LONG, pieces=50))[0] == 429


async def test_what_is_no_request_is_left_to_the_engine(tmp_path: Path) -> None:
    file, app = tmp_path / "gate.json", App()
    write(file, max_prompt_tokens=1)
    assert (await call(AdmissionGate(app, str(file)), b"not json"))[0] == 200
    assert app.bodies == [b"not json"]


async def test_a_starlette_server_loads_it_as_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`app.add_middleware(cls)` without arguments, the file named by the environment."""
    file = tmp_path / "gate.json"
    write(file, max_prompt_tokens=100)
    monkeypatch.setenv(gate.FILE_VARIABLE, str(file))
    app = FastAPI()
    app.add_middleware(AdmissionGate)

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        return {"echo": len(body["prompt"])}

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        refused = await client.post("/v1/completions", json={"prompt": "word " * 400})
        served = await client.post("/v1/completions", json={"prompt": "hello"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "throttled")
    assert (served.status_code, served.json()) == (200, {"echo": 5})


async def test_websockets_and_lifespan_pass(tmp_path: Path) -> None:
    await AdmissionGate(App(), str(tmp_path / "x"))({"type": "lifespan"}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "tokens", "sequences"),
    [
        ({"prompt": "abcdefgh"}, 2, 1),
        ({"prompt": [1, 2, 3]}, 3, 1),
        ({"prompt": [[1, 2, 3], [4]]}, 3, 2),
        ({"prompt": ["abcd", "abcdefgh"]}, 2, 2),
        ({"prompt": "abcd", "n": 4}, 1, 4),
        ({"messages": [{"role": "user", "content": "abcdefgh"}]}, 3, 1),
        ({"text": "abcd", "sampling_params": {"max_new_tokens": 9}}, 1, 1),
        ({"input": "abcd"}, 1, 1),
    ],
)
def test_projections(fields: dict[str, Any], tokens: int, sequences: int) -> None:
    found = project(request(**fields))
    assert found is not None
    assert (found.prompt_tokens, found.sequences) == (tokens, sequences)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda x: st.lists(x, max_size=4) | st.dictionaries(st.sampled_from(["prompt", "messages", "n", "max_tokens", "sampling_params", "input"]), x, max_size=4)))  # fmt: skip  # noqa: E501
def test_no_json_breaks_the_gate(value: Any) -> None:
    judge(GateState(max_prompt_tokens=2, max_total_blocks=2), json.dumps(value).encode())


@given(st.binary(max_size=60))
def test_a_state_is_read_or_refused(data: bytes) -> None:
    try:
        parse_state(data)
    except ValueError:
        return


def test_the_file_works_alone_with_the_standard_library(tmp_path: Path) -> None:
    package = tmp_path / "ullage_agent"
    package.mkdir()
    shutil.copy(gate.__file__, package / "gate.py")
    code = "import ullage_agent.gate as g; g.AdmissionGate(None); print({'aiohttp', 'msgspec'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
