"""Requests from their arrival to their last token: who is live, which forks wait, what each is told and how it ends.

Not thread-safe: the step loop alone touches it. Non-goals: the order of work (`scheduler`) and choosing tokens
(`sampler`, `speculation`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from ullage_engine.compute import Runner
from ullage_engine.pool import BlockPool
from ullage_engine.request import FinishReason, GenerationRequest, Sink, TokenOutput
from ullage_engine.sampler import Sampled
from ullage_engine.scheduler import Scheduler
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.accept import Verdict
from ullage_engine.speculation.speculator import Speculator

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestTally:
    """Totals since the start."""

    admitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class LiveRequests:
    """All requests that have not ended."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, runner: Runner, speculator: Speculator | None) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._speculator = speculator
        self._live: dict[str, Sequence] = {}
        self._parked: dict[str, list[Sequence]] = {}
        """Forks by parent, until the parent's prompt is computed."""
        self._arrivals = 0
        self.tally = RequestTally()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._live

    def parked(self) -> list[Sequence]:
        """Forks that wait for their parent's prompt; readable from any thread."""
        return [child for children in tuple(self._parked.values()) for child in tuple(children)]

    def forks_of(self, parent: Sequence) -> list[Sequence]:
        """Forks that waited for this prompt, and no longer do."""
        return self._parked.pop(parent.request_id, [])

    def add(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request that was checked to fit."""
        sequence = Sequence(
            request, sink, self._arrivals, list(request.prompt), self._pool.block_tokens, _generator(request)
        )
        self._arrivals += 1
        self._live[request.request_id] = sequence
        self.tally.admitted += 1
        self.tally.prompt_tokens += len(request.prompt)
        parent = self._live.get(request.fork_of or "")
        if parent is not None and _same_prompt(parent, request) and not parent.generated:
            self._parked.setdefault(parent.request_id, []).append(sequence)
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for any more; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.tally.aborted += 1
            self._end(sequence)

    def fail_all(self, error: str) -> None:
        """Tell every request that it has ended; the books, which may be broken, are left as they are."""
        live, self._live = list(self._live.values()), {}
        for sequence in live:
            self._tell(sequence, _failure(sequence, error))

    def advance(self, sequence: Sequence, verdict: Verdict) -> bool:
        """Take the next token; False: the sequence has ended."""
        chosen = verdict.chosen
        if chosen is None:
            self.fail(sequence, "the model produced NaN or infinity for this request")
            return False
        sequence.tokens.append(chosen.token)
        kept = math.ceil(sequence.kept_tokens)
        self.tally.generated_tokens += 1
        reason = _finish_reason(sequence, chosen)
        if reason is not None:
            self._end(sequence)
            self.tally.finished += 1
        self._emit(sequence, _output(sequence, chosen, reason, kept))
        return sequence.request_id in self._live

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a request with an error; what only it holds is neither offered nor left for others to read."""
        if sequence.reads is not None:
            log.error("a reader failed; its sequence is not cut")
            self._scheduler.finish(sequence)
            return
        own = [block for block in sequence.table if self._pool.references(block) == 1]
        self._scheduler.spoil(own)
        self._runner.scrub(own, sequence.cells.held if sequence.cells is not None else [])
        self._end(sequence)
        self.tally.failed += 1
        self._emit(sequence, _failure(sequence, error))

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.request_id]
        if self._speculator is not None:
            self._speculator.forget(sequence)
        for siblings in self._parked.values():
            if sequence in siblings:
                siblings.remove(sequence)
                return
        for orphan in self._parked.pop(sequence.request_id, []):
            self._scheduler.add(orphan)
        self._scheduler.finish(sequence)

    def _emit(self, sequence: Sequence, output: TokenOutput) -> None:
        if not self._tell(sequence, output):
            self.abort(sequence.request_id)

    def _tell(self, sequence: Sequence, output: TokenOutput) -> bool:
        """Hand an output to its receiver, whose own faults end its request and never the loop."""
        try:
            sequence.sink(output)
        except Exception:
            log.exception("the receiver of request %s failed", sequence.request_id)
            return False
        return True


def _same_prompt(parent: Sequence, request: GenerationRequest) -> bool:
    return (parent.request.prompt, parent.request.tenant) == (request.prompt, request.tenant)


def _generator(request: GenerationRequest) -> torch.Generator | None:
    if request.sampling.temperature == 0:
        return None
    generator = torch.Generator()
    if request.sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.sampling.seed % (1 << 63))
    return generator


def _failure(sequence: Sequence, error: str) -> TokenOutput:
    return TokenOutput(request_id=sequence.request_id, token=None, finish_reason="error", error=error)


def _finish_reason(sequence: Sequence, chosen: Sampled) -> FinishReason | None:
    if chosen.token in sequence.request.sampling.stop_token_ids:
        return "stop"
    return "length" if sequence.remaining <= 0 else None


def _output(sequence: Sequence, chosen: Sampled, reason: FinishReason | None, kept: int) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request_id,
        token=chosen.token,
        logprob=chosen.logprob,
        top_logprobs=chosen.top,
        finish_reason=reason,
        cached_tokens=sequence.cached_tokens,
        kept_tokens=kept,
        dropped_tokens=sequence.computed - kept,
    )
