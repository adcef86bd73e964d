"""One contestant of `eviction_quality.py`: NVIDIA's kvpress, in an environment of its own.

Usage: KVPRESS_PYTHON run_kvpress.py JOB. Prints a JSON line for each context and setting as it goes:
[context, setting, [{method, keep, scores, sure, nats}, ...]], as `eviction_report.Result` describes them. The method of
the full cache is null, and it alone says how sure it is of each answer.

KVzip and AdaKV only pretend to drop what differs from head to head: they put fake keys over it, and no memory is freed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eviction_tasks import Context, means, read, scores, share_right

METHODS: dict[str, Callable[[Any, float], Any]] = {
    "SnapKV": lambda kvpress, drop: kvpress.SnapKVPress(drop),
    "ExpectedAttention": lambda kvpress, drop: kvpress.ExpectedAttentionPress(drop),
    "StreamingLLM": lambda kvpress, drop: kvpress.StreamingLLMPress(drop),
    "AdaKV-Expected": lambda kvpress, drop: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(drop)),
    "KVzip": lambda kvpress, drop: kvpress.KVzipPress(drop),
}
"""A press of each method, from the library and the share that it drops."""


class Peer:
    """transformers with kvpress around its prefill."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(_untemplated(folder), dtype=getattr(torch, dtype)).eval()

    def prefill(self, tokens: Sequence[int], press: Any | None) -> Any:
        """The cache of a context, cut by the press."""
        from transformers import DynamicCache

        cache = DynamicCache()
        inputs = self._torch.tensor([list(tokens)])
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        if press is None:
            self.model.model(input_ids=inputs, past_key_values=cache)
        else:
            with press(self.model):
                self.model.model(input_ids=inputs, past_key_values=cache)
        return cache

    def answer(self, cache: Any, position: int, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Greedy continuation, with the right answer as a draft, as our own side does it."""
        given: list[int] = []
        tokens, ahead, before = list(prompt), len(answer), self._lengths(cache)
        while len(given) < len(answer):
            draft = answer[len(given) : -1][:ahead]
            try:
                chosen = self._logits(cache, position, [*tokens, *draft], 1 + len(draft)).argmax(-1).tolist()
            except ValueError:  # no fake key was found that hides from so many queries at once
                if ahead == 0:
                    raise
                self._crop(cache, before)
                ahead = 0
                continue
            right = next((n for n, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
            given += chosen[: right + 1]
            position += len(tokens) + right
            before = [length + len(tokens) + right for length in before]
            self._crop(cache, before)
            tokens, ahead = [given[-1]], (2 * max(1, ahead) if right == len(draft) else 1)
        return given[: len(answer)]

    def chances(self, cache: Any, position: int, prompt: Sequence[int], text: Sequence[int]) -> Any:
        """[len(text)] log likelihood of each token of a text after a prompt and the text before it."""
        logits = self._forced(cache, position, [*prompt, *text[:-1]])[-len(text) :]
        return logits.log_softmax(-1).gather(1, self._torch.tensor(text).unsqueeze(1))[:, 0]

    def _forced(self, cache: Any, position: int, tokens: Sequence[int]) -> Any:
        """[len(tokens), V] after each token, in as few passes as fake keys allow."""
        before = self._lengths(cache)
        try:
            return self._logits(cache, position, tokens, len(tokens))
        except ValueError:  # no fake key was found that hides from so many queries at once
            if len(tokens) == 1:
                raise
            self._crop(cache, before)
        half = len(tokens) // 2
        first = self._forced(cache, position, tokens[:half])
        return self._torch.cat([first, self._forced(cache, position + half, tokens[half:])])

    def _logits(self, cache: Any, position: int, tokens: Sequence[int], keep: int) -> Any:
        inputs = self._torch.tensor([list(tokens)])
        positions = self._torch.arange(position, position + len(tokens))[None]
        out = self.model(input_ids=inputs, position_ids=positions, past_key_values=cache, logits_to_keep=keep)
        return out.logits[0].float()

    @staticmethod
    def _lengths(cache: Any) -> list[int]:
        return [layer.keys.shape[2] for layer in cache.layers]

    @staticmethod
    def _crop(cache: Any, lengths: Sequence[int]) -> None:
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def results(self, context: Context, setting: str, press: Any | None) -> dict[str, dict[str, float]]:
        """Of each task the score, the nats of a token of the right answer, and how sure the full cache is.

        `seen`: the question but its last token is part of what is read before the cut.
        """
        values, nats, sure = [], [], []
        cache = self.prefill(context.tokens, press) if setting == "unseen" else None
        for probe in context.probes:
            read_before = [] if setting == "unseen" else probe.prompt[:-1]
            tokens = [*context.tokens, *read_before]
            state = cache if cache is not None else self.prefill(tokens, press)
            lengths, rest = self._lengths(state), probe.prompt[len(read_before) :]
            chances = self.chances(state, len(tokens), rest, probe.answer)
            self._crop(state, lengths)
            nats.append(-float(chances.mean()))
            sure.append(math.exp(float(chances.min())))
            if probe.task == "text":
                values.append(math.exp(float(chances.mean())))
                continue
            values.append(share_right(probe.answer, self.answer(state, len(tokens), rest, probe.answer)))
            self._crop(state, lengths)
        return {
            "scores": scores(context, values),
            "sure": scores(context, sure) if press is None else {},
            "nats": means(context, nats),
        }


def _untemplated(folder: str) -> str:
    """The model's folder without its chat template: contexts are plain text, and KVzip would skip a template's head."""
    target = Path(tempfile.mkdtemp(prefix="kvpress-model-"))
    for file in Path(folder).iterdir():
        if file.name == "tokenizer_config.json":
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            (target / file.name).write_text(json.dumps(config))
        elif file.name != "chat_template.jinja":
            (target / file.name).symlink_to(file)
    return str(target)


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.filterwarnings("ignore")
    import kvpress

    contexts, job = read(Path(sys.argv[1]))
    peer = Peer(job["model"], job["dtype"], job["threads"])
    with peer._torch.inference_mode():
        for context in contexts:
            for setting in job["settings"]:
                if setting == "seen" and context.probes[0].task == "text":
                    continue
                found = [
                    {"method": None, "keep": 1.0} | peer.results(context, setting, None),
                    *(
                        {"method": name, "keep": keep}
                        | peer.results(context, setting, METHODS[name](kvpress, 1.0 - keep))
                        for name in job["methods"]
                        for keep in job["keeps"]
                    ),
                ]
                print(json.dumps([context.name, setting, found]), flush=True)


if __name__ == "__main__":
    main()
