"""Drafts by prompt lookup: what followed the last time that the sequence's end occurred in it.

Costs no model and pays where answers repeat their prompt or themselves: code, extraction, rewriting. Source: A. Saxena,
"Prompt Lookup Decoding" (2023); the index is the hash chain of LZ77 compressors (RFC 1951, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft

SHORTEST = 3
"""Tokens that must agree: two agree by chance too often in prose."""
LONGEST = 32
"""Tokens compared at most: longer matches predict no better."""
CANDIDATES = 16
"""Earlier places compared in one lookup, the latest first."""


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place that ends as the sequence does."""

    end: int
    """Index of the token that followed."""
    length: int
    """Tokens in which both agree, up to `LONGEST`."""


class SuffixIndex:
    """Where each run of `SHORTEST` tokens occurred: constant time and space a token, bounded time a lookup."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """End of the latest occurrence, by run."""
        self._earlier: list[int] = []
        """By end of a run: the end of its occurrence before; 0 for none. Runs end at `SHORTEST` or later."""

    @property
    def length(self) -> int:
        """Tokens taken in so far."""
        return len(self._earlier)

    def extend(self, tokens: Items[int]) -> None:
        """Take in what `tokens`, all of the sequence, has more than last time."""
        for end in range(self.length + 1, len(tokens) + 1):
            if end < SHORTEST:
                self._earlier.append(0)
                continue
            run = _key(tokens, end)
            self._earlier.append(self._latest.get(run, 0))
            self._latest[run] = end

    def longest_match(self, tokens: Items[int]) -> Match | None:
        """The longest of the latest places that end as `tokens` does; of equals the latest."""
        best: Match | None = None
        end = self._earlier[-1] if self._earlier else 0
        for _ in range(CANDIDATES):
            if not end:
                break
            length = _common(tokens, end)
            if best is None or length > best.length:
                best = Match(end, length)
            end = self._earlier[end - 1]
        return best


class NgramProposer:
    """Implements `base.Proposer` with one index a sequence."""

    def __init__(self) -> None:
        self._indexes: dict[Sequence, SuffixIndex] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence, count in wanted.items():
            index = self._indexes.setdefault(sequence, SuffixIndex())
            index.extend(sequence.tokens)
            match = index.longest_match(sequence.tokens)
            if match is not None:
                drafts[sequence] = Draft(_continued(sequence.tokens, match.end, count))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def check_integrity(self) -> None:
        """Nothing can contradict: an index knows its own sequence's tokens only, which never change."""


def _key(tokens: Items[int], end: int) -> int:
    key = 0
    for token in tokens[end - SHORTEST : end]:
        key = key << 32 | token
    return key


def _common(tokens: Items[int], end: int) -> int:
    """How many tokens before `end` equal the last ones."""
    length, last = 0, len(tokens) - 1
    while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[last - length]:
        length += 1
    return length


def _continued(tokens: Items[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start`; where they run into the end, the run goes on as the period that it then is."""
    period = len(tokens) - start
    return tuple(tokens[start + i % period] for i in range(count))
