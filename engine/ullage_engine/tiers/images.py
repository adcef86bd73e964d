"""What a preempted sequence's cache consists of: published blocks, found by content, and blocks of its own."""

from __future__ import annotations

from collections.abc import Callable

from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixEntry
from ullage_engine.sequence import Sequence
from ullage_engine.tiers.base import Content, Image, OwnBlock


def of(sequence: Sequence, pool: BlockPool, known: Callable[[Content], bool]) -> tuple[Image, dict[Content, int]]:
    """A sequence's image, and which of its blocks must be stored for it: those that are not `known` below."""
    size = sequence.block_tokens
    image = Image(
        [],
        sequence.starts[: -(-sequence.kept // size)],
        sequence.computed,
        sequence.dropped,
        sequence.chain,
        sequence.published,
        sequence.publishing,
        sequence.settled_at,
    )
    fresh: dict[Content, int] = {}
    for index, block in enumerate(sequence.table[: len(image.starts)]):
        content: Content | None = pool.entry(block)
        if content is None:
            content = OwnBlock(min(size, sequence.kept - index * size))
            image.own.append(content)
        image.pieces.append(content)
        if not known(content):
            fresh[content] = block
    return image, fresh


def block_of(content: Content) -> int | None:
    """The block of the pool that holds the content, or will hold it."""
    return content.block if isinstance(content, PrefixEntry) else None
