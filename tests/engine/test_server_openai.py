"""The public interface as the openai client sees it, over real sockets, with a scripted core."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from ullage_engine.fake_core import FakeCore, Gate
from ullage_engine.fake_engine import END
from ullage_engine.request import GenerationRequest, KvBudget, TokenOutput

Open = Callable[..., Any]
HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client(open_engine: Open, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        open_engine(**settings) as addresses,
        openai.AsyncOpenAI(base_url=f"{addresses['public']}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def says(core: FakeCore, tokenizer: Any, text: str, *, cached: int = 0, ending: str = "stop") -> list[int]:
    """Script: every request is answered with the tokens of `text`."""
    tokens = tokenizer.encode(text, add_special_tokens=False)

    def script(request: GenerationRequest) -> Iterable[TokenOutput]:
        for at, token in enumerate(tokens):
            last = at == len(tokens) - 1 and ending == "length"
            yield TokenOutput(
                request_id=request.request_id,
                token=token,
                logprob=-0.5,
                top_logprobs=((token, -0.5), (tokens[0], float("-inf")))[: request.sampling.logprobs or 0],
                cached_tokens=cached,
                finish_reason="length" if last else None,
            )
        if ending == "stop":
            end = tokenizer.convert_tokens_to_ids(END)
            yield TokenOutput(request_id=request.request_id, token=end, finish_reason="stop")

    core.script = script
    return tokens


async def test_a_kv_budget_reaches_the_core_and_usage_says_what_was_kept(core: FakeCore, open_engine: Open) -> None:
    def script(request: GenerationRequest) -> Iterator[TokenOutput]:
        yield TokenOutput(request_id=request.request_id, token=5, kept_tokens=3, dropped_tokens=0)
        yield TokenOutput(
            request_id=request.request_id, token=5, kept_tokens=2, dropped_tokens=9, finish_reason="length"
        )

    async with client(open_engine) as api:
        plain = await api.completions.create(model="fake", prompt="a b")
        core.script = script
        budgets = (0.25, 64, 1, None)
        for budget in budgets:
            extra = {"kv_budget": budget, "kv_policy": None if budget is None else "window"}
            answer = await api.completions.create(model="fake", prompt="a b", n=2, extra_body=extra)
            assert answer.usage.model_extra["kv_cache"] == {"kept_tokens": 4, "dropped_tokens": 18}
    assert "kv_cache" not in (plain.usage.model_extra or {})
    asked = [(request.kv_budget, request.kv_policy) for request in core.submitted[1::2]]
    assert asked == [
        (KvBudget(share=0.25), "window"),
        (KvBudget(tokens=64), "window"),
        (KvBudget(share=1.0), "window"),
        (None, None),
    ]


async def test_chat(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    tokens = says(core, tokenizer, "Füße, naïve 日本語 😀", cached=3)
    core.eos_token_ids = frozenset({7, 9})
    async with client(open_engine) as api:
        answer = await api.chat.completions.create(
            model="fake", messages=HELLO, temperature=0, top_p=0.5, seed=11, max_completion_tokens=40
        )
    prompt = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.role, choice.message.content) == ("assistant", "Füße, naïve 日本語 😀")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert usage.prompt_tokens == len(tokenizer.encode(prompt, add_special_tokens=False))
    assert usage.completion_tokens == len(tokens) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3
    (request,) = core.submitted
    assert list(request.prompt) == tokenizer.encode(prompt, add_special_tokens=False)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0, 0.5, 11, 40)
    assert sampling.stop_token_ids == {7, 9}
    assert sampling.logprobs is None


async def test_defaults(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    says(core, tokenizer, "x")
    async with client(open_engine) as api:
        await api.chat.completions.create(model="fake", messages=HELLO)
        await api.completions.create(model="fake", prompt="hello")
        await api.completions.create(model="fake", prompt=[65] * (core.max_model_len - 3))
        await api.completions.create(model="fake", prompt="a", extra_body={"ignore_eos": True})
    chat, completion, long, endless = core.submitted
    assert chat.sampling.max_tokens == core.max_model_len - len(chat.prompt)
    assert completion.sampling.max_tokens == 16
    assert long.sampling.max_tokens == 3
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.seed) == (1.0, 1.0, None)
    assert endless.sampling.stop_token_ids == frozenset()


async def test_chat_stream(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    tokens = says(core, tokenizer, "日本語 and 😀", cached=2)
    async with client(open_engine) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        twice = await api.chat.completions.create(model="fake", messages=HELLO, n=2)
    assert twice.usage.completion_tokens == 2 * (len(tokens) + 1)
    assert twice.usage.prompt_tokens_details.cached_tokens == 2  # of a prompt that counts once
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == len(tokens) + 1
    assert last.usage.prompt_tokens_details.cached_tokens == 2
    assert all(part.usage is None for part in parts)
    assert parts[0].choices[0].delta.role == "assistant"
    pieces = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(pieces) == "日本語 and 😀"
    assert not any("\ufffd" in piece for piece in pieces)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_on_the_wire(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    says(core, tokenizer, "ab", ending="length")
    body = {"model": "fake", "prompt": "x", "stream": True}
    async with open_engine() as addresses, httpx.AsyncClient() as http:
        answer = await http.post(f"{addresses['public']}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, empty = answer.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    objects = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "usage" not in objects[0]
    assert "".join(thing["choices"][0]["text"] for thing in objects) == "ab"
    assert objects[-1]["choices"][0]["finish_reason"] == "length"
    assert {thing["object"] for thing in objects} == {"text_completion"}


async def test_completion_prompts_of_every_kind(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    says(core, tokenizer, "y")
    ids = tokenizer.encode("the dog")
    async with client(open_engine) as api:
        for prompt in ("the dog", ["the dog", "a"], ids, [ids, [65]]):
            answer = await api.completions.create(model="fake", prompt=prompt, n=2)
            assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
            assert {choice.text for choice in answer.choices} == {"y"}
    prompts = [request.prompt for request in core.submitted]
    dog, a = tuple(ids), tuple(tokenizer.encode("a"))
    assert prompts == [dog, dog, dog, dog, a, a, dog, dog, dog, dog, (65,), (65,)]


async def test_n_choices_have_their_own_seeds_and_texts(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]

    def script(request: GenerationRequest) -> Iterable[TokenOutput]:
        at = (request.sampling.seed or 0) - 5
        yield TokenOutput(request_id=request.request_id, token=letters[at])
        yield TokenOutput(request_id=request.request_id, token=letters[at], finish_reason="length")

    core.script = script
    async with client(open_engine) as api:
        whole = await api.chat.completions.create(model="fake", messages=HELLO, n=3, seed=5)
        stream = await api.chat.completions.create(model="fake", messages=HELLO, n=3, seed=5, stream=True)
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == ["aa", "bb", "cc"]
    assert streamed == ["aa", "bb", "cc"]
    assert whole.usage.completion_tokens == 6
    assert whole.usage.prompt_tokens == len(core.submitted[0].prompt)


@pytest.mark.parametrize("stop", ["dog", ["cat", "dog"], ["lazy dog jumps", "dog"]])
async def test_stop_strings(core: FakeCore, tokenizer: Any, open_engine: Open, stop: Any) -> None:
    """Cut exactly, nothing of a partial match ever sent, and the sequence is aborted although it goes on."""
    tokens = tokenizer.encode("the lazy dog! ")

    def endless(request: GenerationRequest) -> Iterable[TokenOutput]:
        while True:
            for token in tokens:
                yield TokenOutput(request_id=request.request_id, token=token)

    core.script = endless
    async with client(open_engine) as api:
        whole = await api.chat.completions.create(model="fake", messages=HELLO, stop=stop)
        stream = await api.completions.create(model="fake", prompt="x", stop=stop, stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
    assert whole.choices[0].message.content == "the lazy "
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == "the lazy "
    assert pieces[-1].finish_reason == "stop"
    assert core.wait_for(lambda core: not core.live)
    assert core.aborted == [request.request_id for request in core.submitted]


async def test_a_partial_stop_string_at_the_end_is_sent(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    says(core, tokenizer, "lazy do")
    async with client(open_engine) as api:
        answer = await api.chat.completions.create(model="fake", messages=HELLO, stop="dog")
    assert answer.choices[0].message.content == "lazy do"


async def test_chat_logprobs(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    tokens = says(core, tokenizer, "é dog")
    async with client(open_engine) as api:
        whole = await api.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=2)
        stream = await api.chat.completions.create(
            model="fake", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            token async for chunk in stream if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
        ]
        plain = await api.chat.completions.create(model="fake", messages=HELLO, logprobs=True)
    content = whole.choices[0].logprobs.content
    assert len(content) == len(tokens)
    assert bytes(byte for token in content for byte in token.bytes).decode() == "é dog"
    assert all(token.logprob == -0.5 for token in content)
    assert [other.logprob for other in content[1].top_logprobs] == [-0.5, -9999.0]
    assert streamed == content
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)
    assert core.submitted[-1].sampling.logprobs == 0


async def test_completion_logprobs_and_stop(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    """Tokens behind the cut are not told."""
    says(core, tokenizer, "the lazy dog")
    async with client(open_engine) as api:
        answer = await api.completions.create(model="fake", prompt="x", logprobs=1, stop=" dog")
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "the lazy"
    assert "".join(logprobs.tokens) == "the lazy"
    offsets = [len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))]
    assert logprobs.text_offset == offsets
    assert logprobs.token_logprobs == [-0.5] * len(offsets)
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]


async def test_content_parts_and_developer_role(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    says(core, tokenizer, "x")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    async with client(open_engine) as api:
        await api.chat.completions.create(
            model="fake", messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
        )
    text = tokenizer.decode(core.submitted[0].prompt, skip_special_tokens=False)
    assert "system\nbe kind" in text
    assert "user\nhello" in text


async def test_models_and_tokenize(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    core.model_name = "family/fake"
    async with client(open_engine) as api:
        (model,) = [model async for model in api.models.list()]
        assert (await api.models.retrieve("family/fake")).id == model.id == "family/fake"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")
        base = str(api.base_url).removesuffix("/v1/")
        async with httpx.AsyncClient(base_url=base) as http:
            long = "the lazy dog " * 1000
            for text in ("Füße", long):
                answer = (await http.post("/tokenize", json={"prompt": text})).json()
                assert answer["tokens"] == tokenizer.encode(text)
                assert answer["count"] == len(answer["tokens"])
                back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
                assert back.json() == {"prompt": text}
            chat = (await http.post("/tokenize", json={"messages": HELLO})).json()
            assert tokenizer.decode(chat["tokens"]).endswith("assistant\n")
            both = await http.post("/tokenize", json={"prompt": "x", "messages": HELLO})
            outside = await http.post("/detokenize", json={"tokens": [10**9]})
    assert both.status_code == outside.status_code == 400


async def test_a_failed_request_ends_alone(core: FakeCore, tokenizer: Any, open_engine: Open) -> None:
    """One fails before its first token, one after it; the third, in flight all the while, is complete."""
    gate = core.gate()
    (letter,) = tokenizer.encode("a")

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        name = request.request_id
        if request.sampling.seed == 1:
            yield TokenOutput(request_id=name, token=None, finish_reason="error", error="cannot be recomputed")
        yield TokenOutput(request_id=name, token=letter)
        if request.sampling.seed == 2:
            yield TokenOutput(request_id=name, token=None, finish_reason="abort")
        yield gate
        yield TokenOutput(request_id=name, token=letter, finish_reason="length")

    core.script = script
    async with client(open_engine) as api:
        good = await api.completions.create(model="fake", prompt="x", seed=3, stream=True)
        with pytest.raises(openai.InternalServerError, match="cannot be recomputed") as early:
            await api.completions.create(model="fake", prompt="x", seed=1, stream=True)
        late = await api.completions.create(model="fake", prompt="x", seed=2, stream=True)
        with pytest.raises(openai.APIError, match="ended this request"):
            async for _ in late:
                pass
        gate.open()
        text = "".join([chunk.choices[0].text async for chunk in good])
    assert text == "aa"
    assert early.value.status_code == 500
    assert early.value.code == "request_failed"


async def test_a_crash_in_the_text_side_ends_that_request_alone(
    core: FakeCore, tokenizer: Any, open_engine: Open
) -> None:
    """A token that the tokenizer cannot even look at: the sequence is aborted, the next request is fine."""

    def script(request: GenerationRequest) -> Iterable[TokenOutput]:
        while True:
            bad = request.sampling.seed == 1
            yield TokenOutput(request_id=request.request_id, token=-5 if bad else 65)

    core.script = script
    async with client(open_engine) as api:
        with pytest.raises(openai.InternalServerError, match="internal error"):
            await api.completions.create(model="fake", prompt="x", seed=1, logprobs=1)
        answer = await api.completions.create(model="fake", prompt="x", seed=2, stop=tokenizer.decode([65, 65]))
    assert answer.choices[0].finish_reason == "stop"
    assert core.wait_for(lambda core: not core.live)


async def test_refusals_of_the_core(core: FakeCore, open_engine: Open) -> None:
    async with client(open_engine) as api:
        core.queue_full = True
        with pytest.raises(openai.RateLimitError) as overloaded:
            await api.completions.create(model="fake", prompt="x", stream=True)
        core.queue_full = False
        from ullage_engine.request import AdmissionLimit

        core.set_admission(AdmissionLimit(max_prompt_tokens=3))
        with pytest.raises(openai.RateLimitError) as throttled:
            await api.completions.create(model="fake", prompt="quite a long prompt")
        core.set_admission(None)
        core.pool.total = 4
        with pytest.raises(openai.BadRequestError) as never:
            await api.completions.create(model="fake", prompt="x", max_tokens=900)
        core.set_draining(True)
        with pytest.raises(openai.InternalServerError) as draining:
            await api.completions.create(model="fake", prompt="x")
    assert overloaded.value.response.headers["retry-after"] == "1"
    assert throttled.value.response.headers["retry-after"] == "8"
    assert never.value.code == "context_length_exceeded"
    assert draining.value.status_code == 503
    assert draining.value.code == "draining"
    assert draining.value.response.headers["retry-after"] == "5"


async def test_a_refused_choice_takes_the_others_with_it(core: FakeCore, open_engine: Open) -> None:
    """All sequences of a call or none: the first is aborted when the second is refused."""
    gate = core.gate()

    def script(request: GenerationRequest) -> Iterable[TokenOutput | Gate]:
        core.queue_full = True
        return iter([gate])

    core.script = script
    async with client(open_engine) as api:
        with pytest.raises(openai.RateLimitError):
            await api.completions.create(model="fake", prompt="x", n=2)
    assert core.live == ()
    assert len(core.aborted) == 1


async def test_cache_salt_keeps_tenants_apart(core: FakeCore, open_engine: Open) -> None:
    async with client(open_engine) as api:
        for salt in ("tenant-a", None):
            extra = {"cache_salt": salt} if salt else {}
            await api.completions.create(model="fake", prompt="Hello", max_tokens=2, n=2, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            await api.completions.create(model="fake", prompt="Hello", extra_body={"cache_salt": ""})
    assert [request.tenant for request in core.submitted] == ["tenant-a", "tenant-a", "", ""]


async def test_a_request_says_whether_tokens_may_be_drafted_for_it(core: FakeCore, open_engine: Open) -> None:
    async with client(open_engine) as api:
        for extra in ({}, {"speculation": None}, {"speculation": True}, {"speculation": False}):
            await api.completions.create(model="fake", prompt="Hello", max_tokens=2, extra_body=extra)
        with pytest.raises(openai.BadRequestError, match="speculation"):
            await api.completions.create(model="fake", prompt="Hello", extra_body={"speculation": "no"})
    assert [request.speculation for request in core.submitted] == [True, True, True, False]
