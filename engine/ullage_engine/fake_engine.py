"""A whole engine without a model: the scripted core and a tiny tokenizer behind the real servers.

For tests of the HTTP side and of programs that talk to an engine. Non-goal: serving anyone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ullage_engine.api.text import HfTokenizer
from ullage_engine.config import ServerConfig
from ullage_engine.fake_core import FakeCore
from ullage_engine.server import Stop, bind, serve

END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = ("the quick brown fox jumps over the lazy dog", "Füße naïve 日本語 текст 😀 weights and caches")


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> HfTokenizer:
    """A byte-level BPE tokenizer, trained on a few words: any text has tokens, many characters have several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped
    fast = make(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = chat_template
    return cast(HfTokenizer, fast)


@dataclass(frozen=True, slots=True)
class FakeEngine:
    """A `LoadedEngine` around a scripted core."""

    core: FakeCore
    tokenizer: HfTokenizer

    def close(self) -> None:
        """End the core's thread."""
        self.core.close()


@asynccontextmanager
async def running(engine: FakeEngine, config: ServerConfig) -> AsyncIterator[dict[str, Any]]:
    """Serve in the current event loop; gives the bound addresses, and stops at the end."""
    sockets = bind(config)
    stop = Stop()
    addresses: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(engine, sockets, config, stop=stop, announce=addresses.set_result))
    waiting: tuple[asyncio.Future[Any], ...] = (addresses, task)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield addresses.result()
    finally:
        stop.ask()
        stop.ask()
        await task
        sockets.close()
