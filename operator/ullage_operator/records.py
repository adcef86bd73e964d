"""`RecordStore` on the Kubernetes API: each record a `Remediation` object, owned by its service."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ullage_operator.book import Book, ServiceKey
from ullage_operator.desired import owner_reference
from ullage_operator.errors import ClusterError
from ullage_operator.kube import Cluster, Object
from ullage_operator.model import InferenceService, Remediation
from ullage_operator.remediation import SERVICE_LABEL

log = logging.getLogger(__name__)


class ClusterRecords:
    """Records of one service: what the watch, full lists and our own writes brought."""

    def __init__(
        self, service: InferenceService, *, cluster: Cluster, book: Book[Remediation | None], listed: bool
    ) -> None:
        """`book` is fed with watch events and now and then with full lists by its owner; without `listed`, it may
        not know all yet, and the first load asks for them."""
        self._service = service
        self._key = ServiceKey(service.metadata.namespace, service.metadata.name)
        self._cluster = cluster
        self._book = book
        self._listed = listed

    async def load(self) -> Sequence[Remediation]:
        """All readable records; one that is not is logged and left out."""
        if not self._listed:
            selector = f"{SERVICE_LABEL}={self._key.name}"
            self._book.replace(self._key, await self._cluster.list("Remediation", self._key.namespace, selector))
            self._listed = True
        return [record for record in self._book.of(self._key) if record is not None]

    async def save(self, record: Remediation) -> None:
        """Write spec and status; the spec of a stored record is left to those who approve it."""
        if not self._book.holds(self._key, record.metadata.name):
            await self._create(record)
        written = await self._cluster.write_status(
            "Remediation", self._key.namespace, record.metadata.name, record.status.write()
        )
        self._book.observe(None, written)

    async def delete(self, name: str) -> None:
        """Remove a record."""
        await self._cluster.delete("Remediation", self._key.namespace, name)
        self._book.drop(self._key, name)

    async def _create(self, record: Remediation) -> None:
        obj = record.write()
        obj["metadata"]["ownerReferences"] = [owner_reference(self._service)]
        try:
            self._book.observe(None, await self._cluster.create(obj))
        except ClusterError as error:
            if error.status != 409:  # it was created before an answer of ours was lost
                raise


def read_record(obj: Object) -> Remediation | None:
    """A stored object as a record; None, with a warning, when it is not one."""
    try:
        return Remediation.read({**obj, "status": _status(obj)}, lenient=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        log.warning("Remediation/%s is not readable: %s: %s", obj["metadata"]["name"], where, problem["msg"])
        return None


def _status(obj: Object) -> dict[str, Any]:
    # Created, and not written to since: nothing was sent yet, because Running is written before.
    created = obj["metadata"].get("creationTimestamp")
    return obj.get("status") or {"phase": "Proposed", "proposedAt": created}
