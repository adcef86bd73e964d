"""The engine's own cache, evicted by each policy at each budget: prefill once, score once, cut copies, ask them all.

Blocks, cells, the evictor and the attention over what is left are the engine's; only the order of work is the
benchmark's. Non-goals: tasks (`eviction_tasks`) and reports (`eviction_quality`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from ullage_engine import models
from ullage_engine.attention import paged_attention
from ullage_engine.cells import CellPool
from ullage_engine.eviction import Protection
from ullage_engine.evictor import Evictor
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.observation import amended
from ullage_engine.policies import Queries, make, select
from ullage_engine.policies.mass import Keys, Rule
from ullage_engine.policies.refit import Sample
from ullage_engine.policies.reread import Rereading, readings
from ullage_engine.policies.view import TensorView
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.quant import KvType
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.retention import Rows
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence as LiveSequence
from ullage_engine.speculation.base import Draft
from ullage_engine.store import BlockStore

ATTENTION = "ullage_watched"
SIZE = 16
"""Tokens of a block."""
Watch = Callable[[int, torch.Tensor], None]
"""Receives a layer and its queries [T, Hq, D] after they have attended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How scores are made, and what is protected as far as a budget allows; as the engine does it by default."""

    policies: tuple[str, ...]
    keeps: tuple[float, ...]
    first_tokens: int = 256
    recent_tokens: int = 256
    observed: int = 64
    """Last queries that are recorded."""
    chunk: int = 512
    """Tokens of one prefill or re-reading pass."""
    floor: int = 0
    kv_type: KvType = "bf16"


@dataclass(slots=True)
class Costs:
    """Seconds and tokens spent."""

    contexts: int = 0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    reread_s: float = 0.0
    reread_tokens: int = 0
    score_s: dict[str, float] = field(default_factory=dict)
    scored: int = 0
    """How often every policy scored."""
    cut_s: dict[str, float] = field(default_factory=dict)
    """Choosing, gathering and switching, by policy."""
    cuts: int = 0
    """Of each policy."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Entries, by policy."""
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Base:
    """A prefilled context and what was observed of it."""

    sequence: LiveSequence
    observed: list[Queries]
    rereading: torch.Tensor | None
    """[L, H, rows of its table]."""
    sample: Sample
    """Of the re-reading's queries."""


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """A copy of a context that a policy has cut."""

    policy: str | None
    """None: the full cache."""
    keep: float
    sequence: LiveSequence
    blocks: int
    """Before the cut."""
    freed: int


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """What a sequence said, and what it thought of the right answer."""

    tokens: list[int]
    chances: torch.Tensor
    """Log likelihood of each token of the right answer, after the right ones before it."""


class EvictionCache:
    """One model and a pool large enough for a context and all its variants."""

    def __init__(self, loaded: models.LoadedModel, settings: Settings, tokens: int, kernels: CpuKernels | None) -> None:
        self.settings = settings
        self.costs = Costs()
        self._model = loaded.model
        shape = models.shape_of(loaded.config)
        self._layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, SIZE, settings.kv_type)
        copies = len(settings.policies) * len(settings.keeps) + 3
        total = copies * (self._layout.blocks_for(tokens + settings.chunk + 128) + 2)
        self.pool = BlockPool(total, SIZE, PrefixIndex("bench", SIZE))
        self._cells = CellPool(self.pool, self._layout.cell_classes)
        self._store = BlockStore(self._layout, total, "cpu", None, kernels)
        self._runner = ModelRunner(loaded.model, self._store, torch.device("cpu"))
        self._live: list[LiveSequence] = []
        protection = Protection(first_tokens=settings.first_tokens, recent_tokens=settings.recent_tokens)
        self._evictor = Evictor(self.pool, self._cells, self._runner, protection, lambda: self._live)
        self._watch: Watch | None = None
        decoder = loaded.model.get_decoder()
        self._rule = Rule(scaling=decoder.layers[0].self_attn.scaling)
        self._frequencies: torch.Tensor | None = getattr(decoder.rotary_emb, "inv_freq", None)
        self._listen()

    def _listen(self) -> None:
        """Let the model's attention tell its queries to whoever watches."""
        from transformers import AttentionInterface

        def watched(module: Any, query: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            result = paged_attention(module, query, *arguments, **named)
            if self._watch is not None:
                self._watch(int(module.layer_idx), query[0].transpose(0, 1))
            return result

        AttentionInterface.register(ATTENTION, watched)
        self._model.set_attn_implementation(ATTENTION)

    @property
    def heads(self) -> int:
        """Entries of a token."""
        return self._layout.layers * self._layout.kv_heads

    # -- contexts ------------------------------------------------------------------------------------------------

    def prefill(self, tokens: Sequence[int], instruction: Sequence[int]) -> Base:
        """Compute a context, and re-read it if a policy needs that."""
        began = time.perf_counter()
        sequence = self._sequence(list(tokens))
        observed: list[Queries] = []
        while sequence.computed < len(tokens):
            observed = self._observe(sequence, min(self.settings.chunk, len(tokens) - sequence.computed), observed)
        self.costs.prefill_s += time.perf_counter() - began
        self.costs.prefill_tokens += len(tokens)
        self.costs.contexts += 1
        sample = Sample(len(tokens), self._layout.kv_heads)
        rereading = None
        if "reconstruct" in self.settings.policies:
            rereading = self._reread(sequence, tokens, instruction, sample)
        return Base(sequence, observed, rereading, sample)

    def asked(self, base: Base, prompt: Sequence[int]) -> Base:
        """A copy of a context that has read all of a question but its last token."""
        sequence = self._copy(base.sequence, [*base.sequence.tokens[: base.sequence.computed], *prompt])
        observed = base.observed
        if len(prompt) > 1:
            observed = self._observe(sequence, len(prompt) - 1, observed)
        return Base(sequence, observed, base.rereading, base.sample)

    def variants(self, base: Base) -> list[Variant]:
        """The full cache, and a cut copy for each policy and budget."""
        self.costs.cuts += len(self.settings.keeps)
        made = [Variant(None, 1.0, self._copy(base.sequence, base.sequence.tokens), len(base.sequence.table), 0)]
        for policy, scores in self._scores(base).items():
            for keep in self.settings.keeps:
                sequence = self._copy(base.sequence, base.sequence.tokens)
                blocks = len(sequence.table)
                began = time.perf_counter()
                amend = partial(amended, self._runner, base.sample) if policy == "reconstruct" else None
                evicted = self._evictor.cut(
                    sequence, keep * sequence.computed, lambda rows, s=scores, k=keep: self._keep(rows, s, k), amend
                )
                self.costs.cut_s[policy] = self.costs.cut_s.get(policy, 0.0) + time.perf_counter() - began
                self.costs.dropped[policy] = self.costs.dropped.get(policy, 0) + evicted.entries
                made.append(Variant(policy, keep, sequence, blocks, evicted.blocks))
        return made

    def release(self, sequences: Sequence[LiveSequence]) -> None:
        """Give everything of these back."""
        for sequence in sequences:
            self._live.remove(sequence)
            self.pool.release(sequence.reset())
            self._cells.release(sequence.take_cells())

    # -- answers -------------------------------------------------------------------------------------------------

    def answers(self, sequences: Sequence[LiveSequence], prompt: Sequence[int], answer: Sequence[int]) -> list[Answer]:
        """Greedy continuations of all sequences after a prompt, as long as the answer.

        The right answer is proposed as a draft: what is accepted is what greedy decoding would have said, and a
        sequence that knows the answer says it in one pass. The first pass proposes it whole, to everyone.
        """
        before = [(sequence.tokens, sequence.computed) for sequence in sequences]
        given: list[list[int]] = [[] for _ in sequences]
        chances: list[torch.Tensor] = []
        ahead = [len(answer)] * len(sequences)
        for sequence in sequences:
            sequence.tokens = [*sequence.tokens[: sequence.computed], *prompt]
        while any(len(tokens) < len(answer) for tokens in given):
            open_ = [i for i, tokens in enumerate(given) if len(tokens) < len(answer)]
            drafts = [tuple(answer[len(given[i]) : -1][: ahead[i]]) for i in open_]
            logits = self._logits([sequences[i] for i in open_], drafts)
            chances = chances or [_of_text(part, answer) for part in logits]
            for i, draft, part in zip(open_, drafts, logits, strict=True):
                chosen: list[int] = part.argmax(-1).tolist()
                right = next((n for n, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
                sequences[i].computed = len(sequences[i].tokens) + right
                sequences[i].tokens = [*sequences[i].tokens, *chosen[: right + 1]]
                given[i] += chosen[: right + 1]
                ahead[i] = 2 * max(1, ahead[i]) if right == len(draft) else 1
        for sequence, (tokens, computed) in zip(sequences, before, strict=True):
            self._roll_back(sequence, tokens, computed)
        return [Answer(*one) for one in zip(given, chances, strict=True)]

    def chances(self, sequence: LiveSequence, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
        """[len(text)] log likelihood of each token of a text after a prompt and the text before it."""
        tokens, computed = sequence.tokens, sequence.computed
        sequence.tokens = [*tokens[:computed], *prompt]
        logits = self._logits([sequence], [tuple(text[:-1])])[0]
        self._roll_back(sequence, tokens, computed)
        return _of_text(logits, text)

    def decode(self, sequence: LiveSequence, steps: int) -> None:
        """Time some decode steps of one sequence alone, and forget them."""
        tokens, computed = sequence.tokens, sequence.computed
        sequence.tokens = [*tokens[:computed], tokens[0]]
        for at in range(steps + 1):
            began = time.perf_counter()
            chosen = self._logits([sequence], [()])[0].argmax(-1).tolist()
            if at:  # the first finds caches cold
                self.costs.decode_s += time.perf_counter() - began
                self.costs.decode_tokens += 1
            sequence.computed += 1
            sequence.tokens = [*sequence.tokens, *chosen]
        self._roll_back(sequence, tokens, computed)

    def _logits(self, sequences: Sequence[LiveSequence], drafts: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Of each sequence [1 + drafts, V], after its last token and after each of its drafts."""
        chunks = [
            Chunk(sequence, len(sequence.tokens) - sequence.computed, Draft(draft))
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        for chunk in chunks:
            self._make_room(chunk.sequence, chunk.width)
        logits = self._runner.forward(chunks)
        ends = list(accumulate(1 + len(draft) for draft in drafts))
        return [logits[start:end] for start, end in pairwise([0, *ends])]

    def _roll_back(self, sequence: LiveSequence, tokens: list[int], computed: int) -> None:
        sequence.tokens, sequence.computed = tokens, computed
        self.pool.release(sequence.drop_tail(0))

    # -- scores --------------------------------------------------------------------------------------------------

    def _scores(self, base: Base) -> dict[str, torch.Tensor]:
        view = self._view(base)
        result = {}
        for name in self.settings.policies:
            began = time.perf_counter()
            result[name] = make(name, scaling=self._rule.scaling).score(view)
            self.costs.score_s[name] = self.costs.score_s.get(name, 0.0) + time.perf_counter() - began
        self.costs.scored += 1
        return result

    def _view(self, base: Base) -> TensorView:
        sequence, layers, heads = base.sequence, self._layout.layers, self._layout.kv_heads
        rows = len(sequence.table) * SIZE
        both = [self._read(sequence, layer, rows) for layer in range(layers)]
        shape = (layers, heads, rows)
        rereading = None
        if base.rereading is not None:  # rows that the question added are recent, and so protected
            missing = rows - base.rereading.shape[-1]
            rereading = torch.nn.functional.pad(base.rereading, (0, missing))
        return TensorView(
            all_keys=[keys for keys, _ in both],
            all_values=[values for _, values in both],
            positions=torch.arange(rows).expand(shape),
            exists=(torch.arange(rows) < sequence.kept).expand(shape),
            length=sequence.computed,
            rule=self._rule,
            observed=base.observed,
            rereading=rereading,
            inverse_frequencies=self._frequencies,
            attend=self._store.operations.attention,
        )

    def _keep(self, rows: Rows, scores: torch.Tensor, keep: float) -> torch.Tensor:
        entries = int(keep * int(rows.exists.sum())) - rows.protected
        return select(scores, rows.candidates, entries, self.settings.floor)

    def _reread(
        self, sequence: LiveSequence, tokens: Sequence[int], instruction: Sequence[int], sample: Sample
    ) -> torch.Tensor:
        """What a second pass gave each row of the table, [L, H, rows]."""
        began = time.perf_counter()
        rows, length = len(sequence.table) * SIZE, sequence.computed
        found = Rereading(self._layout.layers, self._layout.kv_heads, rows)
        held = list(sequence.tokens)
        for reading in readings(tokens, instruction, chunk=self.settings.chunk):
            sequence.tokens = [*held, *reading.tokens]
            at = torch.arange(length + reading.observed, length + len(reading.tokens))

            def watch(layer: int, vectors: torch.Tensor, at: torch.Tensor = at) -> None:
                queries = Queries(vectors[at[0] - length :], at)
                sample.take(layer, queries, self._rule)
                keys, _ = self._read(sequence, layer, length + vectors.shape[0])
                there = torch.arange(keys.shape[1]).expand(keys.shape[:2])
                known = Keys(keys, there, there < length + vectors.shape[0])
                scores = self._store.operations.attention(queries, known, None, "square", self._rule)
                found.take(layer, scores[:, :rows])

            self._make_room(sequence, len(reading.tokens))
            self._watched(sequence, len(reading.tokens), watch)
            self.costs.reread_tokens += len(reading.tokens)
            self._roll_back(sequence, held, length)
        self.costs.reread_s += time.perf_counter() - began
        return found.scores

    def _read(self, sequence: LiveSequence, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.tensor([sequence.table[: self._layout.blocks_for(rows)]])
        keys, values = self._store.read(layer, blocks, torch.float32)
        return keys[0], values[0]

    # -- sequences -----------------------------------------------------------------------------------------------

    def _observe(self, sequence: LiveSequence, count: int, before: list[Queries]) -> list[Queries]:
        """Compute `count` tokens; the last queries of each layer, those of `before` included."""
        start, found = sequence.computed, list(before)

        def watch(layer: int, vectors: torch.Tensor) -> None:
            here = Queries(vectors, torch.arange(start, start + vectors.shape[0]))
            if layer < len(before):
                old = before[layer]
                here = Queries(torch.cat([old.vectors, vectors]), torch.cat([old.positions, here.positions]))
            last = Queries(here.vectors[-self.settings.observed :].clone(), here.positions[-self.settings.observed :])
            found[layer : layer + 1] = [last]

        self._make_room(sequence, count)
        self._watched(sequence, count, watch)
        sequence.computed += count
        return found

    def _watched(self, sequence: LiveSequence, count: int, watch: Watch) -> None:
        self._watch = watch
        try:
            self._runner.forward([Chunk(sequence, count)])
        finally:
            self._watch = None

    def _sequence(self, tokens: list[int]) -> LiveSequence:
        request = GenerationRequest(request_id="bench", prompt=(tokens[0],), sampling=SamplingParams(max_tokens=1))
        sequence = LiveSequence(request, lambda _: None, 0, tokens, SIZE)
        self._live.append(sequence)
        return sequence

    def _copy(self, source: LiveSequence, tokens: list[int]) -> LiveSequence:
        """A dense sequence with blocks of its own; a token beyond what is computed marks that it decodes."""
        sequence = self._sequence([*tokens[: source.computed], *(tokens[source.computed :] or [0])])
        sequence.append_blocks(self.pool.allocate(len(source.table)))
        self._runner.copy_blocks(dict(zip(sequence.table, source.table, strict=True)))
        sequence.computed = source.computed
        return sequence

    def _make_room(self, sequence: LiveSequence, count: int) -> None:
        missing = self._layout.blocks_for(sequence.kept + count) - len(sequence.table)
        if missing > 0:
            sequence.append_blocks(self.pool.allocate(missing))


def _of_text(logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """[len(text)] log likelihood of each token of a text from the logits [len(text), V] before it."""
    return logits.log_softmax(-1).gather(1, torch.tensor(text).unsqueeze(1))[:, 0]
