"""The quality benchmark's tables, charts and headline say of its results what is true of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from eviction_report import (
    HIGHEST,
    Result,
    Results,
    gain,
    headline,
    interval,
    losses,
    overall,
    picture,
    retention,
    tables,
)
from lines import BASE, HEIGHT, TOP, Chart, svg


def result(
    method: str | None, score: float, full: bool = False, name: str = "a", freed: int = 8, sure: float = 0.9
) -> Result:
    return Result(
        1024,
        name,
        "unseen",
        "ullage",
        method,
        1.0 if full else 0.2,
        {"copy": score, "text": 0.1},
        {"copy": sure, "text": 0.01} if full else {},
        10,
        0 if full else freed,
    )


def test_retention_leaves_out_what_the_full_cache_cannot_do() -> None:
    every = [
        result(None, 0.95, True),
        result("window", 0.38),
        result(None, 0.5, True, "b"),
        result("window", 0.5, name="b"),
    ]
    by_task = retention(every)["ullage", "unseen", "window", 0.2]
    assert by_task["copy"] == [0.4]
    assert by_task["text"] == [1.0, 1.0], "text is compared wherever it was read"
    assert overall(by_task) == pytest.approx(0.4)
    assert headline(every, [0.5, 0.2], "unseen") == {
        "keep": 0.2, "retention": {"window": 0.4}, "kvpress": {}, "bytes_freed_ratio": 0.8,
        "nats": {}, "kvpress_nats": {}, "nats_gain": None,
    }  # fmt: skip


def test_an_answer_that_the_full_cache_gives_by_a_hair_does_not_count_unless_asked_for() -> None:
    every = [
        result(None, 1.0, True, sure=0.4), result("window", 0.1),
        result(None, 1.0, True, "b", sure=0.6), result("window", 0.5, name="b"),
    ]  # fmt: skip
    assert retention(every)["ullage", "unseen", "window", 0.2]["copy"] == [0.5]
    assert retention(every, 0.0)["ullage", "unseen", "window", 0.2]["copy"] == [0.1, 0.5]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Results(tmp_path / "partial.jsonl")
    first.add([result(None, 1.0, True), result("window", 0.5)])
    again = Results(tmp_path / "partial.jsonl")
    assert again.all == first.all
    assert again.has(1024, "a", "unseen", "ullage")
    assert not again.has(1024, "a", "seen", "ullage")
    assert not again.has(2048, "a", "unseen", "ullage")


def test_lines_of_a_run_that_did_not_measure_nats_still_load_and_are_told_without_them(tmp_path: Path) -> None:
    every = [result(None, 1.0, True), result("window", 0.5)]
    old = [{n: getattr(r, n) for n in Result.__slots__ if n != "nats"} for r in every]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    loaded = Results(tmp_path / "old.jsonl").all
    assert loaded == every
    assert not losses(loaded)
    assert len(list(tables(loaded, [0.2], "unseen", 0.5))) == 2
    assert picture(loaded, [0.2], ["unseen"], 0.5).count("<polyline") == 1
    assert "nan" not in picture(loaded, [0.2, 0.1], ["unseen", "seen"], 0.5)


def measured(side: str, context: str, nats: dict[str | None, dict[str, float]], full: float = 1.0) -> list[Result]:
    """Results of several methods on one context; the full cache's is that of None."""
    return [
        Result(
            1024, context, "unseen", side, method, 0.2 if method else 1.0, dict.fromkeys(by_task, full),
            {} if method else dict.fromkeys(by_task, 0.9), nats=by_task,
        )
        for method, by_task in nats.items()
    ]  # fmt: skip


OURS = [
    *measured("ullage", "a", {None: {"x": 0.1, "y": 0.2}, "good": {"x": 0.2, "y": 0.4}, "poor": {"x": 9, "y": 0.2}}),
    *measured(
        "ullage", "b", {None: {"x": 0.5, "text": 3.0}, "good": {"x": 0.8, "text": 3.1}, "poor": {"x": 9, "text": 9}}
    ),
]
THEIRS = [
    *measured("kvpress", "a", {None: {"x": 0.0, "y": 0.1}, "Best": {"x": 0.5, "y": 0.7}, "Other": {"x": 5, "y": 5}}),
    *measured(
        "kvpress", "b", {None: {"x": 0.4, "text": 3.0}, "Best": {"x": 0.5, "text": 0.0}, "Other": {"x": 5, "text": 5}}
    ),
]


def test_losses_are_above_the_sides_own_full_cache_and_of_answers_that_count() -> None:
    beyond = measured("ullage", "c", {None: {"x": 0.0}, "good": {"x": 7.0}}, full=0.5)
    found = losses([*OURS, *beyond, *THEIRS])
    assert found["ullage", "unseen", "good", 0.2]["x"] == pytest.approx([0.1, 0.3])
    assert overall(found["ullage", "unseen", "good", 0.2]) == pytest.approx(0.2), "text is told apart"
    assert found["kvpress", "unseen", "Best", 0.2] == {
        "x": pytest.approx([0.5, 0.1]), "y": pytest.approx([0.6]), "text": pytest.approx([-3.0])
    }  # fmt: skip
    assert losses(beyond, 0.0) == {}


def test_the_headline_names_losses_by_side_and_what_the_best_gains() -> None:
    told = headline([*OURS, *THEIRS], [0.2], "unseen")
    assert told["nats"] == {"good": 0.2, "poor": pytest.approx((8.9 + 0.0 + 8.5) / 3, abs=1e-4)}
    assert told["kvpress_nats"]["Best"] == 0.4
    assert told["nats_gain"] == gain([*OURS, *THEIRS], 0.2, "unseen")
    # at `a` 0.4 and 0.4, at `b` -0.2: twice `b` is as likely as twice `a`
    assert told["nats_gain"] == {
        "policy": "good", "against": "Best", "mean": 0.2, "low": -0.2, "high": 0.4, "contexts": 2
    }  # fmt: skip


def test_a_gain_is_of_answers_that_count_on_both_sides() -> None:
    only_theirs = measured("kvpress", "c", {None: {"x": 0.0}, "Best": {"x": 0.1}})
    only_ours = measured("ullage", "d", {None: {"x": 0.0}, "good": {"x": 0.1}})
    unsure = [*measured("ullage", "e", {None: {"x": 0.0}, "good": {"x": 0.0}}),
              *measured("kvpress", "e", {None: {"x": 0.0}, "Best": {"x": 9.0}}, full=0.5)]  # fmt: skip
    assert gain([*OURS, *THEIRS, *only_theirs, *only_ours, *unsure], 0.2, "unseen") == gain(
        [*OURS, *THEIRS], 0.2, "unseen"
    )
    assert gain([*OURS[:3], *THEIRS], 0.2, "unseen") == {
        "policy": "good", "against": "Best", "mean": 0.4, "low": None, "high": None, "contexts": 1
    }  # fmt: skip
    assert gain(OURS, 0.2, "unseen") is None
    assert gain(THEIRS, 0.2, "unseen") is None
    assert gain([*only_ours, *only_theirs], 0.2, "unseen") is None
    assert gain([*OURS, *THEIRS], 0.1, "unseen") is None


def test_an_interval_resamples_groups_as_wholes_and_always_alike() -> None:
    assert interval([[0.0], [1.0]]) == (0.5, 0.0, 1.0), "each alone is drawn a quarter of the time"
    assert interval([[2.0, 2.0], [2.0]]) == (2.0, 2.0, 2.0)
    assert interval([[0.0, 0.0, 0.0], [1.0]])[0] == 0.25, "every value weighs the same"
    values = [float(i % 10) for i in range(40)]
    alone = interval([[value] for value in values])
    grouped = interval([[float(i)] * 4 for i in range(10)])
    assert grouped[0] == alone[0] == 4.5
    assert grouped[2] - grouped[1] > 1.5 * (alone[2] - alone[1]), "values that go together tell less"
    assert alone == interval([[value] for value in values])
    # a normal approximation of the mean of 40 values
    assert alone[2] - alone[1] == pytest.approx(2 * 1.645 * 2.872 / 40**0.5, rel=0.1)


def test_the_second_table_has_the_rows_of_the_first() -> None:
    lines = list(tables([*OURS, *THEIRS], [0.2], "unseen", 0.5))
    middle = lines.index("")
    first, second = lines[:middle], lines[middle + 1 :]
    assert [line[:28] for line in first[1:]] == [line[:28] for line in second[1:]]
    assert second[0].startswith("unseen, nats lost")
    good = next(line for line in second if line.startswith("ullage good"))
    assert good.split()[2:] == ["0.200", "0.200/2", "0.200/1", "0.100/1"]


def points(line: ElementTree.Element) -> list[float]:
    return [float(point.split(",")[1]) for point in line.attrib["points"].split()]


def test_charts_of_losses_have_their_own_scale_and_cut_off_what_is_above() -> None:
    chart = Chart("t", ["1", "2", "3", "4"], {"a": [0.0, 2.0, math.nan, 6.0]}, top=4.0)
    (line,) = ElementTree.fromstring(svg(("title", [chart]))).iter("{http://www.w3.org/2000/svg}polyline")
    assert points(line) == pytest.approx([BASE, (TOP + BASE) / 2, BASE - 1.5 * (BASE - TOP)])
    assert line.attrib["clip-path"] == "url(#plot)"


def test_a_picture_has_a_row_for_each_measure() -> None:
    root = ElementTree.fromstring(picture([*OURS, *THEIRS], [0.2], ["unseen", "seen"], 0.5))
    assert int(root.attrib["height"]) == 2 * HEIGHT
    lines = [points(line)[0] for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 8
    assert lines[4] == pytest.approx(BASE - 0.2 / HIGHEST * (BASE - TOP))
