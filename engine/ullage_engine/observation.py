"""What policies want to know of a sequence's queries, noted while a reader computes them (`budgets`).

A reader is a sequence that nobody waits for: it shares the blocks and cells of the one that is to be cut, computes some
tokens after or at the end of its context, and is forgotten. Its attention calls `see` in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ullage_engine.policies import mass
from ullage_engine.policies.base import Mode, Queries
from ullage_engine.policies.mass import Keys, Rule
from ullage_engine.policies.refit import Part, Sample, refit
from ullage_engine.policies.reread import Rereading
from ullage_engine.retention import Rows


class KeyStore(Protocol):
    """Keys and values of cells."""

    def read_cells(self, layer: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [H, S * block_tokens, D] float32 on one device, of cell ids [H, S] in host memory."""
        ...

    @property
    def attention(self) -> mass.Attention:
        """Computes attention to such keys."""
        ...


@dataclass(eq=False, slots=True)
class QueryWatch:
    """Keeps the queries themselves."""

    found: dict[int, Queries] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)

    def see(self, layer: int, queries: torch.Tensor, first: int, rule: Rule) -> None:
        positions = torch.arange(first, first + queries.shape[0], device=queries.device)
        before = self.found.get(layer)
        vectors = queries.float()
        if before is not None:
            earlier = before.positions < first  # a step that failed is computed again
            vectors = torch.cat([before.vectors[earlier], vectors])
            positions = torch.cat([before.positions[earlier], positions])
        self.found[layer], self.rules[layer] = Queries(vectors, positions), rule


class Reader(Protocol):
    """The reading sequence, as far as its rows matter."""

    def rows(self, coming: int) -> Rows:
        """All its rows in the cache, and `coming` more that are stored but not booked yet."""
        ...


@dataclass(eq=False, slots=True)
class RereadWatch:
    """Adds up the squared attention that a re-reading pays to each row of the context."""

    store: KeyStore
    scores: Rereading
    """Over the context's rows, which come first among the reader's."""
    observed: int
    """Queries from this position on count."""
    sample: Sample
    """Some of the queries."""
    reader: Reader | None = None
    """Set by whoever makes the reader, before its first step."""
    _rows: Rows | None = None
    _taken: dict[int, int] = field(default_factory=dict)
    """Position of the first query that has not counted yet, by layer: a step that failed is computed again."""

    def see(self, layer: int, queries: torch.Tensor, first: int, rule: Rule) -> None:
        skipped = max(0, self._taken.get(layer, self.observed) - first)
        if self.reader is None or skipped >= queries.shape[0]:
            return
        if layer == 0 or self._rows is None:
            self._rows = self.reader.rows(queries.shape[0])
        rows, device = self._rows, queries.device
        keys, _ = self.store.read_cells(layer, rows.cells[layer])
        known = Keys(keys, rows.positions[layer].to(device), rows.exists[layer].to(device))
        positions = torch.arange(first + skipped, first + queries.shape[0], device=device)
        asked = Queries(queries[skipped:], positions)
        self.sample.take(layer, asked, rule)
        found = self.store.attention(asked, known, None, "square", rule)
        self.scores.take(layer, found[:, : self.scores.scores.shape[-1]].to(self.scores.scores.device))
        self._taken[layer] = first + queries.shape[0]


def amended(store: KeyStore, sample: Sample, rows: Rows, layer: int, part: Part) -> torch.Tensor | None:
    """Values [H, R, D] that survivors of a layer get (`refit`), while all its rows are there; None: nothing to do."""
    noted = sample.of(layer)
    if noted is None or not part.free.any():
        return None
    queries, rule = noted
    device = queries.vectors.device
    keys, values = store.read_cells(layer, rows.cells[layer])
    known = Keys(keys, rows.positions[layer].to(device), rows.exists[layer].to(device))
    return refit(queries, known, values, Part(part.stays.to(device), part.free.to(device)), rule)


@dataclass(frozen=True, eq=False, slots=True)
class CacheView:
    """A sequence in the paged cache; implements `policies.SequenceView`."""

    rows: Rows
    length: int
    store: KeyStore
    observed: QueryWatch
    scores: torch.Tensor | None
    """[L, H, R'] of a re-reading; rows that came later have none."""
    inverse_frequencies: torch.Tensor | None

    @property
    def positions(self) -> torch.Tensor:
        return self.rows.positions

    @property
    def exists(self) -> torch.Tensor:
        return self.rows.exists

    def keys(self, layer: int) -> torch.Tensor:
        return self.store.read_cells(layer, self.rows.cells[layer])[0]

    def values(self, layer: int) -> torch.Tensor:
        return self.store.read_cells(layer, self.rows.cells[layer])[1]

    def queries(self, layer: int) -> Queries:
        return self.observed.found[layer]

    def attention(self, layer: int, mode: Mode) -> torch.Tensor:
        vectors, queries, rule = self.keys(layer), self.observed.found[layer], self.observed.rules[layer]
        keys = Keys(vectors, self.positions[layer].to(vectors.device), self.exists[layer].to(vectors.device))
        return self.store.attention(queries, keys, None, mode, rule)

    def reread(self, layer: int) -> torch.Tensor:
        if self.scores is None:
            raise ValueError("this sequence was not re-read")
        missing = self.rows.exists.shape[-1] - self.scores.shape[-1]
        return torch.nn.functional.pad(self.scores[layer], (0, missing))

    def frequencies(self, layer: int) -> torch.Tensor | None:
        return self.inverse_frequencies
