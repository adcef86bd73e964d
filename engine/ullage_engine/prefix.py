"""Index of full blocks by content, so that a prompt that starts like an earlier one reuses its keys and values.

A chained hash finds a candidate fast; the entry's own tokens and parent prove it, so that even a constant hash
function never serves another prompt's block. Non-goals: reference counts and block states (`pool`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Hasher = Callable[[bytes], bytes]


def blake2b_128(data: bytes) -> bytes:
    """128-bit digest; the default hash of the chain."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """One published block: the tokens it holds after those of its parent."""

    digest: bytes
    tokens: tuple[int, ...]
    parent: PrefixEntry | None
    block: int | None
    """None while only a lower memory tier holds the content."""
    generation: int
    """The pool's generation of `block` when published; a later one means other content."""
    tenant: str = ""
    """Whose chain it is: blocks are never shared between tenants."""
    children: set[PrefixEntry] = field(default_factory=set)


class PrefixIndex:
    """Entries by digest.

    Args:
        salt: what must be equal for any block to be reusable: model, cache type, centring.
        block_tokens: tokens in a full block.
        hasher: chain hash, injected so that collisions can be tested.
    """

    def __init__(self, salt: str, block_tokens: int, hasher: Hasher = blake2b_128) -> None:
        self._block_tokens = block_tokens
        self._hasher = hasher
        self._root = hasher(salt.encode())
        self._entries: dict[bytes, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._entries.values())

    def offers(self, entry: PrefixEntry) -> bool:
        """Whether an entry was not forgotten since it was published."""
        return self._entries.get(entry.digest) is entry

    def match(self, tokens: Sequence[int], tenant: str = "") -> list[PrefixEntry]:
        """The longest chain of a tenant's published blocks that `tokens` starts with; only full blocks."""
        chain: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            part = tuple(tokens[start : start + self._block_tokens])
            entry = self._entries.get(self._digest(parent, part, tenant))
            if entry is None or (entry.tokens, entry.tenant) != (part, tenant) or entry.parent is not parent:
                break
            chain.append(entry)
            parent = entry
        return chain

    def publish(
        self, parent: PrefixEntry | None, tokens: tuple[int, ...], block: int | None, generation: int, tenant: str = ""
    ) -> PrefixEntry | None:
        """Offer a full block for reuse; `block` is None for content that only a lower tier holds.

        Returns the entry of exactly this content (this block's, or an equal one published before), or None where
        the parent is no longer published or the digest is taken by other content: then the block stays private.
        """
        if parent is not None and not self.offers(parent):
            return None
        digest = self._digest(parent, tokens, tenant)
        held = self._entries.get(digest)
        if held is not None:
            same = (held.tokens, held.tenant) == (tokens, tenant) and held.parent is parent
            return held if same else None
        entry = PrefixEntry(digest, tokens, parent, block, generation, tenant)
        self._entries[digest] = entry
        if parent is not None:
            parent.children.add(entry)
        return entry

    def forget(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Remove an entry and all that can only be reached through it; returns what was removed, parents first."""
        removed = [entry]
        for found in removed:
            del self._entries[found.digest]
            removed.extend(found.children)
            found.children.clear()
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return removed

    def _digest(self, parent: PrefixEntry | None, tokens: tuple[int, ...], tenant: str) -> bytes:
        head = self._hasher(self._root + tenant.encode()) if parent is None else parent.digest
        return self._hasher(head + b"".join(token.to_bytes(4, "little") for token in tokens))
