"""Leader election: one leads, a dead one is succeeded, others' clocks do not matter, conflicts are lost gracefully."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from ullage_operator.election import GIVE_UP_S, LEASE_S, Elector
from ullage_operator.errors import ClusterError


class Leases:
    """One Lease with the API's optimistic locking. `down` makes every call fail."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.before_write: Any = None

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self._check()
        return copy.deepcopy(self.lease)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.lease is not None:
            raise ClusterError("exists", status=409)
        return self._put(obj["spec"])

    async def patch(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._check()
        if self.before_write:
            hook, self.before_write = self.before_write, None
            await hook()
        assert self.lease is not None
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, self.lease["metadata"]["resourceVersion"]):
            raise ClusterError("conflict", status=409)
        return self._put({**self.lease["spec"], **body["spec"]})

    def _put(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {"metadata": {"resourceVersion": str(self.version)}, "spec": spec}
        return self.lease

    def _check(self) -> None:
        if self.down:
            raise ClusterError("no answer")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def elector(leases: Leases, name: str, clock: Clock, wall: float = 1e9) -> Elector:
    return Elector(
        leases,  # type: ignore[arg-type]
        namespace="n",
        name="l",
        identity=name,
        wall=lambda: wall + clock.now,
        monotonic=clock,
    )


async def test_one_leads_and_a_dead_one_is_succeeded() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock, wall=5e9)
    assert await a.attempt()
    assert not await b.attempt()
    for _ in range(10):
        clock.now += LEASE_S - 1
        assert await a.attempt(), "renews"
        assert not await b.attempt()
    clock.now += LEASE_S - 0.1
    assert not await b.attempt()
    clock.now += 0.2
    assert await b.attempt()
    assert not await a.attempt()
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 1


async def test_a_released_lease_is_taken_at_once() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    await a.acquire(every_s=0)
    await a.release()
    await asyncio.wait_for(b.acquire(every_s=0), 5)
    assert (a.leading, b.leading) == (False, True)


async def test_of_two_claims_at_once_one_is_lost() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    await a.attempt()
    await a.release()

    async def interleave() -> None:
        assert await b.attempt()

    leases.before_write = interleave
    assert not await a.attempt()
    assert b.leading


async def test_a_leader_without_the_api_stops_before_others_may_begin() -> None:
    leases, clock = Leases(), Clock()
    a = elector(leases, "a", clock)
    await a.attempt()
    leases.down = True

    async def tick() -> None:
        while True:
            clock.now += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.wait_for(a.hold(every_s=0), 5)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    assert not a.leading
    assert GIVE_UP_S <= clock.now < LEASE_S


async def test_a_leader_that_was_replaced_stops() -> None:
    leases, clock = Leases(), Clock()
    a, b = elector(leases, "a", clock), elector(leases, "b", clock)
    await a.attempt()
    assert leases.lease is not None
    leases.lease["spec"]["holderIdentity"] = ""
    await b.attempt()
    await asyncio.wait_for(a.hold(every_s=0), 5)
    assert (a.leading, b.leading) == (False, True)
