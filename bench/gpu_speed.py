"""How long kernels take on a GPU, beside what bounds them: copy bandwidth, torch's attention, plain copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch
from gpu_sums import (
    BLOCK_TOKENS,
    COLD_BYTES,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    DecodeCase,
    prefill_flops,
    share_of_bandwidth,
    token_bytes,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ullage_engine.kernels.dispatch import Kernels
from ullage_engine.kernels.tables import BlockTables, Chunks
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

SCALING = HEAD_SIZE**-0.5
FILL_TOKENS = 65_536
"""Random rows that a cache is filled with, over and over."""


class Clock(Protocol):
    """Measures work on the device."""

    def seconds(self, work: Callable[[], object], *, record: bool = True) -> float:
        """Median time of `work`, done often enough to tell; as a recorded graph, so that launches don't count."""
        ...


class GpuClock:
    """A `Clock` by CUDA events."""

    def __init__(self, seconds: float = 0.2) -> None:
        self._wanted = seconds

    def seconds(self, work: Callable[[], object], *, record: bool = True) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        if record:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            work = graph.replay
        first = self._once(work)
        return statistics.median(
            self._once(work) for _ in range(max(5, min(200, int(self._wanted / max(first, 1e-6)))))
        )

    def _once(self, work: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Speeds:
    """Measurements on one device."""

    def __init__(self, device: torch.device, operations: Kernels, clock: Clock, cold_bytes: int = COLD_BYTES) -> None:
        self._device = device
        self._operations = operations
        self._clock = clock
        self._cold = cold_bytes
        self._random = torch.Generator(device).manual_seed(3)

    def copy_bandwidth(self) -> float:
        """Bytes read plus bytes written a second by copies within the device."""
        source = torch.randint(0, 255, (self._cold,), dtype=torch.uint8, device=self._device, generator=self._random)
        target = torch.empty_like(source)
        return 2 * self._cold / self._clock.seconds(lambda: target.copy_(source))

    def decode(self, case: DecodeCase, bandwidth: float) -> dict[str, Any]:
        store = self._filled(
            CacheLayout(case.layers, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, case.kind), case.batch * case.context
        )  # type: ignore[arg-type]
        tables = self._tables(case.batch, case.context)
        query = self._normal(case.batch, HEADS, HEAD_SIZE)
        out = torch.empty_like(query)

        def work() -> None:
            for view in store.views:
                self._operations.paged_decode(view, tables, query, out, None, scaling=SCALING)

        seconds = self._clock.seconds(work) / case.layers
        share = share_of_bandwidth(case.moved_bytes, seconds, bandwidth)
        return {
            "kind": case.kind,
            "batch": case.batch,
            "context": case.context,
            "us": seconds * 1e6,
            "gb_s": case.moved_bytes / seconds / 1e9,
            "share": share,
        }

    def kv_write(self, kind: str, tokens: int, bandwidth: float) -> dict[str, Any]:
        moved = tokens * (token_bytes(kind) + 2 * 2 * KV_HEADS * HEAD_SIZE)
        layers = min(LAYERS, -(-self._cold // moved))
        layout = CacheLayout(layers, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, kind)  # type: ignore[arg-type]
        blocks = -(-tokens // BLOCK_TOKENS)
        store = BlockStore(layout, blocks, self._device)
        slots = torch.randperm(blocks * BLOCK_TOKENS, generator=self._random, device=self._device)[:tokens].contiguous()
        rows = self._normal(layers, 2, tokens, KV_HEADS, HEAD_SIZE)

        def work() -> None:
            for view, (keys, values) in zip(store.views, rows, strict=True):
                self._operations.kv_write(view, slots, keys, values, None)

        seconds = self._clock.seconds(work) / layers
        share = share_of_bandwidth(moved, seconds, bandwidth)
        return {"kind": kind, "tokens": tokens, "us": seconds * 1e6, "gb_s": moved / seconds / 1e9, "share": share}

    def prefill(self, kind: str, past: int, chunk: int) -> dict[str, Any]:
        """One sequence's chunk over its past, beside torch's attention over the same in contiguous bfloat16."""
        length = past + chunk
        store = self._filled(CacheLayout(1, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, kind), length)  # type: ignore[arg-type]
        whole = self._tables(1, length)
        first = torch.tensor([past], device=self._device)
        tables = BlockTables(whole.at, whole.tables, whole.starts, first + 1, first)
        counts = torch.tensor([chunk], device=self._device)
        chunks = Chunks(tables, counts, chunk, torch.arange(chunk, device=self._device))
        query = self._normal(chunk, HEADS, HEAD_SIZE)
        out = torch.empty_like(query)
        seconds = self._clock.seconds(
            lambda: self._operations.paged_prefill(store.views[0], chunks, query, out, None, scaling=SCALING)
        )
        plain = self._clock.seconds(self._plain_attention(past, chunk))
        return {
            "kind": kind,
            "past": past,
            "chunk": chunk,
            "us": seconds * 1e6,
            "tflop_s": prefill_flops(past, chunk) / seconds / 1e12,
            "torch_us": plain * 1e6,
            "over_torch": seconds / plain,
        }

    def _plain_attention(self, past: int, chunk: int) -> Callable[[], None]:
        query = self._normal(1, HEADS, chunk, HEAD_SIZE)
        keys, values = self._normal(2, 1, HEADS, past + chunk, HEAD_SIZE)  # repeated for its heads beforehand

        def work() -> None:
            if past:
                scaled_dot_product_attention(query, keys, values, attn_mask=causal_lower_right(chunk, past + chunk))
            else:
                scaled_dot_product_attention(query, keys, values, is_causal=True)

        return work

    def block_copies(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Scattered blocks of all layers to pinned host memory, back, and within the device, beside plain copies."""
        layout = CacheLayout(LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, kind)  # type: ignore[arg-type]
        inside = BlockStore(layout, 2 * count, self._device).data
        host = torch.zeros((count, layout.block_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        order = torch.randperm(2 * count, generator=self._random, device=self._device)
        there, other = order[:count].contiguous(), order[count:].contiguous()
        below = torch.arange(count)
        size = count * layout.block_bytes
        rows = []
        for name, source, target, sources, targets, plain in (
            ("to host", inside, host, there, below, (host, inside[:count])),
            ("from host", host, inside, below, there, (inside[:count], host)),
            ("in place", inside, inside, there, other, (inside[:count], inside[count:])),
        ):
            seconds = self._clock.seconds(
                lambda s=source, t=target, a=sources, b=targets: self._operations.copy_blocks(s, t, a, b), record=False
            )
            best = self._clock.seconds(lambda pair=plain: pair[0].copy_(pair[1], non_blocking=True), record=False)
            rows.append(
                {
                    "copy": f"{count} blocks {name}",
                    "gb_s": size / seconds / 1e9,
                    "plain_gb_s": size / best / 1e9,
                    "share": best / seconds,
                }
            )
        return rows

    # -- material ----------------------------------------------------------------------------------------------------

    def _filled(self, layout: CacheLayout, tokens: int) -> BlockStore:
        store = BlockStore(layout, -(-tokens // BLOCK_TOKENS), self._device)
        slots = torch.arange(tokens, device=self._device)
        keys, values = self._normal(2, min(tokens, FILL_TOKENS), KV_HEADS, HEAD_SIZE)
        for view in store.views:
            for some in slots.split(FILL_TOKENS):
                self._operations.kv_write(view, some, keys[: len(some)], values[: len(some)], None)
        return store

    def _tables(self, batch: int, context: int) -> BlockTables:
        """Sequences of equal length whose blocks lie anywhere."""
        width = -(-context // BLOCK_TOKENS)
        order = torch.randperm(batch * width, generator=self._random, device=self._device)
        rows = torch.full((batch,), context, device=self._device)
        starts = (torch.arange(width, device=self._device) * BLOCK_TOKENS).repeat(batch, 1)
        return BlockTables(torch.arange(batch, device=self._device), order.view(batch, width), starts, rows, rows - 1)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=self._random)
