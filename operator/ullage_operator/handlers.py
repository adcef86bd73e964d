"""kopf's side: watch events in, keepers woken. Only `watches`, which runs kopf, knows it too.

Only `on.event` handlers: they leave no finalizers and no annotations on anybody's objects, and kopf delivers all
existing objects through them at the start, so creating, changing and resuming look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from ullage_operator.keepers import Keepers
from ullage_operator.model import GROUP, VERSION
from ullage_operator.office import Office
from ullage_operator.remediation import SERVICE_LABEL

CHILDREN = (
    ("apps", "v1", "deployments"),
    ("", "v1", "services"),
    ("", "v1", "secrets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
)
BUDGETS = "policy", "poddisruptionbudgets"
"""In whichever version the cluster serves."""
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io", "v1", "leaderworkersets"
"""Where the cluster has them when the watches begin."""
Tell = Callable[..., None]
"""Has a function called, whose arguments follow, where keepers live."""


def register(
    registry: kopf.OperatorRegistry, keepers: Keepers, office: Office, *, tell: Tell, ending: Callable[[], None]
) -> None:
    """Add all handlers to the registry. They run in kopf's thread; `ending` hears that kopf stops."""

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        ending()

    @kopf.on.event(GROUP, VERSION, "inferenceservices", registry=registry)
    async def service_event(event: Mapping[str, Any], **_: Any) -> None:
        tell(keepers.service_seen, event["type"], dict(event["object"]))

    several_pods = (LEADER_WORKER_SETS,) if office.features.leader_worker_set else ()
    for names in (*CHILDREN, BUDGETS, *several_pods):
        kopf.on.event(*names, registry=registry, id=f"child-{names[-1]}", labels=LABELLED)(
            _telling(tell, keepers.child_seen)
        )
    for group, version, plural, book in (
        ("", "v1", "pods", office.pods),
        (GROUP, VERSION, "remediations", office.records),
    ):
        kopf.on.event(group, version, plural, registry=registry, id=f"book-{plural}", labels=LABELLED)(
            _telling(tell, book.observe)
        )


LABELLED = {SERVICE_LABEL: kopf.PRESENT}


def settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only what is labelled, stand alone, exit quickly, no network surprises."""
    result = kopf.OperatorSettings()
    for names in (*CHILDREN, BUDGETS, LEADER_WORKER_SETS, ("", "v1", "pods"), (GROUP, VERSION, "remediations")):
        result.watching.label_selectors[names] = SERVICE_LABEL
    result.watching.connect_timeout = 10.0
    result.watching.server_timeout = 300  # whole seconds: the API server reads nothing else
    result.peering.standalone = True
    result.posting.enabled = False
    result.process.ultimate_exiting_timeout = None  # else it kills the process when it cannot end
    return result


def _telling(tell: Tell, receive: Callable[[str | None, Any], None]) -> Any:
    async def handler(event: Mapping[str, Any], **_: Any) -> None:
        tell(receive, event["type"], event["object"])

    return handler
