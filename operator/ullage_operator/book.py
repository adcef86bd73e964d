"""Objects by service, kept from watch events and set right by lists.

Events may arrive late and deletions may be lost while a watch is down: an object never goes back to an older version,
and `replace` with a full list drops what is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ullage_operator.remediation import SERVICE_LABEL

Object = dict[str, Any]


class ServiceKey(NamedTuple):
    """Identifies an InferenceService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def service_of(obj: Object) -> ServiceKey | None:
    """The service that an object is labelled with."""
    metadata = obj["metadata"]
    name = (metadata.get("labels") or {}).get(SERVICE_LABEL)
    return None if not name else ServiceKey(metadata["namespace"], name)


class Book:
    """Latest known objects of one kind. Not for use from several threads."""

    def __init__(self) -> None:
        self._services: dict[ServiceKey, dict[str, Object]] = {}

    def observe(self, event_type: str | None, obj: Object) -> None:
        """Take in one watch event, or the answer to a write (`event_type` None)."""
        key = service_of(obj)
        if key is None:
            return
        uid = obj["metadata"]["uid"]
        if event_type == "DELETED":
            self._services.get(key, {}).pop(uid, None)
            return
        known = self._services.setdefault(key, {})
        if uid not in known or _version(obj) >= _version(known[uid]):
            known[uid] = obj

    def replace(self, key: ServiceKey, objects: Iterable[Object]) -> None:
        """Take a full list for one service; newer versions that events brought meanwhile stay."""
        present = self._services.get(key, {})
        self._services[key] = {}
        for obj in objects:
            uid = obj["metadata"]["uid"]
            newer = uid in present and _version(present[uid]) > _version(obj)
            self._services[key][uid] = present[uid] if newer else obj

    def of(self, key: ServiceKey) -> list[Object]:
        """The objects of a service, in any order."""
        return list(self._services.get(key, {}).values())

    def forget(self, key: ServiceKey) -> None:
        """Drop a service."""
        self._services.pop(key, None)


def _version(obj: Object) -> int:
    # Comparable by order on every server that stores in etcd; a foreign form counts as always newest.
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0
