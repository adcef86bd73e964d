"""How many disruptive actions are in flight over all services. In memory only: it is counted from the records.

Not for use from several threads. A sweep asks, decides and enters its decision without a pause in between, so two
services never take the same place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ullage_operator.model import Remediation
from ullage_operator.policy import DISRUPTIVE


class Budget:
    """Places for disruptive actions, shared by all services."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Hashable, int] = {}

    def left_for(self, service: Hashable) -> int:
        """Places that the other services leave."""
        others = sum(count for key, count in self._held.items() if key != service)
        return self._limit - others

    def enter(self, service: Hashable, records: Iterable[Remediation]) -> None:
        """Count a service's records anew."""
        count = sum(r.status.phase == "Running" and r.spec.action in DISRUPTIVE for r in records)
        if count:
            self._held[service] = count
        else:
            self._held.pop(service, None)

    def forget(self, service: Hashable) -> None:
        """A service is gone."""
        self._held.pop(service, None)

    @property
    def in_flight(self) -> int:
        """Places taken."""
        return sum(self._held.values())
