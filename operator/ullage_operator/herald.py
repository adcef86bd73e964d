"""Tells of one service's decisions and troubles: Events beside the object, and log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ullage_operator.errors import ClusterError
from ullage_operator.events import decision_event, event
from ullage_operator.kube import Cluster, Object
from ullage_operator.logs import Named
from ullage_operator.metrics import Metrics
from ullage_operator.model import InferenceService
from ullage_operator.policy import Decision


class Herald:
    """Tells of what is new, without holding anybody up."""

    def __init__(
        self, logger: logging.Logger, name: str, *, cluster: Cluster, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.log = Named(logger, name)
        self._cluster = cluster
        self._metrics = metrics
        self._clock = clock
        self._last: tuple[str, str] | None = None
        self._posts: set[asyncio.Task[None]] = set()

    def decided(self, service: InferenceService, decision: Decision) -> None:
        """Tell of a decision, unless it is to go on holding for the same reason."""
        previous, self._last = self._last, (decision.verdict, decision.reason.value)
        if decision.verdict == "Hold" and (previous is None or previous[1] == decision.reason.value):
            return
        self.log.info("%s: %s: %s", decision.verdict, decision.reason.value, decision.message)
        self._post_soon(decision_event(service, decision, now=self._clock()))

    def trouble(self, service: InferenceService, reason: str, message: str) -> None:
        """Tell of what a person must put right."""
        self.log.warning("%s: %s", reason, message)
        self._post_soon(event(service, kind="Warning", reason=reason, message=message, now=self._clock()))

    async def close(self) -> None:
        """Wait for what is being told."""
        await asyncio.gather(*self._posts, return_exceptions=True)

    def _post_soon(self, told: Object) -> None:
        """Events are news: the next sweep does not wait for them."""
        task = asyncio.create_task(self._post(told))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _post(self, told: Object) -> None:
        try:
            await self._cluster.create(told)
        except ClusterError as error:  # an Event is news, not a record; the sweep goes on
            self._metrics.errors.labels(kind="cluster").inc()
            self.log.warning("event not written: %s", error)
