"""From settings to a speculator: find and check the draft model, measure what a row and a drafting pass cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ullage_engine import models
from ullage_engine.config import EngineConfig
from ullage_engine.errors import ModelError
from ullage_engine.layout import CacheLayout
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.speculation.base import Draft, Proposer
from ullage_engine.speculation.control import Costs
from ullage_engine.speculation.draft import DraftModelProposer
from ullage_engine.speculation.ngram import NgramProposer
from ullage_engine.speculation.speculator import Speculator

log = logging.getLogger(__name__)

ROWS = 5
"""Rows of the wider of two steps from which the cost of a row is told."""
CONTEXT = 1024
"""Cached tokens of the longer of two contexts from which the cost of a cached token is told."""
REPEATS = 5
"""Of each step; the fastest counts, as others have been interrupted."""
EXAMPLES = 3
"""Unlike tokens named when vocabularies differ."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model's folder, and the geometry of its cache."""

    folder: Path
    layout: CacheLayout


def find_draft(config: EngineConfig, target: Path) -> DraftModel | None:
    """The draft model that the settings name, its vocabulary checked against the folder of the target model.

    Raises:
        ModelError: it can't be found or read, or has another vocabulary.
    """
    if config.draft_model is None:
        return None
    with named_draft():
        folder = models.folder_for(models.resolve(config.draft_model), config.cache_dir)
        models.check_architecture(folder)
        shape = models.shape_of(models.read_config(folder))
        check_vocabulary(models.vocabulary(target), models.vocabulary(folder))
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, config.block_size, config.kv_type)
    return DraftModel(folder, layout)


@contextmanager
def named_draft() -> Iterator[None]:
    """Errors about a model name the option that the draft model came from."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("--model:", "--draft-model:", 1)) from error


def check_vocabulary(target: dict[str, int], draft: dict[str, int]) -> None:
    """Refuse a draft model whose token ids mean something else.

    Raises:
        ModelError: tokens differ; the message counts them and names a few.
    """
    unlike = sorted(token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token))
    if unlike:
        some = ", ".join(f"{t!r} is {target.get(t)} there and {draft.get(t)} here" for t in unlike[:EXAMPLES])
        raise ModelError(
            f"--draft-model: its vocabulary of {len(draft)} tokens differs from the model's {len(target)} in "
            f"{len(unlike)} tokens ({some}); give a draft model made for the same tokenizer"
        )


def make_speculator(
    config: EngineConfig, target: ModelRunner, draft: ModelRunner | None, *, vocabulary: int
) -> Speculator | None:
    """The speculator that the settings ask for; both runners' stores must be unused yet."""
    if config.speculation == "off":
        return None
    costs = measure_costs(target, draft)
    log.info(
        "speculation: a row costs %.3f of a step, over 1,000 cached tokens %.3f more, a drafting pass %.3f",
        costs.row,
        costs.cached * 1000,
        costs.draft,
    )
    proposer: Proposer = NgramProposer()
    if draft is not None:
        blocks, size = draft.store.data.shape[0], config.block_size
        pool = BlockPool(blocks, size, PrefixIndex("draft", size))
        proposer = DraftModelProposer(draft, pool, vocabulary=vocabulary, budget=config.max_batch_tokens)
    return Speculator(proposer, costs, longest=config.speculation_tokens)


def measure_costs(
    target: ModelRunner, draft: ModelRunner | None, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """Costs on this machine, from steps of one row and of `ROWS`, over no context and over up to `CONTEXT` tokens."""
    layout, blocks = target.store.layout, target.store.data.shape[0]
    context = min(CONTEXT, blocks * layout.block_tokens - ROWS)
    one, row = _one_and_more(target, 0, clock)
    _, far_row = _one_and_more(target, context, clock)
    fixed = max(one - row, one / ROWS)  # rows that cost as much as a step of their own leave nothing fixed
    return Costs(
        row=row / fixed,
        cached=max(0.0, far_row - row) / context / fixed,
        draft=0.0 if draft is None else _fastest(draft, 1, 0, clock) / fixed,
    )


def _one_and_more(runner: ModelRunner, context: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step of one row, and of each row more."""
    one, many = (_fastest(runner, rows, context, clock) for rows in (1, ROWS))
    return one, max(0.0, many - one) / (ROWS - 1)


def _fastest(runner: ModelRunner, rows: int, context: int, clock: Callable[[], float]) -> float:
    """Seconds of a step that verifies `rows - 1` drafted tokens after `context` cached ones."""
    layout = runner.store.layout
    prompt = (0,) * (context + 1)
    request = GenerationRequest(request_id="measure", prompt=prompt, sampling=SamplingParams(max_tokens=rows))
    sequence = Sequence(request, lambda output: None, 0, list(prompt), layout.block_tokens, computed=context)
    sequence.append_blocks(list(range(layout.blocks_for(context + rows))))
    chunk = Chunk(sequence, 1, Draft((0,) * (rows - 1)))
    times = []
    for _ in range(REPEATS):
        began = clock()
        runner.forward([chunk])
        times.append(clock() - began)
    return min(times)
