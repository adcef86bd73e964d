"""Streamed text is the decoded text, whatever the tokens split; stop strings are cut exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ullage_engine.api.stops import StopFilter
from ullage_engine.api.text import REPLACEMENT, Detokenizer, NoChatTemplate, PromptError, TextCodec
from ullage_engine.fake_engine import END, tiny_tokenizer


def sentencepiece_like() -> Any:
    """Words with a leading `▁`, and a token for each byte, as Llama's tokenizer has them."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁Hello", "▁world", "▁", "!", "é", "lo", "▁wor", "ld"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


BYTE_LEVEL = tiny_tokenizer()
SENTENCEPIECE = sentencepiece_like()
BYTE_0 = SENTENCEPIECE.convert_tokens_to_ids("<0x00>")


def stream(codec: TextCodec, tokens: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(codec, context)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


@given(st.text(max_size=60))
def test_pieces_joined_are_the_text_byte_level(text: str) -> None:
    codec = TextCodec(BYTE_LEVEL)
    pieces = stream(codec, list(codec.encode(text)))
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=80))
def test_pieces_joined_are_the_decoding_of_any_byte_level_tokens(tokens: list[int]) -> None:
    codec = TextCodec(BYTE_LEVEL)
    assert "".join(stream(codec, tokens)) == codec.decode(tokens)


@given(st.text(alphabet="aé日😀 ", max_size=40))
def test_every_character_leaves_with_its_last_byte(text: str) -> None:
    """Byte tokens one at a time: a character is emitted by its last byte, not later."""
    codec = TextCodec(BYTE_LEVEL)
    for character in text:
        tokens = [token for byte in character.encode() for token in byte_token(byte)]
        *early, last, rest = stream(codec, tokens)
        assert (early, last, rest) == ([""] * (len(tokens) - 1), character, "")


def byte_token(byte: int) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = {bytes_of(letter): letter for letter in ByteLevel.alphabet()}
    return [BYTE_LEVEL.convert_tokens_to_ids(alphabet[byte])]


def bytes_of(letter: str) -> int:
    from ullage_engine.api.text import _byte_alphabet

    return _byte_alphabet()[letter]


words = st.sampled_from(["▁Hello", "▁world", "▁", "!", "é", "lo", "▁wor", "ld", "</s>"])
characters = st.sampled_from("ß日😀\n")


@given(st.lists(st.one_of(words, characters), max_size=60))
@settings(max_examples=200)
def test_pieces_joined_are_the_decoding_with_byte_fallback(items: list[str]) -> None:
    codec = TextCodec(SENTENCEPIECE)
    tokens: list[int] = []
    for item in items:
        known = SENTENCEPIECE.get_vocab().get(item)
        tokens += [BYTE_0 + byte for byte in item.encode()] if known is None else [known]
    pieces = stream(codec, tokens)
    assert "".join(pieces) == codec.decode(tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    codec = TextCodec(SENTENCEPIECE)
    hello, world = SENTENCEPIECE.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert stream(codec, [world], context=(hello,)) == [" world", ""]
    assert stream(codec, [hello, world]) == ["Hello", " world", ""]


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    codec = TextCodec(SENTENCEPIECE)
    first, *others = [BYTE_0 + byte for byte in "日".encode()]
    assert stream(codec, others, context=(first,)) == ["", "日", ""]


def test_broken_bytes_are_told_when_they_cannot_become_a_character() -> None:
    codec = TextCodec(BYTE_LEVEL)
    assert stream(codec, byte_token(0xE6)) == ["", REPLACEMENT]
    lone = [*byte_token(0xFF), *byte_token(0x41)]
    assert stream(codec, lone) == ["", f"{REPLACEMENT}A", ""]


def test_a_stream_of_broken_bytes_is_not_held_for_ever() -> None:
    codec = TextCodec(SENTENCEPIECE)
    pieces = stream(codec, [BYTE_0 + 0x80] * 200)
    assert "".join(pieces) == REPLACEMENT * 200
    assert sum(map(len, pieces[:-1])) >= 195


def test_the_window_stays_small() -> None:
    sizes: list[int] = []

    class Counting(TextCodec):
        def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
            sizes.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    codec = Counting(BYTE_LEVEL)
    stream(codec, list(codec.encode("the lazy dog 日本語 " * 100)))
    assert max(sizes) <= 20


def test_token_text_and_bytes() -> None:
    byte_level, sentencepiece = TextCodec(BYTE_LEVEL), TextCodec(SENTENCEPIECE)
    assert byte_level.token_text(byte_token(0xE6)[0]) == ("bytes:\\xe6", [0xE6])
    assert byte_level.token_text(byte_token(0x41)[0]) == ("A", [0x41])
    assert byte_level.token_text(BYTE_LEVEL.convert_tokens_to_ids(END))[0] == END
    assert sentencepiece.token_text(BYTE_0 + 0xE6) == ("bytes:\\xe6", [0xE6])
    world = SENTENCEPIECE.convert_tokens_to_ids("▁world")
    assert sentencepiece.token_text(world) == (" world", list(b" world"))


def test_chat_template_errors() -> None:
    with pytest.raises(NoChatTemplate, match="no chat template"):
        TextCodec(tiny_tokenizer(chat_template=None)).encode_chat([{"role": "user", "content": "x"}])
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ 1 + 'a' }}", "{{ missing.field.deep }}"):
        with pytest.raises(PromptError):
            TextCodec(tiny_tokenizer(chat_template=template)).encode_chat([{"role": "user", "content": "x"}])


# -- stop strings -----------------------------------------------------------------------------------------------

short = st.text(alphabet="ab日", min_size=1, max_size=4)


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first to be complete wins, then the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.lists(st.text(alphabet="ab日", max_size=5), max_size=12), st.lists(short, max_size=3))
@settings(max_examples=400)
def test_stop_filter_cuts_as_by_hand_however_the_text_is_split(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    released, stopped = "", False
    for piece in pieces:
        result = stop_filter.feed(piece)
        released += result.text
        stopped = stopped or result.stopped
    if not stopped:
        released += stop_filter.finish()
    assert (released, stopped) == cut_by_hand("".join(pieces), stops)


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=12), st.lists(short, min_size=1, max_size=3))
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    text, released = "", ""
    for piece in pieces:
        text += piece
        result = stop_filter.feed(piece)
        released += result.text
        if result.stopped:
            return
        held = text[len(released) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
