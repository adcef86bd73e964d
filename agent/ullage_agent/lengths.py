"""What lengths of prompts and answers to expect, learned from requests that finished. Pure.

From the engine's own histograms where it has them, else from its counters (then only means are known, and answers
are taken to end at random). Learned over the last ten to twenty minutes, so that a change of traffic is followed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ullage_agent.histogram import Histogram
from ullage_agent.wire import Snapshot

PERIOD_S = 600.0
MIN_FINISHED = 20
"""Fewer finished requests teach nothing."""
MIN_MEAN = 5
"""Fewer do not even teach a mean."""
MAX_STRETCH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Expected lengths, in tokens."""

    prompt_mean: float
    prompt_deviation: float
    answer_mean: float
    answers: Histogram | None
    """None: only the mean is known."""
    count: float
    stretch: float = 1.0
    """How much longer answers are than those that have ended: while work builds up, the short ones end first."""

    def survival(self, tokens: float) -> float:
        """Share of answers longer than `tokens`."""
        if self.answers is None:
            return math.exp(-tokens / max(1.0, self.answer_mean))
        return self.answers.share_above(tokens / self.stretch)

    def longest(self) -> float:
        """A length that hardly any answer exceeds."""
        if self.answers is None:
            return 4.0 * self.answer_mean
        finite = [bound for bound, _ in self.answers.buckets if math.isfinite(bound)]
        found = self.answers.quantile(0.995)
        return max(1.0, found if found is not None else finite[-1]) * self.stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """Where counting began."""

    at: float
    snapshot: Snapshot
    histograms: Mapping[str, Histogram]


class LengthLearner:
    """Keeps two starting points a period apart and counts from the older one."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._older: _Base | None = None
        self._newer: _Base | None = None
        self._instance: str | None = None
        self._known: Lengths | None = None

    def learn(
        self, at: float, instance: str, snapshot: Snapshot, histograms: Mapping[str, Histogram]
    ) -> Lengths | None:
        """Take in a reading; what is expected now, None until enough requests have finished."""
        here = _Base(at=at, snapshot=snapshot, histograms=histograms)
        if instance != self._instance or (self._newer is not None and at < self._newer.at):
            self._instance, self._older, self._newer = instance, None, here
        elif self._newer is not None and at - self._newer.at >= self._period_s:
            self._older, self._newer = self._newer, here
        found = _from_histograms(self._older, here) or _from_counters(self._older, here)
        if found is None or (found.count < MIN_FINISHED and self._known is not None):
            return self._known  # another process of an engine serves the same callers
        if found.count >= MIN_FINISHED:
            self._known = found
        return found


def _from_histograms(base: _Base | None, now: _Base) -> Lengths | None:
    answers, prompts = now.histograms.get("answer_tokens"), now.histograms.get("prompt_tokens")
    if answers is None or prompts is None:
        return None
    if base is not None:
        answers = answers.since(base.histograms.get("answer_tokens"))
        prompts = prompts.since(base.histograms.get("prompt_tokens"))
    answer_mean, prompt_mean, deviation = answers.mean(), prompts.mean(), prompts.deviation()
    if answers.count < MIN_FINISHED or not answer_mean or prompt_mean is None or deviation is None:
        return None
    generated, finished = _gain(base, now, "generated_tokens_total"), _gain(base, now, "finished_total")
    exposed = generated / finished if generated and finished else answer_mean
    stretch = min(MAX_STRETCH, max(1.0, exposed / answer_mean))
    return Lengths(
        prompt_mean=prompt_mean,
        prompt_deviation=deviation,
        answer_mean=answer_mean * stretch,
        answers=answers,
        count=answers.count,
        stretch=stretch,
    )


def _from_counters(base: _Base | None, now: _Base) -> Lengths | None:
    """Tokens generated for each answer that ended, those of answers that go on included: the best estimate of a mean
    when ends come at random. Prompts are taken to differ as much."""
    finished = _gain(base, now, "finished_total")
    answer = _gain(base, now, "generated_tokens_total")
    prompt = _gain(base, now, "prompt_tokens_total")
    if finished is None or answer is None or prompt is None or finished < MIN_MEAN:
        return None
    mean = prompt / (_gain(base, now, "admitted_total") or finished)
    return Lengths(
        prompt_mean=mean,
        prompt_deviation=mean,
        answer_mean=max(1.0, answer / finished),
        answers=None,
        count=finished,
    )


def _gain(base: _Base | None, now: _Base, name: str) -> int | None:
    """Since `base`, or since the engine started."""
    old, new = 0 if base is None else getattr(base.snapshot, name), getattr(now.snapshot, name)
    return None if old is None or new is None or new < old else int(new - old)
