"""How books say that they contradict themselves."""

from __future__ import annotations


class IntegrityError(AssertionError):
    """Books contradict themselves: a bug, never a user's fault."""


def require(condition: bool, message: str) -> None:
    """One line of a check of integrity.

    Raises:
        IntegrityError: the condition does not hold.
    """
    if not condition:
        raise IntegrityError(message)
