"""`Scaler` on the Kubernetes API: the scale subresource of the service, labels and annotations of its pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ullage_operator.book import ServiceKey
from ullage_operator.errors import ClusterError
from ullage_operator.fleet import DELETION_COST, TRAFFIC_LABEL, TRAFFIC_OFF, TRAFFIC_ON, Pod
from ullage_operator.kube import Cluster
from ullage_operator.observation import Observation

FIRST_TO_GO = -1_000_000
"""Deletion cost of an engine that was chosen to leave: below what any other pod has."""


@dataclass(frozen=True, slots=True)
class ClusterScaler:
    """Scales one service."""

    key: ServiceKey
    cluster: Cluster

    async def set_replicas(self, *, expected: int, wanted: int) -> None:
        """Write `spec.replicas.desired`, unless somebody else changed it meanwhile.

        Raises:
            ClusterError: refused, not answered, or another number is wanted now.
        """
        obj = await self.cluster.get("InferenceService", *self.key)
        if obj is None:
            raise ClusterError(f"InferenceService/{self.key.name} is gone", status=404)
        replicas = obj["spec"].get("replicas") or {}
        present = replicas.get("desired") or replicas.get("min", 1)
        if present == wanted:
            return
        if present != expected:
            raise ClusterError(f"{present} replicas are wanted now, not {expected}", status=409)
        version = obj["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": wanted}}
        await self.cluster.patch("InferenceService", *self.key, body, subresource="scale")

    async def set_serving(self, pod: str, *, serving: bool) -> None:
        """Put a pod into the Service or take it out; one that is gone is no error."""
        metadata = {
            "labels": {TRAFFIC_LABEL: TRAFFIC_ON if serving else TRAFFIC_OFF},
            "annotations": {DELETION_COST: None if serving else str(FIRST_TO_GO)},
        }
        try:
            await self.cluster.patch("Pod", self.key.namespace, pod, {"metadata": metadata})
        except ClusterError as error:
            if error.status != 404:
                raise

    async def rank(self, pods: Iterable[Pod], observations: Sequence[Observation]) -> None:
        """Tell the cluster which engines hold the least warm cache, before somebody else's wish removes some."""
        warm = {o.target.uid: o.warm_blocks for o in observations}
        for pod in pods:
            if pod.serving and pod.uid in warm:
                annotations = {DELETION_COST: str(warm[pod.uid])}
                await self.cluster.patch(
                    "Pod", self.key.namespace, pod.name, {"metadata": {"annotations": annotations}}
                )
