"""Contexts and questions that show what a cut cache still knows. Standard library only, for every contestant's process.

- `digits 8`, `digits 32`, `digits 64`: three numbers of these lengths hidden in real text, at depths that rotate over
  the contexts, each asked for by its own label: long spans are what many policies lose.
- `both ends`: two numbers, one near either end; the score is the worse of the two answers.
- `copy`: a list of words that the text holds twice, to be continued from its first words.
- `text`: the text simply goes on; the score is 1 / perplexity.
Non-goal: what any policy does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

LABELS = (
    "The pass key to open the vault is",
    "Call the harbour office by telephone:",
    "Serial code engraved on the engine:",
    "Her bank account number was",
    "The winning lottery ticket shows",
    "Coordinates of the shipwreck are",
    "His secret student identifier reads",
)
"""Unlike each other: a small model takes numbers of like labels for one another, with its whole cache too."""
DEPTHS = (0.03, 0.13, 0.24, 0.34, 0.44, 0.55, 0.65, 0.75, 0.86, 0.95)
"""Where a number is hidden, as a share of the context."""
WORDS = (
    "apple", "river", "stone", "cloud", "garden", "window", "silver", "market",
    "forest", "candle", "bridge", "winter", "orange", "paper", "ocean", "ladder",
    "pencil", "mirror", "rabbit", "summer", "engine", "button", "valley", "basket",
    "copper", "island", "hammer", "velvet", "lemon", "tower", "saddle", "pocket",
)  # fmt: skip
TEXT_TOKENS = 128
"""Of the continuation whose perplexity is measured."""
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to a context."""

    task: str
    prompt: list[int]
    """Follows the context; at least one token."""
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Context:
    """What is read before eviction, and what is asked afterwards, each question on its own."""

    name: str
    tokens: list[int]
    probes: list[Probe]


def contexts(
    encode: Encode, texts: Sequence[Sequence[int]], tokens: int, count: int, *, first: int = 0, seed: int = 7
) -> list[Context]:
    """`count` contexts of each kind from number `first` on, of about `tokens` tokens, drawn from `texts` in turn."""
    made: list[Context] = []
    for index in range(first, first + count):
        draw = Random(f"{seed}|{tokens}|{index}")
        made.append(_numbers(encode, _excerpt(texts, index, tokens, draw), index, draw))
        made.append(_ends_and_copy(encode, _excerpt(texts, index, tokens, draw), index, draw))
        made.append(_text(_excerpt(texts, index, tokens + TEXT_TOKENS, draw), index, tokens))
    return made


def _excerpt(texts: Sequence[Sequence[int]], index: int, tokens: int, draw: Random) -> list[int]:
    text = texts[index % len(texts)]
    start = draw.randrange(len(text) - tokens)
    return list(text[start : start + tokens])


def _numbers(encode: Encode, text: list[int], index: int, draw: Random) -> Context:
    depths = sorted(DEPTHS[(index + step) % len(DEPTHS)] for step in (0, 3, 7))
    lengths = [8, 32, 64]
    draw.shuffle(lengths)
    labels = draw.sample(LABELS, 3)
    hidden = [_hidden(encode, label, length, draw) for label, length in zip(labels, lengths, strict=True)]
    probes = [Probe(f"digits {n}", p.prompt, p.answer) for n, (_, p) in zip(lengths, hidden, strict=True)]
    return Context(
        f"numbers {index}", _insert(text, [(d, h) for d, (h, _) in zip(depths, hidden, strict=True)]), probes
    )


def _ends_and_copy(encode: Encode, text: list[int], index: int, draw: Random) -> Context:
    first, last = (_hidden(encode, label, 16, draw) for label in draw.sample(LABELS, 2))
    words = draw.sample(WORDS, len(WORDS))
    listed = encode("\n\nWords: " + " ".join(words) + ".\n\n")
    shown = encode("\n\nWords: " + " ".join(words[:4]))
    rest = encode(" " + " ".join(words[4:28]))
    tokens = _insert(text, [(0.03, first[0]), (0.3, listed), (0.6, listed), (0.95, last[0])])
    probes = [Probe("both ends", p.prompt, p.answer) for _, p in (first, last)]
    return Context(f"ends {index}", tokens, [*probes, Probe("copy", shown, rest)])


def _text(text: list[int], index: int, tokens: int) -> Context:
    return Context(f"text {index}", text[:tokens], [Probe("text", text[tokens : tokens + 1], text[tokens + 1 :])])


def _hidden(encode: Encode, label: str, digits: int, draw: Random) -> tuple[list[int], Probe]:
    """Tokens to hide, and the question for them."""
    number = "".join(draw.choice("0123456789") for _ in range(digits))
    other = "".join(str((int(digit) + 1) % 10) for digit in number)
    whole, beside = encode(f"\n\n{label} {number}"), encode(f"\n\n{label} {other}")
    # tokens up to where the number begins, however the tokenizer cuts it
    shared = next(i for i, (a, b) in enumerate(zip(whole, beside, strict=False)) if a != b)
    return encode(f"\n\n{label} {number}.\n\n"), Probe("", whole[:shared], whole[shared:])


def _insert(text: list[int], parts: Sequence[tuple[float, list[int]]]) -> list[int]:
    """The text with parts put in at shares of its length, in rising order."""
    result, last = [], 0
    for depth, part in parts:
        at = int(depth * len(text))
        result += text[last:at] + part
        last = at
    return result + text[last:]


def scores(context: Context, values: Sequence[float]) -> dict[str, float]:
    """Score of each task from one value for each probe: of several questions of one task the worst answer counts."""
    result: dict[str, float] = {}
    for probe, value in zip(context.probes, values, strict=True):
        result[probe.task] = min(value, result.get(probe.task, value))
    return result


def means(context: Context, values: Sequence[float]) -> dict[str, float]:
    """Mean of each task from one value for each probe.

    Not the worst, as of scores: the worst question of a cut cache may be another one than the full cache's, and their
    difference would be nobody's loss.
    """
    of_task: dict[str, list[float]] = {}
    for probe, value in zip(context.probes, values, strict=True):
        of_task.setdefault(probe.task, []).append(value)
    return {task: sum(some) / len(some) for task, some in of_task.items()}


def share_right(answer: Sequence[int], given: Sequence[int]) -> float:
    """Share of the answer's tokens that stand in their place."""
    return sum(a == b for a, b in zip(answer, given, strict=True)) / len(answer)


def write(contexts: Sequence[Context], path: Path, **options: Any) -> None:
    """As a job for another process."""
    path.write_text(json.dumps(options | {"contexts": [asdict(context) for context in contexts]}))


def read(path: Path) -> tuple[list[Context], dict[str, Any]]:
    """What `write` wrote."""
    job = json.loads(path.read_text())
    made = [Context(c["name"], c["tokens"], [Probe(**probe) for probe in c["probes"]]) for c in job.pop("contexts")]
    return made, job
