"""What clients may send to the public interface, checked for type and range.

Purpose: one pydantic model a call, and the table of parameters that are known, would change the answer, and
are not supported: they are refused by name instead of being ignored. Unknown ones that are not in the table
are ignored, as clients send many that change nothing here. Non-goal: checks that need the model (`prepare`).
Lists fail at their first bad item, so that a hostile one cannot make a million errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ullage_engine.api.body import read_body
from ullage_engine.api.errors import from_validation, unsupported
from ullage_engine.config import EvictionPolicy
from ullage_engine.request import KvBudget

MAX_CHOICES = 64
"""Sequences that one call may start: prompts times `n`."""
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 1 << 31
"""Far above any context; keeps numbers in messages readable."""
MAX_MESSAGES = 1024
"""Of one conversation: each costs the template time, however short it is."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
SEED_LIMIT = 1 << 63

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters not supported, each with the values that change nothing; null is always one."""


_BASE = ConfigDict(strict=True, allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = _BASE

    include_usage: bool = False


class GenerationBody(BaseModel):
    """Parameters common to completions and chat completions."""

    model_config = _OPEN

    model: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Go on past the model's end token; for load tests."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Keep this prompt's cache apart from those with another salt (or none): one a tenant."""
    speculation: bool | None = None
    """False: draft no tokens for this request, where the engine would."""

    kv_budget: Annotated[float, Field(gt=0, le=MAX_TOKENS)] | None = None
    """What may stay of the context in the cache: up to 1 a share of it, above it tokens. None: the engine's default."""
    kv_policy: EvictionPolicy | None = None
    """What chooses it; None: the engine's default."""

    @field_validator("kv_budget")
    @classmethod
    def _check_budget(cls, number: float | None) -> float | None:
        if number is not None:
            KvBudget.of(number)
        return number

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"give at most {MAX_STOPS} stop strings")
        if any(not 1 <= len(one) <= MAX_STOP_LENGTH for one in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Raises ApiError for a parameter that would change the answer."""
        for name, value in (self.model_extra or {}).items():
            neutral = NEUTRAL.get(name)
            if neutral is not None and value is not None and value not in neutral:
                raise unsupported(name, value, "leave it out")


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: (
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None

    def refuse_unsupported(self) -> None:
        """As in the base; `best_of` too when it asks for more answers than `n`."""
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", self.best_of, "leave it out or make it equal to n")


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = _BASE

    type: str
    text: str = ""

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str) -> str:
        if kind != "text":
            raise ValueError("only parts of type text are supported")
        return kind


class Message(BaseModel):
    """One message of a conversation."""

    model_config = _OPEN

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def refuse_unsupported(self, at: int) -> None:
        """Raises ApiError for parts of a message that would change the prompt."""
        for name in ("tool_calls", "function_call", "audio"):
            value = (self.model_extra or {}).get(name)
            if value:
                raise unsupported(f"messages.{at}.{name}", value, "send text messages only")

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def refuse_unsupported(self) -> None:
        """As in the base, for the messages too."""
        super().refuse_unsupported()
        for at, message in enumerate(self.messages):
            message.refuse_unsupported(at)
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", self.top_logprobs, "set logprobs to true as well")


class TokenizeBody(BaseModel):
    """Body of `POST /tokenize`: a text, or a conversation as the model will see it."""

    model_config = _BASE

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = _BASE

    tokens: TokenIds


BodyT = TypeVar("BodyT", bound=BaseModel)


async def parse(request: Request, kind: type[BodyT], *, max_bytes: int) -> BodyT:
    """Read a request's body as `kind`.

    Raises:
        ApiError: too large, too slow, not JSON, a wrong type or range, an unsupported parameter.
    """
    data = await read_body(request, max_bytes)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_context=False)) from error
    if isinstance(body, GenerationBody):
        body.refuse_unsupported()
    return body
