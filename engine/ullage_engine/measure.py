"""Memory that the largest step takes, measured by running it once before the KV cache is sized.

Profiles that guess pass at the start and fail later: what is reserved here is the largest batch of tokens together
with the largest number of logits rows, which do not occur together by chance. What reading a long context takes on top
is added by arithmetic (`CacheLayout.workspace_bytes`), because running one would take minutes on a CPU.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore

log = logging.getLogger(__name__)

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs: the peak of resident memory starts anew (proc(5))."""


def measure_step(
    model: Any,
    layout: CacheLayout,
    *,
    tokens: int,
    sequences: int,
    device: torch.device,
    kernels: CpuKernels | None = None,
    invariant: bool = False,
) -> int:
    """Bytes that a step of `tokens` tokens and `sequences` logits rows takes beyond the cache itself."""
    chunks = _largest(layout, tokens, min(sequences, tokens))
    scratch = BlockStore(layout, sum(len(chunk.sequence.table) for chunk in chunks), device, kernels=kernels)
    runner = ModelRunner(model, scratch, device, invariant=invariant)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner.forward(chunks)
        return torch.cuda.max_memory_allocated(device) - before
    scratch.data.fill_(0)  # its pages become resident before the reading, so that they don't count as activations
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # some sandboxes have no such file: the peak so far stands for the peak of the step
        log.warning("%s cannot be written; the largest step is estimated from the peak so far", CLEAR_REFS)
    before = _resident("VmRSS")
    runner.forward(chunks)
    return max(0, _resident("VmHWM") - before)


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


def _resident(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
