"""What goes into the step loop and what comes out of it: token ids only, no text and no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
Destination = Literal["host", "drop"]
"""Where an eviction may send content: to the host tier, from which it can come back, or nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen."""

    max_tokens: int
    """Upper bound on generated tokens, at least 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """In (0, 1]: the smallest set of tokens with at least this mass."""
    seed: int | None = None
    """None: seeded from the request id's position; a number makes the answer repeatable."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer with reason `stop`; the token itself is reported."""
    logprobs: int | None = None
    """None: not computed; n: the chosen token's log probability and those of the n likeliest."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How much of its context a sequence keeps in the cache; exactly one of the two is given."""

    tokens: int | None = None
    """At least 1: on average over layers and heads."""
    share: float | None = None
    """In (0, 1] of the tokens computed so far; 1 keeps all."""

    def limit(self, computed: int) -> float:
        """Tokens that a sequence of `computed` tokens may keep."""
        return float(self.tokens) if self.tokens is not None else computed * (self.share or 1.0)

    @staticmethod
    def of(number: float) -> KvBudget:
        """As written by people: up to 1 a share, above it whole tokens.

        Raises:
            ValueError: neither.
        """
        if 0 < number <= 1:
            return KvBudget(share=float(number))
        if number > 1 and number == int(number):
            return KvBudget(tokens=int(number))
        raise ValueError("give a share above 0 and up to 1, or a whole number of tokens from 2 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. `request_id` is unique among live requests."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams
    tenant: str = ""
    """Prompts reuse each other's blocks within a tenant only, so that timing tells nobody what others asked."""
    speculation: bool = True
    """Whether tokens may be drafted for it, where the engine speculates."""
    kv_budget: KvBudget | None = None
    """None: the engine's default, which may be none."""
    kv_policy: str | None = None
    """Which of the engine's policies chooses what to keep; None: the engine's default."""
    fork_of: str | None = None
    """Another request with the same prompt, submitted before: its prompt is computed once for both if it still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One event of a request. The last one has a `finish_reason`."""

    request_id: str
    token: int | None
    """The token generated; None where the request ended without one (abort, error)."""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused from the prefix cache."""
    kept_tokens: int | None = None
    """Of the last one with a token: tokens of its context in the cache at the end, averaged over layers and heads;
    None: not known."""
    dropped_tokens: int | None = None
    """The others, which eviction dropped."""


Sink = Callable[[TokenOutput], None]
"""Receives a request's events in order, in the step loop's thread; must return at once and not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimit:
    """Limit in force while throttled."""

    max_prompt_tokens: int | None = None
    max_total_blocks: int | None = None
    """Blocks that prompt and `max_tokens` together may project to."""
    expires_at: float = field(default=float("inf"))
    """Monotonic seconds when the limit lifts by itself."""
