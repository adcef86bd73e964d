"""What tests of kernels share: where kernels run, shapes to try, and stores whose every unwritten byte is poison.

Kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors. Import this module before any
Triton function is jitted (`ullage_engine.kernels.device`): the interpreter is chosen then, for good.
"""

from __future__ import annotations

import os

import torch
from hypothesis import strategies as st

from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (1, 15, 16, 17, 4097)
"""Of sequences: one token, around a block, and past what one program takes."""
POISON = 0xFF
"""Byte of unused slots: NaN as e4m3, bfloat16 and float32, so that what reads one shows it; -1 as int8."""


def poisoned(layout: CacheLayout, blocks: int) -> BlockStore:
    """A store for Triton's kernels with `POISON` in all its bytes."""
    store = BlockStore(layout, blocks, DEVICE, kernels="triton")
    store.data.fill_(POISON)
    return store


def cpu_copy(store: BlockStore) -> BlockStore:
    """The same bytes in host memory, for references, whose numbers are those of the CPU."""
    copy = BlockStore(store.layout, len(store.data), kernels="torch")
    copy.data.copy_(store.data)
    return copy


def layouts(kinds: tuple[str, ...] = ("fp8", "int8", "bf16", "fp32")) -> st.SearchStrategy[CacheLayout]:
    """Small layouts of every cache type: head sizes that are no power of two, groups down to 16, mixed types."""
    shapes = [(64, None), (64, 16), (128, 32), (80, None), (96, 48), (16, 16)]
    return st.builds(
        lambda layers, heads, shape, size, kind, other: CacheLayout(
            layers, heads, shape[0], size, kind, shape[1], {layers - 1: other} if other else {}
        ),
        layers=st.integers(1, 3),
        heads=st.integers(1, 5),
        shape=st.sampled_from(shapes),
        size=st.sampled_from([8, 16, 32]),
        kind=st.sampled_from(kinds),
        other=st.sampled_from([None, "bf16"]),
    )


def filled(store: BlockStore, share: float = 1.0) -> BlockStore:
    """Distinct rows in the first slots of every layer, up to this share of all; returns the store."""
    layout = store.layout
    generator = torch.Generator().manual_seed(0)
    tokens = int(len(store.data) * layout.block_tokens * share)
    for layer in range(layout.layers):
        rows = torch.randn(2, tokens, layout.kv_heads, layout.head_size, generator=generator).to(store.data.device)
        store.write(layer, torch.arange(tokens, device=store.data.device), *rows)
    return store
