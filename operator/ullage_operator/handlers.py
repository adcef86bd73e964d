"""kopf's side: watch events in, keepers woken. Nothing else in the operator knows kopf.

Only `on.event` handlers: they leave no finalizers and no annotations on anybody's objects, and kopf delivers all
existing objects through them at the start, so creating, changing and resuming look the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import kopf

from ullage_operator.book import Book, ServiceKey, service_of
from ullage_operator.keeper import Keeper, Office
from ullage_operator.model import GROUP, VERSION
from ullage_operator.remediation import SERVICE_LABEL

CHILDREN = (("apps", "v1", "deployments"), ("", "v1", "services"), ("", "v1", "secrets"))


class Keepers:
    """The tasks that keep services, one for each."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._keepers: dict[ServiceKey, Keeper] = {}
        self._tasks: dict[ServiceKey, asyncio.Task[None]] = {}
        self._generations: dict[ServiceKey, tuple[str, int]] = {}

    def service_seen(self, event_type: str | None, obj: dict[str, Any]) -> None:
        """An InferenceService was listed, created, changed or deleted."""
        metadata = obj["metadata"]
        key = ServiceKey(metadata["namespace"], metadata["name"])
        version = (metadata["uid"], metadata.get("generation", 0))
        ending = event_type == "DELETED" or metadata.get("deletionTimestamp")
        if self._generations.get(key) == version and key in self._keepers and not ending:
            return  # our own status
        self._generations[key] = version
        if key in self._keepers:
            self._keepers[key].wake()
        elif not ending:
            self._begin(key)

    def wake(self, key: ServiceKey) -> None:
        """A child of a service changed."""
        if key in self._keepers:
            self._keepers[key].wake()

    async def close(self) -> None:
        """End all keepers and wait for them; what they had begun is in their records."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, key: ServiceKey) -> None:
        keeper = Keeper(key, self._office)
        task = asyncio.create_task(keeper.run(), name=f"keeper {key}")
        self._keepers[key], self._tasks[key] = keeper, task
        task.add_done_callback(lambda _: self._ended(key))
        self._office.metrics.services.set(len(self._keepers))

    def _ended(self, key: ServiceKey) -> None:
        del self._keepers[key], self._tasks[key]
        self._generations.pop(key, None)
        self._office.pods.forget(key)
        self._office.records.forget(key)
        self._office.metrics.services.set(len(self._keepers))


def register(registry: kopf.OperatorRegistry, keepers: Keepers, office: Office) -> None:
    """Add all handlers to the registry."""

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, "inferenceservices", registry=registry)
    async def service_event(event: Mapping[str, Any], **_: Any) -> None:
        keepers.service_seen(event["type"], dict(event["object"]))

    for group, version, plural in CHILDREN:
        kopf.on.event(group, version, plural, registry=registry, id=f"child-{plural}", labels=LABELLED)(
            _child_handler(keepers)
        )
    for group, version, plural, book in (
        ("", "v1", "pods", office.pods),
        (GROUP, VERSION, "remediations", office.records),
    ):
        kopf.on.event(group, version, plural, registry=registry, id=f"book-{plural}", labels=LABELLED)(
            _book_handler(book)
        )


LABELLED = {SERVICE_LABEL: kopf.PRESENT}


def settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only what is labelled, stand alone, exit quickly, no network surprises."""
    result = kopf.OperatorSettings()
    for group, version, plural in (*CHILDREN, ("", "v1", "pods"), (GROUP, VERSION, "remediations")):
        result.watching.label_selectors[group, version, plural] = SERVICE_LABEL
    result.watching.connect_timeout = 10.0
    result.watching.server_timeout = 300  # whole seconds: the API server reads nothing else
    result.peering.standalone = True
    result.posting.enabled = False
    result.process.ultimate_exiting_timeout = 30.0
    return result


def _child_handler(keepers: Keepers) -> Any:
    async def child_event(event: Mapping[str, Any], **_: Any) -> None:
        key = service_of(event["object"])
        if key is not None:
            keepers.wake(key)

    return child_event


def _book_handler(book: Book) -> Any:
    async def book_event(event: Mapping[str, Any], **_: Any) -> None:
        book.observe(event["type"], dict(event["object"]))

    return book_event
