"""Choosing tiles for a GPU, with a clock that a test winds."""

from __future__ import annotations

from itertools import product
from typing import Any

import gpu_tune
import pytest
import torch
from gpu_sums import KINDS, Budget
from gpu_tune import fastest, lines, worth_checking_in

from ullage_engine.kernels import targets, tuning
from ullage_engine.kernels.tuning import Key, Tile
from ullage_engine.kernels.view import LayerView
from ullage_engine.layout import CacheLayout

TARGET = targets.of_nvidia(90)
KEY = Key("sm_90", "fp8", 128, 16)
RULE = tuning.by_rule(TARGET, "fp8", 128, 4)


def test_candidates_begin_with_the_rule_and_are_all_different() -> None:
    tiles = [*tuning.candidates(RULE)]
    assert tiles[0] == RULE
    assert len(set(tiles)) == len(tiles) > 10
    assert {tile.queries for tile in tiles} == {RULE.queries}


def test_each_candidate_is_in_force_while_it_is_measured_and_none_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MEASURED", {})
    seen = []

    def measure() -> float:
        seen.append(tuning.MEASURED[KEY])
        if seen[-1].stages == 4:
            raise RuntimeError("out of resource: shared memory")
        return 200.0 - seen[-1].rows

    rows = fastest(KEY, tuning.candidates(RULE), measure, lambda name: True)
    assert seen == [*tuning.candidates(RULE)]
    assert not tuning.MEASURED
    assert all((row["us"] is None) == (row["stages"] == 4) for row in rows)
    best = worth_checking_in(rows)
    assert best is not None
    assert best.rows == 128


def test_what_was_measured_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tile(16, 128, 8, 3)
    monkeypatch.setattr(tuning, "MEASURED", {KEY: other})
    layout = CacheLayout(1, 2, 128, 16, "fp8")
    view = LayerView.of(torch.zeros((1, layout.block_bytes), dtype=torch.uint8), layout, 0)
    assert tuning.tile_of(view, TARGET, 4) == other
    assert tuning.tile_of(view, TARGET, 64) == tuning.by_rule(TARGET, "fp8", 128, 64)
    assert tuning.tile_of(view, targets.of_nvidia(80), 4) == RULE


@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda target: target.name)
def test_decode_and_prefill_are_told_apart(target: targets.Target) -> None:
    keys = [tuning.key_of(target, "fp8", 128, queries) for queries in (1, 16, 17, 32, 33, 64, 8192)]
    assert [key.queries for key in keys] == [16, 16, 32, 32, 64, 64, 64]


@pytest.mark.parametrize("target", [t for t in targets.TARGETS if t.backend == "cuda"], ids=lambda target: target.name)
def test_a_thread_sums_few_products_of_float32_at_once(target: targets.Target) -> None:
    """Dots of float32 are unrolled; of 1,024 products to a thread compilers keep too much in registers, and spill."""
    for columns, queries in product((64, 128, 256), (1, 16, 17, 32, 33, 4096)):
        tile = tuning.by_rule(target, "fp32", columns, queries)
        assert tile.queries * tile.rows * columns <= 512 * 32 * tile.warps


def row(us: float | None, rows: int = 64) -> dict[str, Any]:
    return {"queries": 16, "rows": rows, "warps": 4, "stages": 2, "us": us}


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([], None),
        ([row(None), row(5.0)], None),
        ([row(100.0), row(99.0, 32)], None),
        ([row(100.0), row(90.0, 32), row(None, 128)], Tile(16, 32, 4, 2)),
    ],
    ids=["nothing ran", "the rule did not run", "within noise", "clearly faster"],
)
def test_only_what_clearly_beats_the_rule_is_offered(rows: list[dict[str, Any]], best: Tile | None) -> None:
    assert worth_checking_in(rows) == best


def test_no_time_left_leaves_the_rule() -> None:
    assert fastest(KEY, tuning.candidates(RULE), lambda: 1.0, lambda name: False) == []


def test_tuning_covers_decode_and_prefill_of_every_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MEASURED", {})

    class Speeds:
        """Eight warps take half the time of four."""

        def _time(self, kind: str) -> dict[str, float]:
            [tile] = [tile for key, tile in tuning.MEASURED.items() if key.kind == kind]
            return {"us": 400.0 / tile.warps}

        def decode(self, case: Any, bandwidth: float) -> dict[str, float]:
            return self._time(case.kind)

        def prefill(self, kind: str, past: int, chunk: int) -> dict[str, float]:
            return self._time(kind)

    speeds: Any = Speeds()
    found = gpu_tune.tune(speeds, TARGET, KINDS, Budget(1e9, lambda: 0.0))
    # the rule's tile for long chunks has eight warps already
    assert {(key.kind, key.queries) for key in found} == {(kind, 16) for kind in KINDS}
    assert all(tile.warps == 8 for tile in found.values())
    assert "prefill fp8" in capsys.readouterr().out


def test_lines_are_python_for_the_table() -> None:
    found = {KEY: Tile(16, 128, 8, 3)}
    text = "{" + "".join(lines(found)) + "}"
    assert eval(text, {"Key": Key, "Tile": Tile}) == found
