"""What is known of objects by service, kept from watch events and set right by lists.

Objects are read once, when they come, and only what was read is kept: thousands of pods and records would not fit
into memory as the API writes them. Events may arrive late and deletions may be lost while a watch is down: an object
never goes back to an older version, a deleted one never returns, and a full list drops what is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from ullage_operator.remediation import SERVICE_LABEL

Object = dict[str, Any]
T = TypeVar("T")

REMEMBERED = 4096
"""Deletions that are remembered, so that a list begun before does not bring the object back."""


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


class _Entry(NamedTuple, Generic[T]):
    version: int
    name: str
    value: T


Shelf = dict[str, _Entry[T]]
"""One service's objects by UID."""


class Book(Generic[T]):
    """Latest known objects of one kind, as `read` made them. Not for use from several threads."""

    def __init__(self, read: Callable[[Object], T]) -> None:
        self._read = read
        self._services: dict[ServiceKey, Shelf[T]] = {}
        self._gone: dict[str, None] = {}

    def observe(self, event_type: str | None, obj: Object) -> None:
        """Take in one watch event, or the answer to a write (`event_type` None)."""
        key = service_of(obj)
        if key is None:
            return
        uid = obj["metadata"]["uid"]
        if event_type == "DELETED":
            self._bury(uid)
            self._services.get(key, {}).pop(uid, None)
            return
        known = self._services.setdefault(key, {})
        self._put(known, known.get(uid), uid, obj)

    def replace(self, key: ServiceKey, objects: Iterable[Object]) -> None:
        """Take a full list for one service; newer versions that events brought meanwhile stay."""
        self._services[key] = self._shelf(self._services.get(key, {}), objects)

    def replace_all(self, objects: Iterable[Object], *, within: Callable[[ServiceKey], bool]) -> None:
        """Take a full list for all services that are `within` its scope."""
        shelves: dict[ServiceKey, Shelf[T]] = {key: {} for key in self._services if within(key)}
        for obj in objects:
            key = service_of(obj)
            if key is not None:
                uid = obj["metadata"]["uid"]
                self._put(shelves.setdefault(key, {}), self._services.get(key, {}).get(uid), uid, obj)
        self._services.update(shelves)

    def of(self, key: ServiceKey) -> list[T]:
        """The objects of a service, in any order."""
        return [entry.value for entry in self._services.get(key, {}).values()]

    def holds(self, key: ServiceKey, name: str) -> bool:
        """Whether an object of that name is known."""
        return any(entry.name == name for entry in self._services.get(key, {}).values())

    def drop(self, key: ServiceKey, name: str) -> None:
        """An object was deleted by us."""
        shelf = self._services.get(key, {})
        for uid in [uid for uid, entry in shelf.items() if entry.name == name]:
            self._bury(uid)
            del shelf[uid]

    def forget(self, key: ServiceKey) -> None:
        """Drop a service."""
        self._services.pop(key, None)

    def _shelf(self, present: Shelf[T], objects: Iterable[Object]) -> Shelf[T]:
        shelf: Shelf[T] = {}
        for obj in objects:
            uid = obj["metadata"]["uid"]
            self._put(shelf, present.get(uid), uid, obj)
        return shelf

    def _put(self, shelf: Shelf[T], known: _Entry[T] | None, uid: str, obj: Object) -> None:
        """Keep the newer one of what is known and an object; nothing of one that was deleted."""
        version = _version(obj)
        if uid in self._gone:
            return
        if known is not None and (known.version > version or (known.version == version and version > 0)):
            shelf[uid] = known
        else:
            shelf[uid] = _Entry(version, obj["metadata"]["name"], self._read(obj))

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _version(obj: Object) -> int:
    # Comparable by order on every server that stores in etcd; a foreign form counts as always newest.
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0
