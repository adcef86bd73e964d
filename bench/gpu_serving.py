"""Tokens a second of the engine itself on a GPU: a Llama-3-8B of random weights, each cache type in turn."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_sums import BLOCK_TOKENS

from ullage_engine import attention
from ullage_engine.cells import CellPool
from ullage_engine.decode_graphs import DecodeGraphs
from ullage_engine.device import Device
from ullage_engine.engine import Engine
from ullage_engine.eviction import Protection
from ullage_engine.layout import CacheLayout
from ullage_engine.models import shape_of
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.request import GenerationRequest, SamplingParams, TokenOutput
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.store import BlockStore

LLAMA3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
PROMPT, ANSWER, STEP_TOKENS = 1024, 64, 8192


def random_llama(sizes: dict[str, Any], device: torch.device) -> Any:
    """A model of random bfloat16 weights, made where it is to run, with the paged attention function set."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(attention.NAME, attention.paged_attention)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
    finally:
        torch.set_default_dtype(before)
    model.eval()
    model.set_attn_implementation(attention.NAME)
    return model


class Serving:
    """An engine around a model, for up to `limit` requests at once."""

    def __init__(
        self, model: Any, kind: str, device: Device, limit: int, prompt: int = PROMPT, answer: int = ANSWER
    ) -> None:
        shape = shape_of(model.config)
        layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, BLOCK_TOKENS, kind)  # type: ignore[arg-type]
        self._prompt, self._answer, self._kind = prompt, answer, kind
        blocks = limit * (layout.blocks_for(prompt + answer) + 1)
        store = BlockStore(layout, blocks, device.torch_device)
        graphs = DecodeGraphs(model, store, device, limit=limit, context=prompt + answer)
        pool = BlockPool(blocks, BLOCK_TOKENS, PrefixIndex("bench", BLOCK_TOKENS))
        self._vocabulary = model.config.vocab_size
        self._random = torch.Generator().manual_seed(5)
        self._engine = Engine(
            identity=EngineIdentity(model="llama", version="0"),
            runner=ModelRunner(model, store, device.torch_device, graphs),
            pool=pool,
            scheduler=Scheduler(
                pool,
                max_batch_tokens=STEP_TOKENS,
                max_sequences=limit,
                prefix_reuse=False,
                cells=CellPool(pool, layout.cell_classes),
            ),
            protection=Protection(first_tokens=0, recent_tokens=0),
        )

    def measure(self, batch: int) -> dict[str, Any]:
        """Prefill and decode rates of `batch` requests at once, after a shorter turn that compiles and records."""
        self._serve(batch, min(16, self._prompt), 4)
        first, rest = self._serve(batch, self._prompt, self._answer)
        return {
            "kind": self._kind,
            "batch": batch,
            "prefill_tokens_s": batch * self._prompt / first,
            "decode_tokens_s": batch * (self._answer - 1) / rest,
            "step_ms": rest / (self._answer - 1) * 1e3,
        }

    def _serve(self, batch: int, prompt: int, answer: int) -> tuple[float, float]:
        """Seconds until every request has its first token, and from there to the last token."""
        outputs: list[list[TokenOutput]] = [[] for _ in range(batch)]
        for i, output in enumerate(outputs):
            tokens = torch.randint(self._vocabulary, (prompt,), generator=self._random).tolist()
            sampling = SamplingParams(max_tokens=answer, temperature=0)
            self._engine.add(
                GenerationRequest(request_id=str(i), prompt=tuple(tokens), sampling=sampling), output.append
            )
        began = time.perf_counter()
        while not all(outputs):
            self._engine.step()
        first = time.perf_counter()
        while not self._engine.idle:
            self._engine.step()
        failed = [output[-1].error for output in outputs if output[-1].error]
        if failed:
            raise RuntimeError(f"{len(failed)} of {batch} requests failed: {failed[0]}")
        return first - began, time.perf_counter() - first
