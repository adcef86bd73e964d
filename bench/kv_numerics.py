"""What storing keys and values in fewer bits does to the model's predictions, on real text.

    python bench/kv_numerics.py [--windows 6] [--tokens 2048] [--chunk 512]

Text is forced through the engine's own paged path (chunked prefill over block tables, quantised on write and read back
from the blocks), once with an FP32 cache and once with each other type; at every position the two predictions are
compared. KL is the mean Kullback-Leibler divergence from the FP32 cache's prediction, in nats; top-1 is the share of
positions with the same likeliest token. The change in perplexity is shown too, but is noise below 0.3 %. KL depends on
the text (`windows` is its range over the windows) and by up to an eighth on chunk size and CPU, as values between two
codes tip either way: compare caches with each other rather than with other texts.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from measure import machine
from throughput import model_and_text

from ullage_engine import models
from ullage_engine.attention import make_batch
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import KvType
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence as LiveSequence
from ullage_engine.store import BlockStore


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store keys and values."""

    kv_type: KvType
    group: int | None = None
    """Channels that share a scale; None: the default."""

    def __str__(self) -> str:
        return self.kv_type if self.group is None else f"{self.kv_type} group {self.group}"


@dataclass(slots=True)
class Comparison:
    """Sums over positions."""

    positions: int = 0
    kl: float = 0.0
    window_kl: list[float] = field(default_factory=list)
    """Mean KL of each window."""
    agreed: int = 0
    loss: float = 0.0
    """Of the text under this cache, in nats."""

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in log probabilities [T, V] of both caches and the tokens that follow in the text, [T]."""
        self.positions += len(targets)
        self.kl += float((reference.exp() * (reference - candidate)).sum())
        self.agreed += int((reference.argmax(-1) == candidate.argmax(-1)).sum())
        self.loss -= float(candidate.gather(1, targets.unsqueeze(1)).sum())

    def figures(self) -> dict[str, float]:
        """Means over all positions."""
        return {
            "kl": self.kl / self.positions,
            "top1": self.agreed / self.positions,
            "perplexity": math.exp(self.loss / self.positions),
        }


CANDIDATES = (
    Candidate("bf16"),
    Candidate("fp8"),
    Candidate("fp8", 32),
    Candidate("fp8", 16),
    Candidate("int8"),
    Candidate("int8", 32),
)
REFERENCE = Candidate("fp32")


def compare(
    loaded: models.LoadedModel,
    windows: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    *,
    chunk: int,
    block_tokens: int = 16,
) -> dict[Candidate, Comparison]:
    """Every candidate against the FP32 cache over the same windows of text; the reference itself is included."""
    every = (REFERENCE, *candidates)
    found = {candidate: Comparison() for candidate in every}
    for window in windows:
        before = {candidate: (comparison.kl, comparison.positions) for candidate, comparison in found.items()}
        streams = {
            c: predictions(loaded, window, store_for(loaded, c, len(window), block_tokens), chunk) for c in every
        }
        for start in range(0, len(window), chunk):
            targets = torch.tensor(window[start + 1 : start + chunk + 1])
            reference = next(streams[REFERENCE])[: len(targets)]
            for candidate in every:
                told = reference if candidate == REFERENCE else next(streams[candidate])[: len(targets)]
                found[candidate].add(reference, told, targets)
        for candidate, (kl, positions) in before.items():
            now = found[candidate]
            now.window_kl.append((now.kl - kl) / (now.positions - positions))
    return found


def store_for(loaded: models.LoadedModel, candidate: Candidate, tokens: int, block_tokens: int) -> BlockStore:
    """Blocks for one window."""
    shape = models.shape_of(loaded.config)
    layout = CacheLayout(
        shape.layers, shape.kv_heads, shape.head_size, block_tokens, candidate.kv_type, group=candidate.group
    )
    return BlockStore(layout, layout.blocks_for(tokens))


@torch.inference_mode()
def predictions(
    loaded: models.LoadedModel, tokens: Sequence[int], store: BlockStore, chunk: int
) -> Iterator[torch.Tensor]:
    """Log probabilities [T, V] after each token, chunk by chunk as the engine prefills."""
    request = GenerationRequest(request_id="w", prompt=tuple(tokens), sampling=SamplingParams(max_tokens=1))
    sequence = LiveSequence(request, lambda _: None, 0, list(tokens), store.layout.block_tokens)
    # neighbouring blocks in reverse: an error in addressing shows
    sequence.append_blocks(list(reversed(range(store.layout.blocks_for(len(tokens))))))
    device = torch.device("cpu")
    while sequence.computed < len(tokens):
        part = Chunk(sequence, min(chunk, len(tokens) - sequence.computed))
        at = range(sequence.computed, sequence.computed + part.count)
        output = loaded.model(
            input_ids=torch.tensor([[tokens[i] for i in at]]),
            position_ids=torch.tensor([list(at)]),
            use_cache=False,
            ullage_batch=make_batch(store, [part], device),
        )
        sequence.computed += part.count
        yield output.logits[0].float().log_softmax(-1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048, help="of each window")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    models.quiet_progress()
    folder, text_ids = model_and_text()
    loaded = models.load(folder, "smollm2", torch.float32, torch.device("cpu"))
    windows = [text_ids[i * options.tokens :][: options.tokens] for i in range(options.windows)]
    found = compare(loaded, windows, CANDIDATES, chunk=options.chunk)
    report: dict[str, Any] = {"machine": machine(), "windows": options.windows, "tokens": options.tokens, "caches": {}}
    base = found[REFERENCE].figures()["perplexity"]
    print(f"{'cache':14}{'KL':>10}{'windows':>18}{'top-1':>8}{'perplexity':>12}{'change':>10}")
    for candidate, comparison in found.items():
        figures = comparison.figures()
        change = 100 * (figures["perplexity"] / base - 1)
        spread = f"{min(comparison.window_kl):.5f}-{max(comparison.window_kl):.5f}"
        print(
            f"{candidate!s:14}{figures['kl']:10.5f}{spread:>18}{figures['top1']:8.3f}{figures['perplexity']:12.3f}"
            f"{change:+9.2f} %"
        )
        report["caches"][str(candidate)] = {name: round(value, 6) for name, value in figures.items()} | {
            "window_kl": [round(value, 6) for value in comparison.window_kl]
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
