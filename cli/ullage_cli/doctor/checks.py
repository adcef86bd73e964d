"""All checks, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import checks_install as install
from . import checks_network as network
from . import checks_service as service
from .facts import Facts, ServiceFacts
from .findings import Finding, info

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    install.check_server,
    install.check_crds,
    install.check_operator,
    install.check_rights,
    install.check_endpoint,
    install.check_webhook,
)
SERVICE_CHECKS: tuple[Callable[[Facts, ServiceFacts], Iterator[Finding]], ...] = (
    service.check_status,
    service.check_pods,
    service.check_labels,
    network.check_network,
    service.check_credentials,
    service.check_agents,
    service.check_action_ports,
    service.check_remediations,
    service.check_monitoring,
)


def examine(facts: Facts) -> list[Finding]:
    """Everything that was found."""
    found = [finding for check in CHECKS for finding in check(facts)]
    for one in facts.services:
        found += [finding for check in SERVICE_CHECKS for finding in check(facts, one)]
    if not facts.services and all(facts.crds.values()):
        found.append(info("InferenceServices", "there are none here; -A looks into all namespaces"))
    return found
