"""One request's tokens and the blocks that hold their keys and values.

Four lengths, never mixed up:
- `len(tokens)`: prompt and generated tokens so far;
- `computed`: tokens whose keys and values are in the cache or were dropped from it; it sets the next RoPE position,
  and eviction never lowers it;
- `kept`: rows present in the block table, `computed - dropped`;
- `capacity`: rows that the table's blocks could hold.

Tokens that speculation drafts are none of these: within a step their keys and values lie between `kept` and `capacity`,
and at its end those that were accepted have become tokens, and blocks that hold others only are given back.

A dense sequence keeps whole blocks for all heads alike, so its table is one list. Eviction takes whole blocks out of
the middle; what it keeps of their content goes to `cells`, where each head has rows of its own. What remains keeps
its position, because past keys carry RoPE already. Tokens to come always go to dense blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ullage_engine.cell_table import CellTable
from ullage_engine.prefix import PrefixEntry
from ullage_engine.request import GenerationRequest, Sink
from ullage_engine.tiers.base import Image
from ullage_engine.watch import Watch


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one live request; the scheduler and the eviction planner change it, in the step loop's thread."""

    request: GenerationRequest
    sink: Sink
    arrival: int
    """Order of arrival; kept over preemptions."""
    tokens: list[int]
    block_tokens: int
    generator: torch.Generator | None = None
    """Source of randomness of its own, so that an answer does not depend on who else is in the batch."""
    table: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Position of the first token of each block in `table`."""
    computed: int = 0
    dropped: int = 0
    """Tokens whose dense rows are gone, whatever of them `cells` keeps."""
    cells: CellTable | None = None
    """What was kept of evicted blocks; None: nothing."""
    coming: CellTable | None = None
    """Of a reader: cells that are being filled for the sequence that it reads, and are its own until then."""
    reads: Watch | None = None
    """Of a reader, which computes tokens for the sake of their queries: who sees them. Its cells are its parent's."""
    held: bool = False
    """Whether it waits for its reader."""
    settled_at: float | None = None
    """Tokens kept when its budget was last looked at; None: not since it was (re)computed."""
    cached_tokens: int = 0
    """Prompt tokens reused from the prefix cache at the first admission."""
    chain: PrefixEntry | None = None
    """Last published block of this sequence's prefix."""
    published: int = 0
    """Tokens covered by `chain`."""
    publishing: bool = True
    """False once its content can't be reused by others (blocks dropped, chain broken) or reuse is off."""
    passed_over: int = 0
    """Times a later request was admitted before this one while it waited."""
    reuse_counted: bool = False
    """Whether what it found in the prefix cache was counted: once, at its first computation."""
    loading: int = 0
    """Blocks that copies from a lower tier still fill for it; until they have, it can't compute."""
    incoming: list[int] = field(default_factory=list)
    """Those blocks that will hold cells."""
    image: Image | None = None
    """What it held when it was preempted, stored below."""
    prefetched: bool = False
    """Whether its prompt was looked up below while it waits."""
    recompute_until: int = 0
    """Tokens below this one were computed before a preemption."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def kept(self) -> int:
        return self.computed - self.dropped

    @property
    def kept_tokens(self) -> float:
        """Entries in the cache, as tokens: those in cells divided by layers times heads."""
        return self.kept + (self.cells.tokens if self.cells is not None else 0.0)

    @property
    def capacity(self) -> int:
        return len(self.table) * self.block_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate; a reader generates none."""
        return 0 if self.reads is not None else self.request.sampling.max_tokens - self.generated

    @property
    def decoding(self) -> bool:
        """Whether only its newest token awaits computation."""
        return self.computed == len(self.tokens) - 1 and self.generated > 0

    def outstanding_blocks(self, ceiling: float | None = None) -> int:
        """Blocks it may still ask for: rows of all its tokens to come, less those its table can hold already.

        Args:
            ceiling: tokens that a budget lets it keep at most; None: all. What it has to compute it holds in any case.
        """
        known = len(self.tokens) - self.dropped
        rows: float = known + self.remaining
        if ceiling is not None:
            rows = min(rows, max(known, self.kept + ceiling - self.kept_tokens))
        return max(0, math.ceil(rows / self.block_tokens) - len(self.table))

    def slots(self, count: int) -> list[int]:
        """Slots of the next `count` tokens to compute; the table must have room."""
        size = self.block_tokens
        return [self.table[row // size] * size + row % size for row in range(self.kept, self.kept + count)]

    def append_blocks(self, blocks: list[int]) -> None:
        """Extend the table with blocks for the tokens that follow its capacity."""
        first = self.capacity + self.dropped
        self.starts.extend(first + i * self.block_tokens for i in range(len(blocks)))
        self.table.extend(blocks)

    def follow(self, parent: Sequence) -> list[int]:
        """Take over a parent's computed rows, block by block; returns the blocks, which are now shared."""
        used = -(-parent.kept // self.block_tokens)
        self.table, self.starts = parent.table[:used], parent.starts[:used]
        self.computed, self.dropped = parent.computed, parent.dropped
        self.chain, self.published, self.publishing = parent.chain, parent.published, parent.publishing
        self.cached_tokens = self.computed
        return self.table

    def drop_blocks(self, indices: list[int]) -> list[int]:
        """Take whole, filled blocks (indices into `table`) out; returns their ids. Positions stay as they are."""
        gone = set(indices)
        blocks = [self.table[i] for i in indices]
        self.table = [block for i, block in enumerate(self.table) if i not in gone]
        self.starts = [start for i, start in enumerate(self.starts) if i not in gone]
        self.dropped += len(blocks) * self.block_tokens
        self.publishing = False
        return blocks

    def drop_tail(self, coming: int) -> list[int]:
        """Take blocks beyond the kept rows and `coming` more out of the table; returns their ids."""
        used = -(-(self.kept + coming) // self.block_tokens)
        blocks = self.table[used:]
        del self.table[used:], self.starts[used:]
        return blocks

    def take_cells(self) -> list[int]:
        """Forget the cells; returns their ids."""
        table, self.cells = self.cells, None
        return [] if table is None else table.held

    def reset(self) -> list[int]:
        """Forget the blocks' content (preemption): all tokens are to be computed anew. Returns the blocks held."""
        blocks = self.take_blocks()
        if self.reuse_counted:
            self.recompute_until = max(self.recompute_until, self.computed)
        self.computed = self.dropped = self.published = 0
        self.chain, self.publishing = None, True
        self.settled_at, self.held = None, False
        return blocks

    def take_blocks(self) -> list[int]:
        """Forget all blocks; returns their ids."""
        blocks = self.incoming + self.table
        self.table, self.starts, self.incoming = [], [], []
        return blocks

    def restore(self, image: Image, table: list[int], incoming: list[int]) -> None:
        """Take up where `image` was made, on blocks that hold, or will hold, its pieces."""
        self.table, self.starts, self.incoming = table, [*image.starts], incoming
        self.computed, self.dropped, self.settled_at = image.computed, image.dropped, image.settled_at
        self.chain, self.published, self.publishing = image.chain, image.published, image.publishing
