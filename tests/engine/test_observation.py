"""A re-reading counts every query once, whatever steps it came in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from ullage_engine.observation import CacheView, QueryWatch, RereadWatch
from ullage_engine.policies import Queries, mass
from ullage_engine.policies.base import Mode
from ullage_engine.policies.mass import Keys, Rule
from ullage_engine.policies.refit import Sample
from ullage_engine.policies.reread import Rereading
from ullage_engine.retention import Rows

HEADS, SIZE, CONTEXT, OBSERVED, END = 2, 8, 24, 27, 40
RULE = Rule(scaling=0.5)


@dataclass
class Store:
    """Keys of one layer at positions 0 to `END`."""

    keys: torch.Tensor = field(
        default_factory=lambda: torch.randn(HEADS, END, SIZE, generator=torch.Generator().manual_seed(3))
    )

    attend: mass.Attention = mass.attention

    def read_cells(self, layer: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.keys

    @property
    def attention(self) -> mass.Attention:
        return self.attend


@dataclass
class Reader:
    """Has stored what it computed."""

    computed: int = CONTEXT

    def rows(self, coming: int) -> Rows:
        shape = (1, HEADS, END)
        place = torch.arange(END).expand(shape)
        return Rows(torch.zeros(1, HEADS, 1), place < self.computed + coming, place < 0, place.int(), 0)


def scores(steps: list[tuple[int, int]]) -> torch.Tensor:
    """Of a re-reading in such steps (first query and how many); a step that begins earlier is one computed again."""
    queries = torch.randn(END, 2 * HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    found, reader = Rereading(1, HEADS, CONTEXT), Reader()
    watch = RereadWatch(Store(), found, OBSERVED, Sample(CONTEXT, HEADS), reader)
    for first, count in steps:
        reader.computed = first
        watch.see(0, queries[first : first + count], first, RULE)
    return found.scores


@pytest.mark.parametrize(
    "steps",
    [
        [(24, 4), (28, 12)], [(24, 1), (25, 1), (26, 1), (27, 13)], [(24, 8), (32, 8)],
        pytest.param([(24, 8), (24, 8), (32, 8)], id="a failed step"),
        pytest.param([(24, 8), (32, 8), (32, 8)], id="a failed last step"),
        pytest.param([(24, 12), (28, 12)], id="again in other pieces"),
    ],
)  # fmt: skip
def test_steps_do_not_matter(steps: list[tuple[int, int]]) -> None:
    whole = scores([(24, 16)])
    assert whole.any()
    assert torch.allclose(scores(steps), whole, rtol=1e-5)


def test_queries_of_the_instruction_do_not_count() -> None:
    assert not scores([(24, 3)]).any()


def test_the_watch_and_the_view_compute_with_what_the_store_has() -> None:
    asked: list[str] = []

    def attention(queries: Queries, keys: Keys, lse: torch.Tensor | None, mode: Mode, rule: Rule) -> torch.Tensor:
        asked.append(mode)
        return mass.attention(queries, keys, lse, mode, rule)

    store, reader = Store(attend=attention), Reader()
    queries = torch.randn(16, 2 * HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    RereadWatch(store, Rereading(1, HEADS, CONTEXT), OBSERVED, Sample(CONTEXT, HEADS), reader).see(0, queries, 24, RULE)
    watch = QueryWatch()
    watch.see(0, queries, 24, RULE)
    CacheView(reader.rows(16), END, store, watch, None, None).attention(0, "sum")
    assert asked == ["square", "sum"]
