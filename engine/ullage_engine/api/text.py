"""Text to tokens and tokens to text, one token at a time.

    TextError
    ├── PromptError      the client's prompt cannot be turned into tokens
    └── NoChatTemplate   the model has no chat template

Purpose: prompts and chat messages become token ids; generated ids become text that is final, so that pieces
sent to a client never have to be taken back. Non-goals: stop strings (`stops`), sampling, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import jinja2

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8, or not yet."""
MAX_SPLIT = 3
"""Bytes of a character that can precede its last one; a decoder may write one REPLACEMENT for each."""
WINDOW = 16
"""Tokens decoded again at each step at most, while the text is well-formed."""
KEEP = 6
"""Tokens kept as context: more bytes than a character, and the word before."""
MAX_HELD = 32
"""Tokens after which a text that contradicts what was sent is accepted as it is."""


class TextError(Exception):
    """Base of the errors of this module."""


class PromptError(TextError):
    """The prompt cannot be turned into tokens; the message says why."""


class NoChatTemplate(PromptError):
    """The model has no chat template."""


class HfTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any

    def __len__(self) -> int:
        """Ids known, added ones included."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of token ids."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str:
        """The vocabulary's own spelling of a token."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """The prompt text of a conversation."""
        ...


class TextCodec:
    """One model's tokenizer with the few operations that a server needs. Thread-safe as the tokenizer is."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocabulary_size = len(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; special tokens that the model expects at its start are added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, exactly: no spaces are tidied up."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            NoChatTemplate: the model has none.
            PromptError: the template refused the messages.
        """
        if not self._tokenizer.chat_template:
            raise NoChatTemplate("this model has no chat template; use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the model's chat template refused the messages: {error}") from error
        except (TypeError, ValueError, KeyError) as error:
            raise PromptError(f"the model's chat template cannot render the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token: int) -> tuple[str, list[int] | None]:
        """One token by itself, as log probabilities show it: its text, and its bytes where they are known.

        A token that is only part of a character is spelled `bytes:\\xNN…`.
        """
        text = self.decode([token], skip_special_tokens=False)
        piece = self._tokenizer.convert_ids_to_tokens(token) or text
        if piece.startswith("▁") and not text.startswith(" "):
            text = " " + text  # SentencePiece decoders drop the space of a text's first word
        if REPLACEMENT not in text:
            return text, list(text.encode())
        raw = _piece_bytes(piece)
        if raw is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    The pieces joined are the decoding of all tokens. Decoding token by token would not do: a character may be
    split over tokens, and a word's leading space may depend on the token before. So a short window is decoded
    again at each token, and what is final in it is emitted: all but a possible beginning of a character.
    `context` are the tokens before the first one fed, such as the prompt; their text is not emitted.
    """

    def __init__(self, codec: TextCodec, context: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(context[-KEEP:])
        self._sent = _without_split(codec.decode(self._window))
        """What was emitted of the window's text."""
        self._held = 0
        """Tokens since the text last was final."""

    def feed(self, token: int) -> str:
        """The text that became final by this token; often all of it, sometimes none."""
        self._window.append(token)
        self._held += 1
        text = self._codec.decode(self._window)
        final = _without_split(text)
        contradicts = not final.startswith(self._sent)
        if contradicts and final != text and self._held < MAX_HELD:
            return ""  # byte-fallback decoders spell a whole run of bytes as unknown until its last one is there
        return self._emit(text, final)

    def finish(self) -> str:
        """The rest, when no further token comes."""
        text = self._codec.decode(self._window)
        return self._emit(text, text)

    def _emit(self, text: str, final: str) -> str:
        piece = final[len(self._sent) :]
        if len(final) >= len(self._sent):
            self._sent = final
        if final == text:
            self._held = 0
        if len(self._window) > WINDOW:
            self._shorten(unsent=text[len(self._sent) :])
        return piece

    def _shorten(self, unsent: str) -> None:
        window = self._window[-KEEP:]
        text = self._codec.decode(window)
        if text.endswith(unsent) and _without_split(text) == text[: len(text) - len(unsent)]:
            self._window, self._sent = window, text[: len(text) - len(unsent)]


def _without_split(text: str) -> str:
    """The text without a character's possible beginning at its end."""
    end = len(text)
    while end > 0 and len(text) - end < MAX_SPLIT and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def _piece_bytes(piece: str) -> bytes | None:
    """Bytes of a vocabulary entry, spelled `<0xE2>` (byte fallback) or in the byte-level alphabet."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of bytes in byte-level BPE vocabularies (GPT-2's table).

    Printable bytes are themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
