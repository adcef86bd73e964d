"""Eviction policies: each ranks a sequence's rows (`base`), and `select` turns ranks into what stays.

One module a policy. To add one: write its module, name it in `make`, say in docs/eviction.md what it costs and keeps,
and let `bench/eviction_quality.py` show it beside the others. Everything here is arithmetic on tensors: no pool, no
sequence, no model.
"""

from __future__ import annotations

from ullage_engine.policies.base import Needs, Policy, Queries, SequenceView
from ullage_engine.policies.entropy import Entropy
from ullage_engine.policies.expected import Expected
from ullage_engine.policies.recency import Recency
from ullage_engine.policies.reconstruct import Reconstruct
from ullage_engine.policies.select import select
from ullage_engine.policies.streaming import Streaming
from ullage_engine.policies.window import Window

__all__ = ["DEFAULT", "NAMES", "Needs", "Policy", "Queries", "SequenceView", "make", "select"]

DEFAULT = "reconstruct"
NAMES = ("reconstruct", "window", "expected", "entropy", "streaming", "recency")


def make(name: str, *, scaling: float) -> Policy:
    """A policy by name, with its defaults.

    Args:
        scaling: what the model's attention multiplies q.k by.

    Raises:
        ValueError: no policy has this name.
    """
    policies: tuple[Policy, ...] = (Reconstruct(), Window(), Expected(scaling), Entropy(), Streaming(), Recency())
    for policy in policies:
        if policy.name == name:
            return policy
    raise ValueError(f"eviction policy {name!r} is not one of {', '.join(NAMES)}")
