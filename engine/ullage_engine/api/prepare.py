"""From a checked body to sequences: prompts become tokens, limits of the model are kept, defaults filled in.

Non-goals: reading HTTP bodies (`schema`), shapes of answers (`chat`, `completions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ullage_engine.api.answer import Answer
from ullage_engine.api.core import EngineCore
from ullage_engine.api.errors import ApiError, invalid, too_long
from ullage_engine.api.generation import Plan
from ullage_engine.api.schema import MAX_CHOICES, SEED_LIMIT, ChatBody, CompletionBody, GenerationBody, Message
from ullage_engine.api.text import TextCodec
from ullage_engine.request import GenerationRequest, KvBudget, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI default of `max_tokens` for completions."""
LONG_TEXT = 4096
"""Characters from which text is tokenized in a thread, so that other requests' events go on."""
MESSAGE_COST = 32
"""Characters that a message counts for beside its content: the template writes about so many around it."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call made ready: its id and its sequences, `choices` of them for each prompt in turn."""

    id: str
    prompts: tuple[Prompt, ...]
    choices: int
    plans: tuple[Plan, ...]

    @property
    def usage(self) -> dict[str, object]:
        """The OpenAI usage object, as far as the sequences have come. A prompt counts once, not `n` times."""
        prompt = sum(map(len, self.prompts))
        generated = sum(plan.answer.generated_tokens for plan in self.plans)
        cached = sum(plan.answer.cached_tokens for plan in self.plans[:: self.choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            **self._kept,
        }

    @property
    def _kept(self) -> dict[str, object]:
        """What the sequences' caches held at the end, where the core says it; an extension of the usage object."""
        answers = [plan.answer for plan in self.plans if plan.answer.kept_tokens is not None]
        if not answers:
            return {}
        kept = sum(answer.kept_tokens or 0 for answer in answers)
        return {"kv_cache": {"kept_tokens": kept, "dropped_tokens": sum(answer.dropped_tokens for answer in answers)}}


class Preparer:
    """Makes calls ready for one model."""

    def __init__(self, core: EngineCore, codec: TextCodec) -> None:
        self._core = core
        self._codec = codec
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Let the tokenizing thread go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises ApiError unless `name` is the model served."""
        if name != self._core.model_name:
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this server has {self._core.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def chat(self, call_id: str, body: ChatBody) -> Call:
        """Sequences of a chat completion; without a limit they may fill the context."""
        self.check_model(body.model)
        prompt = await self.encode_chat(body.messages)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        top = (body.top_logprobs or 0) if body.logprobs else None
        return self._call(call_id, body, (prompt,), asked, default=None, logprobs=top, param="messages")

    async def completion(self, call_id: str, body: CompletionBody) -> Call:
        """Sequences of a completion: `n` for each prompt."""
        self.check_model(body.model)
        prompts = await self._encode_prompts(body)
        default = DEFAULT_COMPLETION_TOKENS
        return self._call(
            call_id, body, prompts, body.max_tokens, default=default, logprobs=body.logprobs, param="prompt"
        )

    async def encode_chat(self, messages: Sequence[Message]) -> Prompt:
        """Tokens of a conversation."""
        texts = [message.for_template() for message in messages]
        if sum(len(text["content"]) + MESSAGE_COST for text in texts) < LONG_TEXT:
            return self._codec.encode_chat(texts)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._codec.encode_chat, texts)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Tokens of a text."""
        if len(text) < LONG_TEXT:
            return self._codec.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._codec.encode(text, add_special_tokens=add_special_tokens)
        )

    def check_ids(self, ids: Sequence[int], *, param: str) -> Prompt:
        """Token ids from a client, if the model knows all of them."""
        size = self._codec.vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise invalid(f"{param} has a token id outside 0..{size - 1}", param=param)
        return tuple(ids)

    async def _encode_prompts(self, body: CompletionBody) -> tuple[Prompt, ...]:
        prompts: list[Prompt] = []
        for part in _parts(body.prompt):
            if len(prompts) * (body.n or 1) > MAX_CHOICES:
                break  # refused below; no need to tokenize the rest
            ids = await self.encode(part) if isinstance(part, str) else self.check_ids(part, param="prompt")
            prompts.append(ids)
        return tuple(prompts)

    def _call(
        self,
        call_id: str,
        body: GenerationBody,
        prompts: tuple[Prompt, ...],
        asked: int | None,
        *,
        default: int | None,
        logprobs: int | None,
        param: str,
    ) -> Call:
        choices = body.n or 1
        if not prompts or not all(prompts):
            raise invalid(f"{param} is empty: give at least one token", param=param)
        if len(prompts) * choices > MAX_CHOICES:
            raise invalid(f"prompts times n is above {MAX_CHOICES}; send several requests", param="n")
        budgets = [self._budget(len(prompt), asked, default, param) for prompt in prompts]
        plans = [
            self._plan(f"{call_id}-{at * choices}", body, prompt, budget, logprobs, choice)
            for at, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
            for choice in range(choices)
        ]
        return Call(id=call_id, prompts=prompts, choices=choices, plans=tuple(plans))

    def _budget(self, prompt_tokens: int, asked: int | None, default: int | None, param: str) -> int:
        limit = self._core.max_model_len
        room = limit - prompt_tokens
        if room < (asked or 1):
            raise too_long(prompt_tokens, asked or 1, limit, param=param)
        return asked or (room if default is None else min(default, room))

    def _plan(
        self,
        first_id: str,
        body: GenerationBody,
        prompt: Prompt,
        budget: int,
        logprobs: int | None,
        choice: int,
    ) -> Plan:
        """One choice; all but the first are forks, so that the prompt is computed and kept once."""
        request_id = f"{first_id}.{choice}" if choice else first_id
        sampling = SamplingParams(
            max_tokens=budget,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=None if body.seed is None else _shifted(body.seed, choice),
            stop_token_ids=frozenset() if body.ignore_eos else self._core.eos_token_ids,
            logprobs=logprobs,
        )
        answer = Answer(self._codec, prompt=prompt, stops=body.stops, logprobs=logprobs is not None)
        fork_of = first_id if choice else None
        request = GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            tenant=body.cache_salt or "",
            kv_budget=None if body.kv_budget is None else KvBudget.of(body.kv_budget),
            kv_policy=body.kv_policy,
            fork_of=fork_of,
            speculation=body.speculation is not False,
        )
        return Plan(request, answer)


def _parts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a completion, each a text or a list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    lists = [part for part in prompt if isinstance(part, list)]
    return texts or ([ids] if ids else lists)


def _shifted(seed: int, choice: int) -> int:
    """Each of `n` choices gets a seed of its own; the first one the client's."""
    return (seed + choice + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
