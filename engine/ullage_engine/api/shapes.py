"""The two families of OpenAI answers: chat completions and text completions, whole and in chunks.

Purpose: pure functions from pieces to JSON objects. Non-goals: running anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ullage_engine.api.answer import Alternative, Ending, Piece, TokenDetail


@dataclass(slots=True)
class Whole:
    """A choice's pieces put together."""

    text: str = ""
    details: list[TokenDetail] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        self.text += piece.text
        self.details.extend(piece.details)
        self.ending = piece.ending


class Shape(Protocol):
    """How one interface spells choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, choice: Whole, *, logprobs: bool) -> dict[str, Any]:
        """A complete choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, if the interface has one before any text."""
        ...

    def chunk(self, index: int, piece: Piece, *, logprobs: bool) -> dict[str, Any]:
        """A choice's next chunk."""
        ...


class ChatShape:
    """Chat completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, choice: Whole, *, logprobs: bool) -> dict[str, Any]:
        """A complete choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.details) if logprobs else None,
            "finish_reason": choice.ending,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The assistant's role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, piece: Piece, *, logprobs: bool) -> dict[str, Any]:
        """A choice's next chunk; without text its delta is empty."""
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": _chat_logprobs(piece.details) if logprobs and piece.details else None,
            "finish_reason": piece.ending,
        }


class CompletionShape:
    """Text completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, index: int, choice: Whole, *, logprobs: bool) -> dict[str, Any]:
        """A complete choice."""
        return _completion_choice(index, choice.text, choice.details if logprobs else None, choice.ending)

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: text comes first."""
        return None

    def chunk(self, index: int, piece: Piece, *, logprobs: bool) -> dict[str, Any]:
        """A choice's next chunk."""
        return _completion_choice(index, piece.text, piece.details if logprobs else None, piece.ending)


def _chat_logprobs(details: Sequence[TokenDetail]) -> dict[str, Any]:
    content = [
        _chat_token(detail.chosen) | {"top_logprobs": [_chat_token(other) for other in detail.top]}
        for detail in details
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: Alternative) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.bytes}


def _completion_choice(
    index: int, text: str, details: Sequence[TokenDetail] | None, ending: Ending | None
) -> dict[str, Any]:
    logprobs = None if details is None else _completion_logprobs(details)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ending}


def _completion_logprobs(details: Sequence[TokenDetail]) -> dict[str, Any]:
    return {
        "tokens": [detail.chosen.text for detail in details],
        "token_logprobs": [detail.chosen.logprob for detail in details],
        "top_logprobs": [{other.text: other.logprob for other in detail.top} for detail in details],
        "text_offset": [detail.text_offset for detail in details],
    }
