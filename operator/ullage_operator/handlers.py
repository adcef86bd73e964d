"""kopf's side: watch events in, keepers woken. Nothing else in the operator knows kopf.

Only `on.event` handlers: they leave no finalizers and no annotations on anybody's objects, and kopf delivers all
existing objects through them at the start, so creating, changing and resuming look the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from ullage_operator.book import Book, service_of
from ullage_operator.keeper import Office
from ullage_operator.keepers import Keepers
from ullage_operator.model import GROUP, VERSION
from ullage_operator.remediation import SERVICE_LABEL

CHILDREN = (("apps", "v1", "deployments"), ("", "v1", "services"), ("", "v1", "secrets"))


def register(registry: kopf.OperatorRegistry, keepers: Keepers, office: Office) -> None:
    """Add all handlers to the registry."""

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await keepers.close()  # else kopf waits seconds for tasks that it does not know

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
