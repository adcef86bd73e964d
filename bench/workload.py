"""Mixes of requests that the benchmarks measure, cut from real English text; the same for every contestant.

Standard library only: it is imported in other engines' environments too. Non-goal: tokenizing (callers give ids).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one contestant has to do: all prompts at once, greedy, exactly `output_tokens` each."""

    name: str
    model: str
    """Folder of the model."""
    prompts: list[list[int]]
    output_tokens: int
    dtype: str
    """`float32` or `bfloat16`: weights, activations and, where the contestant has no narrower one, the cache."""
    threads: int
    options: dict[str, str | int | bool]
    """The contestant's own settings."""

    @property
    def total_tokens(self) -> int:
        """Tokens that a cache must hold for all requests to run at once."""
        return sum(len(prompt) + self.output_tokens for prompt in self.prompts)

    def write(self, path: Path) -> None:
        """Save for another process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Load what `write` saved."""
        return cls(**json.loads(path.read_text()))


def real_text() -> str:
    """CPython's own reference topics: about 113,000 tokens of technical English, on every machine."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def plain_mix(text_ids: Sequence[int], *, requests: int, prompt_tokens: int) -> list[list[int]]:
    """Prompts with nothing in common, side by side out of the text."""
    return [list(text_ids[at : at + prompt_tokens]) for at in _starts(text_ids, requests, prompt_tokens)]


def shared_prefix_mix(
    text_ids: Sequence[int], *, requests: int, groups: int, shared_tokens: int, own_tokens: int
) -> list[list[int]]:
    """Prompts of several applications: those of one group begin with the same `shared_tokens`."""
    prefixes = plain_mix(text_ids, requests=groups, prompt_tokens=shared_tokens)
    own = plain_mix(list(reversed(text_ids)), requests=requests, prompt_tokens=own_tokens)
    return [prefixes[index % groups] + tail for index, tail in enumerate(own)]


def _starts(text_ids: Sequence[int], count: int, length: int) -> range:
    stride = len(text_ids) // count
    if stride < length:
        raise ValueError(
            f"{count} prompts of {length} tokens need {count * length} tokens of text, not {len(text_ids)}"
        )
    return range(0, stride * count, stride)


def mixed_lengths(count: int, *, longest: int, seed: int = 11) -> list[tuple[int, int, float]]:
    """`count` requests as (prompt tokens, answer tokens, seconds after the one before): many short, few long.

    Log-normal lengths and exponential gaps, which is what public traces of chat services look like; a fixed seed
    makes it a recorded mix.
    """
    random = Random(seed)
    return [
        (
            max(1, min(longest, int(random.lognormvariate(4.2, 1.0)))),
            max(1, min(longest, int(random.lognormvariate(3.4, 0.8)))),
            random.expovariate(2.0),
        )
        for _ in range(count)
    ]
