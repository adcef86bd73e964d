"""The quality benchmark asks what its contexts hold, and counts as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from eviction_quality import Result, Results, headline, overall, retention
from eviction_tasks import DEPTHS, Context, Probe, contexts, read, scores, share_right, write

TEXT = list(range(1000, 9000))


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(c) for c in text]


def found(part: list[int], tokens: list[int]) -> list[int]:
    """Where a run of tokens stands."""
    return [i for i in range(len(tokens)) if tokens[i : i + len(part)] == part]


@pytest.fixture(scope="module")
def made() -> list[Context]:
    return contexts(encode, [TEXT], 1500, 10)


def test_every_question_is_answered_once_in_its_context(made: list[Context]) -> None:
    for context in made:
        for probe in context.probes:
            if probe.task == "text":
                assert probe.prompt[0] == context.tokens[-1] + 1, "the text goes on"
            elif probe.task == "copy":
                assert len(found([*probe.prompt, *probe.answer], context.tokens)) == 2
            else:
                assert len(found(probe.prompt, context.tokens)) == 1
                assert len(found([*probe.prompt, *probe.answer], context.tokens)) == 1


def test_numbers_have_the_length_that_their_task_names_and_stand_at_all_depths(made: list[Context]) -> None:
    depths: dict[str, set[float]] = {}
    for context in made:
        for probe in context.probes:
            if probe.task.startswith("digits"):
                assert len(probe.answer) == int(probe.task.removeprefix("digits "))
                at = found(probe.answer, context.tokens)[0] / len(context.tokens)
                depths.setdefault("all", set()).add(min(DEPTHS, key=lambda depth: abs(depth - at)))
    assert len(depths["all"]) == len(DEPTHS)


def test_of_two_ends_the_worse_counts() -> None:
    context = Context("x", [1], [Probe("both ends", [1], [2]), Probe("both ends", [1], [3]), Probe("copy", [1], [4])])
    assert scores(context, [1.0, 0.25, 0.5]) == {"both ends": 0.25, "copy": 0.5}
    assert share_right([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75


def test_a_job_comes_back_as_it_was_written(made: list[Context], tmp_path: Path) -> None:
    write(made, tmp_path / "job", model="m", keeps=[0.2])
    assert read(tmp_path / "job") == (made, {"model": "m", "keeps": [0.2]})


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
        "keep": 0.2, "retention": {"window": 0.4}, "kvpress": {}, "bytes_freed_ratio": 0.8
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
