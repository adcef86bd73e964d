"""What `gpu.py` measures, what its figures mean and how they are shown: sums alone, no GPU and no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("fp8", "int8", "bf16")
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32_768, 131_072)
HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
"""Llama-3-8B's attention."""
BLOCK_TOKENS = 16
GROUP = 128
"""Channels that share a scale of four bytes."""
ELEMENT_BYTES = {"fp8": 1, "int8": 1, "bf16": 2}
COLD_BYTES = 1 << 30
"""What repeated calls read altogether before they read the same bytes again: many times any GPU's cache."""
MEMORY_SHARE = 0.8
"""Of the free memory that one case may take."""
AIM_BANDWIDTH = 0.8
"""fp8 decode, as a share of copy bandwidth, from batch 32 and 8k tokens on."""
AIM_RATIO = 0.6
"""Time of fp8 decode over that of bf16 at 32k tokens."""


def token_bytes(kind: str) -> int:
    """Cache bytes of one token in one layer: keys and values of all KV heads, with their scales."""
    scales = 4 * (HEAD_SIZE // GROUP) if kind != "bf16" else 0
    return 2 * KV_HEADS * (HEAD_SIZE * ELEMENT_BYTES[kind] + scales)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One measurement of `paged_decode`."""

    kind: str
    batch: int
    context: int

    @property
    def cache_bytes(self) -> int:
        """Of one layer."""
        return self.batch * self.context * token_bytes(self.kind)

    @property
    def layers(self) -> int:
        """Layers that take turns, so that none is found in the GPU's cache."""
        return min(LAYERS, -(-COLD_BYTES // self.cache_bytes))

    @property
    def held_bytes(self) -> int:
        return self.layers * self.cache_bytes

    @property
    def moved_bytes(self) -> int:
        """Read and written by one call at least: the layer's cache, the query and the result in bfloat16."""
        return self.cache_bytes + 2 * 2 * self.batch * HEADS * HEAD_SIZE

    @property
    def name(self) -> str:
        return f"paged_decode {self.kind}, batch {self.batch}, {self.context} tokens"


def decode_cases(memory: int) -> tuple[list[DecodeCase], list[DecodeCase]]:
    """Cases that fit into `memory` free bytes, the ones that aims are about first; and those that don't."""
    cases = [DecodeCase(kind, batch, context) for context in CONTEXTS for batch in BATCHES for kind in KINDS]
    cases.sort(key=lambda case: (not _aimed_at(case), case.context, case.batch))
    fits = [case.held_bytes <= memory * MEMORY_SHARE for case in cases]
    return (
        [case for case, fit in zip(cases, fits, strict=True) if fit],
        [case for case, fit in zip(cases, fits, strict=True) if not fit],
    )


def _aimed_at(case: DecodeCase) -> bool:
    return case.batch >= 32 and case.context in (8192, 32_768)


def share_of_bandwidth(moved: int, seconds: float, bandwidth: float) -> float:
    """What a kernel that must move so many bytes reached of a measured bandwidth in bytes a second."""
    return moved / seconds / bandwidth


def prefill_flops(past: int, chunk: int) -> int:
    """Operations of one layer's attention, logits and values: query i sees `past + i + 1` rows."""
    pairs = chunk * past + chunk * (chunk + 1) // 2
    return 2 * 2 * HEADS * HEAD_SIZE * pairs


class Budget:
    """Seconds that a run may take. Parts are skipped, with a note, rather than overrun."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends = clock() + seconds
        self._began = clock()
        self.skipped: list[str] = []

    @property
    def spent(self) -> float:
        return self._clock() - self._began

    def allows(self, name: str, seconds: float) -> bool:
        """Whether a part that takes about so long may begin; noted as skipped where not."""
        allowed = self._clock() + seconds <= self._ends
        if not allowed:
            self.skipped.append(f"{name}: no time left")
        return allowed


def aims(decode: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each aim with what was found: `met` is None where nothing was measured that could tell."""
    rows = list(decode)
    shares = [
        row["share"] for row in rows if row["kind"] == "fp8" and row["batch"] >= 32 and row["context"] == CONTEXTS[1]
    ]
    ratios = _ratios(rows, CONTEXTS[2])
    return [
        _aim("least share of copy bandwidth, fp8, batch 32 and more, 8k tokens", AIM_BANDWIDTH, shares, least=True),
        _aim("greatest time of fp8 over bf16 at 32k tokens, batch 32 and more", AIM_RATIO, ratios, least=False),
    ]


def _aim(name: str, wanted: float, found: list[float], *, least: bool) -> dict[str, Any]:
    if not found:
        return {"aim": name, "wanted": wanted, "found": None, "met": None}
    worst = min(found) if least else max(found)
    return {
        "aim": name,
        "wanted": wanted,
        "found": round(worst, 3),
        "met": worst >= wanted if least else worst <= wanted,
    }


def _ratios(rows: list[Mapping[str, Any]], context: int) -> list[float]:
    times = {(row["kind"], row["batch"]): row["us"] for row in rows if row["context"] == context}
    return [
        times["fp8", batch] / times["bf16", batch]
        for batch in BATCHES
        if batch >= 32 and ("fp8", batch) in times and ("bf16", batch) in times
    ]


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys in columns, for people."""
    if not rows:
        return f"{title}\n  nothing was measured"
    columns = [*rows[0]]
    cells = [[_shown(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [columns, *cells]
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
