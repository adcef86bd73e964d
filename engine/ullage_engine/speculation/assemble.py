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
LEAST_ROW = 0.002
"""Cost of a row at least: no machine multiplies so much faster than it reads, whatever a disturbed measurement says."""
CONTEXT = 1024
"""Cached tokens of the longer of two contexts from which the cost of a cached token is told."""
REPEATS = 6
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
    config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    *,
    vocabulary: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Speculator | None:
    """The speculator that the settings ask for.

    Args:
        target, draft: what costs are measured on; their stores must be unused yet.
        vocabulary: width of the target's logits.
        clock: seconds.
    """
    if config.speculation == "off":
        return None
    costs = measure_costs(target, draft, clock)
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


def measure_costs(target: ModelRunner, draft: ModelRunner | None, clock: Callable[[], float]) -> Costs:
    """Costs on this machine, from steps of one row and of `ROWS`, over no context and over up to `CONTEXT` tokens."""
    layout, blocks = target.store.layout, target.store.data.shape[0]
    context = min(CONTEXT, blocks * layout.block_tokens - ROWS)
    steps = [(target, _verifying(target, rows, cached)) for cached in (0, context) for rows in (1, ROWS)]
    if draft is not None:
        steps.append((draft, _verifying(draft, 1, 0)))
    one, many, far_one, far_many, *drafting = _fastest(steps, clock)
    row, far_row = (many - one) / (ROWS - 1), (far_many - far_one) / (ROWS - 1)
    fixed = max(one - row, one / ROWS)  # rows that cost as much as a step of their own leave nothing fixed
    return Costs(
        row=max(LEAST_ROW, row / fixed),
        cached=max(0.0, (far_row - row) / context / fixed),
        draft=drafting[0] / fixed if drafting else 0.0,
    )


def _verifying(runner: ModelRunner, rows: int, context: int) -> Chunk:
    """A chunk that verifies `rows - 1` drafted tokens after `context` cached ones."""
    layout, prompt = runner.store.layout, (0,) * (context + 1)
    request = GenerationRequest(request_id="measure", prompt=prompt, sampling=SamplingParams(max_tokens=rows))
    sequence = Sequence(request, lambda output: None, 0, list(prompt), layout.block_tokens, computed=context)
    sequence.append_blocks(list(range(layout.blocks_for(context + rows))))
    return Chunk(sequence, 1, Draft((0,) * (rows - 1)))


def _fastest(steps: list[tuple[ModelRunner, Chunk]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each step; they take turns, so that what disturbs the machine for a while disturbs all alike."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(REPEATS):
        for (runner, chunk), seconds in zip(steps, times, strict=True):
            began = clock()
            runner.forward([chunk])
            seconds.append(clock() - began)
    return [min(seconds) for seconds in times]
