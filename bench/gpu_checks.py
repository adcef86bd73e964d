"""Every kernel against its torch reference, on the device it is to run on: odd lengths, all types, poisoned outputs.

Copies and quantised bytes must be equal. Attention is compared with the reference in float32 by the norm of the
difference; a kernel that multiplies in bfloat16 or float16 rounds each product by up to 2^-8 of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ullage_engine.kernels.dispatch import TORCH, Kernels
from ullage_engine.kernels.tables import BlockTables, CellTables, Chunks
from ullage_engine.layout import CacheLayout
from ullage_engine.store import BlockStore

LENGTHS = (1, 15, 16, 17, 700, 4097)
TOLERANCE = 1e-2
RULES: dict[str, dict[str, Any]] = {"plain": {}, "window, soft cap, sinks": {"window": 300, "softcap": 20.0}}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    name: str
    error: float
    """Norm of the difference over the reference's; for bytes the share that differs. NaN never passes."""
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


class Comparisons:
    """A small random cache on a device, and the comparisons over it."""

    def __init__(self, kind: str, device: torch.device, operations: Kernels) -> None:
        self.kind, self.device, self.operations = kind, device, operations
        self.layout = CacheLayout(2, 2, 128, 16, kind, None)  # type: ignore[arg-type]
        self.blocks = sum(self.layout.blocks_for(length + 1) for length in LENGTHS) + 8
        self.store = self._empty()
        self.random = torch.Generator().manual_seed(1)
        self.order = torch.randperm(self.blocks, generator=self.random).to(device)
        slots = torch.arange(self.blocks * 16, device=device)
        for layer in range(2):
            self._write(TORCH, self.store, slots, layer)

    def parts(self) -> list[tuple[str, Callable[[], list[Check]]]]:
        """Comparisons that stand or fall alone, with their names."""
        found: list[tuple[str, Callable[[], list[Check]]]] = [("kv_write", self.writes)]
        for name, rule in RULES.items():
            for cells in (False, True):
                form = f"{self.kind}, {'cells' if cells else 'blocks'}, {name}"
                found.append((f"paged_decode {form}", partial(self.decode, f"paged_decode {form}", rule, cells)))
                found.append((f"paged_prefill {form}", partial(self.prefill, f"paged_prefill {form}", rule, cells)))
        found += [(f"key_scores {mode}", partial(self.scores, mode)) for mode in ("square", "sum", "entropy")]
        return [*found, ("merge", self.merged), ("gather_cells", self.gathered), ("copy_blocks", self.copies)]

    # -- bytes -------------------------------------------------------------------------------------------------------

    def writes(self) -> list[Check]:
        checks = []
        slots = self.order[:100] * 16 + torch.arange(100, device=self.device) % 16
        slots[::7] = -1
        for layer in range(2):
            state = self.random.get_state()
            stores = []
            for operations in (self.operations, TORCH):
                self.random.set_state(state)
                store = self._empty()
                self._write(operations, store, slots, layer)
                stores.append(store.data)
            checks.append(self._same(f"kv_write {self.kind}, layer {layer}", *stores))
        return checks

    def _write(self, operations: Kernels, store: BlockStore, slots: torch.Tensor, layer: int) -> None:
        for some in slots.split(4096):
            rows = self._random(2, len(some), 2, 128).bfloat16()
            operations.kv_write(store.views[layer], some, rows[0], rows[1], None)

    def gathered(self) -> list[Check]:
        view = self.store.views[1]
        cells = view.cell_offsets(self.order[None, :8]).flatten()
        rows = torch.arange(len(cells), device=self.device) % 16
        targets = cells.flip(0)[: len(cells) // 2]
        found = []
        for operations in (self.operations, TORCH):
            store = self._empty()
            store.data.copy_(self.store.data)
            half = slice(len(targets))
            operations.gather_cells(store.views[1], cells[half], rows[half], targets, rows.flip(0)[half].contiguous())
            found.append(store.data)
        return [self._same(f"gather_cells {self.kind}", *found)]

    def copies(self) -> list[Check]:
        gpu = self.device.type == "cuda"
        host = torch.zeros(self.store.data.shape, dtype=torch.uint8, pin_memory=gpu)
        taken, put = self.order[:9].contiguous(), self.order[9:18].contiguous()
        checks = []
        source = self.store.data
        for name, target in (("in place", self._empty().data), ("to the host", host), ("back", self._empty().data)):
            self.operations.copy_blocks(source, target, taken.to(source.device), put.to(target.device))
            if gpu:
                torch.cuda.synchronize()
            found, wanted = target[put.to(target.device)], source[taken.to(source.device)]
            checks.append(self._same(f"copy_blocks {self.kind}, {name}", found.to(self.device), wanted.to(self.device)))
            if target is host:
                source, taken, put = host, put, taken
        return checks

    # -- attention ---------------------------------------------------------------------------------------------------

    def decode(self, name: str, rule: dict[str, Any], cells: bool) -> list[Check]:
        return self._attended(name, "paged_decode", self._tables(cells), len(LENGTHS), rule)

    def prefill(self, name: str, rule: dict[str, Any], cells: bool) -> list[Check]:
        counts = [1, 2, 15, 16, 17, 65]
        at = [sum(counts[:i]) for i in range(len(counts))]
        tables = self._tables(cells, at)
        if isinstance(tables, BlockTables):  # the chunk's own rows are in the table too: what its first query sees
            first = tables.rows - self._ints(counts) + 1
            tables = replace(tables, rows=first, positions=first - 1)
        chunks = Chunks(tables, self._ints(counts), max(counts), torch.arange(sum(counts), device=self.device))
        return self._attended(name, "paged_prefill", chunks, sum(counts), rule)

    def _attended(self, name: str, operation: str, where: Any, tokens: int, rule: dict[str, Any]) -> list[Check]:
        query = self._random(tokens, 8, 128).bfloat16()
        sinks = self._random(8) if rule else None
        outs, logs = [], []
        for operations, queries in ((self.operations, query), (TORCH, query.float())):
            out = torch.full(queries.shape, torch.nan, device=self.device)
            lse = torch.full(queries.shape[:2], torch.nan, device=self.device)
            attend = getattr(operations, operation)
            attend(self.store.views[1], where, queries, out, lse, scaling=0.09, sinks=sinks, **rule)
            outs.append(out)
            logs.append(lse.masked_fill(lse == -torch.inf, 0.0))
        return [
            Check(name, self._apart(*outs), TOLERANCE),
            Check(f"{name}, log-sum-exp", self._apart(*logs), TOLERANCE),
        ]

    def scores(self, mode: str) -> list[Check]:
        tables = self._tables(False)
        queries = self._random(len(LENGTHS), 4, 8, 128).bfloat16()
        positions = self._ints([[max(-1, length - 1 - i) for i in range(4)] for length in LENGTHS])
        lse = self._random(len(LENGTHS), 4, 8) + 8.0
        found = [
            operations.key_scores(self.store.views[1], tables, given, positions, lse, mode, scaling=0.09)
            for operations, given in ((self.operations, queries), (TORCH, queries.float()))
        ]
        return [Check(f"key_scores {self.kind}, {mode}", self._apart(*found), TOLERANCE)]

    def merged(self) -> list[Check]:
        parts, lses = self._random(3, 20, 8, 128), self._random(3, 20, 8)
        lses[1, ::3] = float("-inf")
        at = torch.arange(20, device=self.device)
        found = []
        for operations in (self.operations, TORCH):
            out = torch.full(parts.shape[1:], torch.nan, device=self.device)
            operations.merge(parts, lses, at, out, None)
            found.append(out)
        return [Check(f"merge {self.kind}", self._apart(*found), 1e-5)]

    # -- material ----------------------------------------------------------------------------------------------------

    def _tables(self, cells: bool, at: list[int] | None = None) -> BlockTables | CellTables:
        """Tables of sequences of `LENGTHS`, whose queries are at `at` or one after the other."""
        width = max(self.layout.blocks_for(length) for length in LENGTHS)
        tables = torch.zeros((len(LENGTHS), width), dtype=torch.int64, device=self.device)
        used = 0
        for i, length in enumerate(LENGTHS):
            count = self.layout.blocks_for(length)
            tables[i, :count] = self.order[used : used + count]
            used += count
        where, positions = self._ints(at or [*range(len(LENGTHS))]), self._ints([length - 1 for length in LENGTHS])
        if not cells:
            starts = (torch.arange(width, device=self.device) * 16).repeat(len(LENGTHS), 1)
            return BlockTables(where, tables, starts, self._ints([*LENGTHS]), positions)
        rows = self._ints([[length, length // 2] for length in LENGTHS])
        known = torch.arange(width * 16, dtype=torch.int32, device=self.device).repeat(len(LENGTHS), 2, 1)
        return CellTables(where, self.store.views[1].cell_offsets(tables).contiguous(), rows, positions, known)

    def _empty(self) -> BlockStore:
        return BlockStore(self.layout, self.blocks, self.device, kernels="torch")

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device)

    def _ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def _apart(self, found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    def _same(self, name: str, found: torch.Tensor, wanted: torch.Tensor) -> Check:
        return Check(name, float((found != wanted).float().mean()), 0.0)


def run(
    device: torch.device, operations: Kernels, kinds: tuple[str, ...], tell: Callable[[Check], None]
) -> list[Check]:
    """All comparisons; an operation that raises fails its own and not the run."""
    done: list[Check] = []
    for kind in kinds:
        for name, part in Comparisons(kind, device, operations).parts():
            try:
                checks = part()
            except Exception as error:  # noqa: BLE001 - told as a failed comparison
                words = str(error).strip().splitlines() or [""]
                checks = [Check(f"{name} ({kind}): {type(error).__name__}: {words[0][:200]}", float("nan"), 0.0)]
            for check in checks:
                tell(check)
            done += checks
    return done
