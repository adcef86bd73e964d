"""One sequence's outputs become pieces of an answer: text, log probabilities, the reason it ended.

Purpose: the pure step between the core's tokens and the shapes of the two interfaces. A token's log probability
leaves together with the first of its text, so that text held back or cut takes its tokens with it. Non-goals:
waiting, HTTP, JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ullage_engine.api.stops import StopFilter
from ullage_engine.api.text import Detokenizer, TextCodec
from ullage_engine.errors import RequestFailed
from ullage_engine.request import FinishReason, TokenOutput

FLOOR = -9999.0
"""Stands for a log probability of minus infinity, which JSON cannot carry."""

Ending = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A token that could have been, or was, chosen."""

    text: str
    bytes: list[int] | None
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetail:
    """One generated token as log probabilities show it."""

    chosen: Alternative
    top: tuple[Alternative, ...]
    text_offset: int
    """Characters of the answer before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one output added to the answer."""

    text: str
    details: tuple[TokenDetail, ...] = ()
    ending: Ending | None = None


class Answer:
    """The state of one sequence's answer."""

    def __init__(self, codec: TextCodec, *, prompt: Sequence[int], stops: Sequence[str], logprobs: bool) -> None:
        self._codec = codec
        self._detokenizer = Detokenizer(codec, prompt)
        self._filter = StopFilter(stops)
        self._logprobs = logprobs
        self._pending: list[TokenDetail] = []
        self._decoded = 0
        self._released = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.kept_tokens: int | None = None
        """Of the context, in the cache at the end; None: not known."""
        self.dropped_tokens = 0

    def feed(self, output: TokenOutput) -> Piece:
        """Take one output.

        Raises:
            RequestFailed: the core ended the sequence before its answer was complete.
        """
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.kept_tokens is not None:
            self.kept_tokens, self.dropped_tokens = output.kept_tokens, output.dropped_tokens or 0
        if output.finish_reason in ("error", "abort"):
            raise RequestFailed(output.error or "the engine ended this request before its answer was complete")
        text = self._text_of(output)
        self._decoded += len(text)
        released = self._filter.feed(text)
        if released.stopped:
            return self._release(released.text, "stop")
        if output.finish_reason is None:
            return self._release(released.text, None)
        return self._release(released.text + self._filter.finish(), _ending(output.finish_reason))

    def _text_of(self, output: TokenOutput) -> str:
        """Text that became final; the token that ended the answer shows none."""
        text = ""
        if output.token is not None:
            self.generated_tokens += 1
            if output.finish_reason != "stop":
                self._note(output, output.token)
                text = self._detokenizer.feed(output.token)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        return text

    def _note(self, output: TokenOutput, token: int) -> None:
        if self._logprobs:
            detail = TokenDetail(
                chosen=self._alternative(token, output.logprob),
                top=tuple(self._alternative(other, logprob) for other, logprob in output.top_logprobs),
                text_offset=self._decoded,
            )
            self._pending.append(detail)

    def _alternative(self, token: int, logprob: float | None) -> Alternative:
        text, raw = self._codec.token_text(token)
        return Alternative(text=text, bytes=raw, logprob=FLOOR if logprob is None else max(logprob, FLOOR))

    def _release(self, text: str, ending: Ending | None) -> Piece:
        self._released += len(text)
        whole = ending is not None and self._released == self._decoded
        count = sum(whole or detail.text_offset < self._released for detail in self._pending)
        details, self._pending = tuple(self._pending[:count]), self._pending[count:]
        return Piece(text=text, details=details, ending=ending)


def _ending(reason: FinishReason) -> Ending:
    return "length" if reason == "length" else "stop"
