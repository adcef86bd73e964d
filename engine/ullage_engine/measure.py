"""Memory that the largest step takes, measured by running it once before the KV cache is sized.

Profiles that guess pass at the start and fail later: what is reserved here is the largest batch of tokens together
with the largest number of logits rows, which do not occur together by chance. What reading a long context takes on top
is added by arithmetic (`CacheLayout.workspace_bytes`), because running one would take minutes on a CPU.
"""

from __future__ import annotations

from typing import Any

from ullage_engine.decode_graphs import DecodeGraphs
from ullage_engine.device import Device
from ullage_engine.kernels.dispatch import Choice
from ullage_engine.layout import CacheLayout
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore


def measure_step(
    model: Any,
    layout: CacheLayout,
    *,
    tokens: int,
    sequences: int,
    device: Device,
    kernels: Choice = None,
    invariant: bool = False,
    recorded: tuple[int, int] | None = None,
) -> int:
    """Bytes that a step of `tokens` tokens and `sequences` logits rows takes beyond the cache itself.

    Args:
        recorded: most sequences of a decode step and most tokens of each, where such steps are recorded: what they
            hold is counted too.
    """
    chunks = _largest(layout, tokens, min(sequences, tokens))
    blocks = sum(len(chunk.sequence.table) for chunk in chunks)
    scratch = BlockStore(layout, blocks, device.torch_device, kernels=kernels)
    scratch.data.fill_(0)  # host pages become resident before the reading, so that they don't count as activations
    runner = ModelRunner(model, scratch, device.torch_device, invariant=invariant)

    def largest_of_all() -> DecodeGraphs | None:
        runner.forward(chunks)
        if recorded is None:
            return None
        limit, context = recorded
        graphs = DecodeGraphs(model, scratch, device, limit=limit, context=context)
        graphs.prepare(largest=True)
        return graphs

    return device.peak_bytes(largest_of_all)


def _largest(layout: CacheLayout, tokens: int, sequences: int) -> list[Chunk]:
    """Chunks of a step as large as any: all sequences complete, so all need logits."""
    chunks: list[Chunk] = []
    used = 0
    for i in range(sequences):
        count = tokens * (i + 1) // sequences - tokens * i // sequences
        request = GenerationRequest(
            request_id=f"measure-{i}", prompt=(0,) * count, sampling=SamplingParams(max_tokens=1, temperature=0)
        )
        sequence = Sequence(request, lambda output: None, i, [0] * count, layout.block_tokens)
        blocks = layout.blocks_for(count)
        sequence.append_blocks(list(range(used, used + blocks)))
        used += blocks
        chunks.append(Chunk(sequence, count))
    return chunks
