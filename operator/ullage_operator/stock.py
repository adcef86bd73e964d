"""Everything of all services, listed kind by kind: what keepers take instead of asking for each object.

A start with a thousand services costs a few dozen lists instead of ten thousand calls, and the same look now and then
finds what a lost watch event hid. Absence from the lists proves nothing: an object that is not labelled may stand in
the way, so whoever misses one asks for it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ullage_operator.book import Book, ServiceKey
from ullage_operator.features import LEADER_WORKER_SET, PROMETHEUS, Features
from ullage_operator.kube import Cluster, Object
from ullage_operator.remediation import SERVICE_LABEL

GOOD_S = 60.0
"""Seconds for which an object from the lists is taken for the present one."""
Place = tuple[str, str, str]
"""Kind, namespace and name."""


class Stock:
    """Children of all services as of the last look; each is handed out once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that only rise."""
        self._clock = clock
        self._filled_at = float("-inf")
        self._children: dict[Place, Object] = {}

    @property
    def looked(self) -> bool:
        """Whether there was a look, so that the books are complete and the watches keep them so."""
        return self._filled_at > float("-inf")

    @property
    def good(self) -> bool:
        """Whether the last look was a moment ago, so that its objects are the present ones."""
        good = self._clock() - self._filled_at <= GOOD_S
        if not good:
            self._children.clear()
        return good

    async def fill(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        *,
        features: Features,
        pods: Book[Any],
        records: Book[Any],
    ) -> None:
        """List everything of `namespaces`, all where none is named.

        Raises:
            ClusterError: one list failed; what came before it is taken in.
        """
        began, children = self._clock(), dict[Place, Object]()
        scopes: Sequence[str | None] = namespaces or [None]
        for scope in scopes:
            within = _within(scope)
            pods.replace_all(await cluster.list("Pod", scope, SERVICE_LABEL), within=within)
            records.replace_all(await cluster.list("Remediation", scope, SERVICE_LABEL), within=within)
            for kind, version in child_kinds(features):
                for obj in await cluster.list(kind, scope, SERVICE_LABEL, version=version):
                    place = kind, obj["metadata"]["namespace"], obj["metadata"]["name"]
                    children[place] = {**obj, "kind": kind, "apiVersion": version}  # lists leave these out
        self._filled_at, self._children = began, children

    def take(self, kind: str, namespace: str, name: str) -> Object | None:
        """An object of the last look, once; None says nothing about whether there is one."""
        return self._children.pop((kind, namespace, name), None) if self.good else None

    def changed(self, obj: Object) -> None:
        """An event told of a child: what the last look saw of it is old now, unless it saw this version."""
        metadata = obj["metadata"]
        place = str(obj.get("kind")), metadata["namespace"], metadata["name"]
        held = self._children.get(place)
        if held is not None and held["metadata"].get("resourceVersion") != metadata.get("resourceVersion"):
            del self._children[place]


def child_kinds(features: Features) -> Iterator[tuple[str, str]]:
    """Kinds that services have as children, with the version in which to ask for them."""
    yield from (("Secret", "v1"), ("Service", "v1"), ("Deployment", "apps/v1"))
    yield "NetworkPolicy", "networking.k8s.io/v1"
    if features.disruption_budget:
        yield "PodDisruptionBudget", features.disruption_budget
    if features.leader_worker_set:
        yield "LeaderWorkerSet", LEADER_WORKER_SET
    if features.pod_monitor:
        yield "PodMonitor", PROMETHEUS
    if features.prometheus_rule:
        yield "PrometheusRule", PROMETHEUS


def _within(scope: str | None) -> Callable[[ServiceKey], bool]:
    return lambda key: scope in (None, key.namespace)
