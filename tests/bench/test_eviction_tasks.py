"""The quality benchmark asks what its contexts hold, and counts as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from eviction_tasks import DEPTHS, Context, Probe, contexts, means, read, scores, share_right, write

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


def test_contexts_from_a_number_on_are_those_of_the_whole_list() -> None:
    assert contexts(encode, [TEXT], 1500, 2, first=3) == contexts(encode, [TEXT], 1500, 5)[9:]


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


def test_of_two_ends_the_worse_score_counts_and_the_mean_loss() -> None:
    context = Context("x", [1], [Probe("both ends", [1], [2]), Probe("both ends", [1], [3]), Probe("copy", [1], [4])])
    assert scores(context, [1.0, 0.25, 0.5]) == {"both ends": 0.25, "copy": 0.5}
    assert means(context, [1.0, 0.25, 0.5]) == {"both ends": 0.625, "copy": 0.5}
    assert share_right([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75


def test_a_job_comes_back_as_it_was_written(made: list[Context], tmp_path: Path) -> None:
    write(made, tmp_path / "job", model="m", keeps=[0.2])
    assert read(tmp_path / "job") == (made, {"model": "m", "keeps": [0.2]})
