"""Hostile and mistaken bodies: always the OpenAI error shape, never a sequence left behind, never a dead server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.api.schema import NEUTRAL, ChatBody, CompletionBody, parse
from ullage_engine.fake_core import FakeCore

Open = Callable[..., Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def http(open_engine: Open, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        open_engine(**settings) as addresses,
        httpx.AsyncClient(base_url=addresses["public"], timeout=30) as made,
    ):
        yield made


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    return error


BAD_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 1025}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages.0.tool_calls"),
    (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"temperature": 2.1}, "temperature"),
    (CHAT, {"temperature": "0.5"}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_p": 1.5}, "top_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 10**6}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"n": 1.5}, "n"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"seed": 2**63}, "seed"),
    *((CHAT, {"kv_budget": bad}, "kv_budget") for bad in (0, -1, 1.5, 2.000001, "50%", True, [], {}, 2**40, 10**400)),
    (CHAT, {"kv_policy": "random"}, "kv_policy"),
    (COMPLETIONS, {"kv_policy": 5, "prompt": "a"}, "kv_policy"),
    (CHAT, {"seed": "x"}, "seed"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a", ""]}, "stop"),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"stop": ["a", 5]}, "stop"),
    (CHAT, {"stop": "a" * 257}, "stop"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"stream_options": 7}, "stream_options"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"model": ""}, "model"),
    (CHAT, {"model": None}, "model"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"presence_penalty": 0.5}, "presence_penalty"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**12]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 10**5}, "n"),
    (COMPLETIONS, {"n": 33, "prompt": ["a", "b"]}, "n"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (COMPLETIONS, {"suffix": "z"}, "suffix"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (COMPLETIONS, {"logprobs": 50}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
]


async def test_bad_fields_are_named(core: FakeCore, open_engine: Open) -> None:
    async with http(open_engine) as api:
        for path, change, param in BAD_FIELDS:
            base: dict[str, Any] = {"model": "fake", "max_tokens": 4}
            base |= {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
            error = error_of(await api.post(path, json=base | change), 400)
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (change, error)
            named = error["message"].replace("prompts times n", "n")
            assert (param or "").split(".")[-1] in named, error
    assert core.submitted == []


async def test_parameters_that_change_nothing_are_let_through(core: FakeCore, open_engine: Open) -> None:
    neutral = {name: values[0] if values else None for name, values in NEUTRAL.items()}
    harmless = {"user": "me", "metadata": {"a": 1}, "store": False, "parallel_tool_calls": True, "invented": [1]}
    nulls = dict.fromkeys(
        ("n", "temperature", "top_p", "max_tokens", "seed", "stop", "stream", "logprobs", "kv_budget", "kv_policy")
    )
    async with http(open_engine) as api:
        for path, base in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})):
            answer = await api.post(path, json={"model": "fake"} | base | neutral | harmless | nulls)
            assert answer.status_code == 200, answer.text


RAW_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "a list": b"[]",
    "null": b"null",
    "deep lists": b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x": ' * 50_000 + b"1" + b"}" * 50_000,
    "NaN": b'{"model": "fake", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "fake", "prompt": "a", "temperature": Infinity}',
    "huge exponent": b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
    "huge integer": b'{"model": "fake", "prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}",
    "longer integer": b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "huge token ids": b'{"model": "fake", "prompt": [' + b"9" * 400 + b"]}",
    "lone surrogate": b'{"model": "fake", "prompt": "\\ud800"}',
    "surrogate in a name": b'{"model": "fake\\ud800", "prompt": "x"}',
    "many bad items": b'{"model": "fake", "prompt": [' + b'"a",' * 200_000 + b"1]}",
    "many bad messages": b'{"model": "fake", "messages": [' + b"1," * 400_000 + b"1]}",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_hostile_bodies(core: FakeCore, open_engine: Open, path: str) -> None:
    async with http(open_engine) as api:
        for name, body in RAW_BODIES.items():
            answer = await api.post(path, content=body, headers={"Content-Type": "application/json"})
            if path == "/tokenize" and answer.status_code == 200:
                continue  # valid there: unknown fields of a body with a plain prompt are ignored
            error_of(answer, 400)
            assert answer.status_code == 400, name
        assert (await api.get("/health")).status_code == 200
    assert core.submitted == []


async def test_a_body_too_large_is_refused_whole_and_chunked(core: FakeCore, open_engine: Open) -> None:
    body = b'{"model": "fake", "prompt": "' + b"a" * 10_000_000 + b'"}'

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    async with http(open_engine, max_body_bytes=1 << 20) as api:
        for content in (body, parts()):
            error = error_of(await api.post(COMPLETIONS, content=content), 413)
            assert "--max-body" in error["message"]
        assert (await api.post(COMPLETIONS, json={"model": "fake", "prompt": "a"})).status_code == 200


async def test_a_client_that_sends_all_before_it_listens_reads_the_answer(open_engine: Open) -> None:
    """Not a reset connection."""
    body = b"a" * 10_000_000
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def send(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(head + body)
            return connection.recv(65536)

    async with open_engine(max_body_bytes=1 << 20) as addresses:
        answer = await asyncio.to_thread(send, addresses["port"])
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_ten_megabytes_of_text_are_too_many_tokens(core: FakeCore, open_engine: Open) -> None:
    async with http(open_engine, max_body_bytes=16 << 20) as api:
        body = {"model": "fake", "prompt": "the lazy dog " * 100_000}
        assert error_of(await api.post(COMPLETIONS, json=body), 400)["code"] == "context_length_exceeded"


async def test_too_long(core: FakeCore, open_engine: Open) -> None:
    async with http(open_engine) as api:
        prompt = [65] * core.max_model_len
        bodies: list[tuple[str, dict[str, Any], str]] = [
            (COMPLETIONS, {"prompt": prompt}, "prompt"),
            (COMPLETIONS, {"prompt": prompt[:-4], "max_tokens": 5}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": "日" * core.max_model_len}]}, "messages"),
            (CHAT, {"messages": HELLO, "max_tokens": core.max_model_len}, "messages"),
        ]
        for path, body, param in bodies:
            error = error_of(await api.post(path, json={"model": "fake"} | body), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert str(core.max_model_len) in error["message"]
        fits = {"model": "fake", "prompt": prompt[:-4], "max_tokens": 4}
        assert (await api.post(COMPLETIONS, json=fits)).status_code == 200


async def test_unknown_model_path_and_method(open_engine: Open) -> None:
    async with http(open_engine) as api:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
            error = error_of(await api.post(path, json={"model": "gpt-9"} | body), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "'fake'" in error["message"]
        error_of(await api.get("/v1/nothing"), 404)
        error_of(await api.get(CHAT), 405)
        error_of(await api.post("/admin/v1/kv/evict", json={"ratio": 1}), 404)


async def test_a_template_that_refuses_is_the_clients_error(tokenizer: Any, open_engine: Open) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        async with http(open_engine) as api:
            error = error_of(await api.post(CHAT, json={"model": "fake", "messages": HELLO}), 400)
    finally:
        tokenizer.chat_template = before
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]


async def test_keys_are_asked_for_everywhere_but_at_probes(open_engine: Open) -> None:
    async with http(open_engine, api_keys=frozenset({"s3cret", "other"})) as api:
        paths = [("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize")]
        for method, path in [*paths, ("POST", "/detokenize"), ("GET", "/nothing"), ("GET", "//health")]:
            for header in (None, "Bearer wrong", "Basic s3cret", "s3cret", "Bearer", "Bearer s3cretx"):
                headers = {} if header is None else {"Authorization": header}
                error = error_of(await api.request(method, path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics"):
            assert (await api.get(path)).status_code == 200
        for key in ("s3cret", "other"):
            assert (await api.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *NEUTRAL})


@given(st.dictionaries(st.sampled_from(fields), json_values, max_size=5), st.sampled_from([ChatBody, CompletionBody]))
@settings(max_examples=300)
async def test_any_json_is_read_or_refused_in_shape(change: dict[str, Any], kind: type[Any]) -> None:
    """Whatever the values, parsing gives a body or an error that JSON can carry."""
    import json

    from fastapi import Request

    from ullage_engine.api.errors import ApiError

    data = json.dumps({"model": "m", "prompt": "p", "messages": HELLO} | change).encode("utf-8", "surrogatepass")
    sent = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> Any:
        return next(sent)

    request = Request({"type": "http", "headers": [], "method": "POST", "path": "/"}, receive)
    try:
        body = await parse(request, kind, max_bytes=1 << 20)
    except ApiError as error:
        assert error.status == 400
        json.dumps(error.body(), ensure_ascii=False, allow_nan=False).encode()
    else:
        assert body.model
