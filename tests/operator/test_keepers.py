"""Keepers against a cluster in memory: begun once, woken when needed, never ended by a failure."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ullage_operator.book import ServiceKey
from ullage_operator.budget import Budget
from ullage_operator.desired import Features, Images
from ullage_operator.errors import ClusterError
from ullage_operator.keepers import Keepers
from ullage_operator.metrics import Metrics
from ullage_operator.office import Office
from ullage_operator.pace import Pace

KEY = ServiceKey("prod", "web")


@pytest.fixture
def office(cluster: Any, session: Any, build: Any) -> Office:
    return Office(
        cluster=cluster,
        session=session,
        images=Images(engine="e", agent="a"),
        features=Features(),
        metrics=Metrics(CollectorRegistry()),
        clock=lambda: build.now,
        limiter=asyncio.Semaphore(4),
        pace=Pace(0.01),
        budget=Budget(4),
    )


@pytest.fixture
async def keepers(office: Office) -> AsyncIterator[Keepers]:
    made = Keepers(office)
    yield made
    await made.close()


def stored(build: Any, **metadata: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = build.manifest()
    manifest["metadata"] |= metadata
    return manifest


def applied(cluster: Any) -> bool:
    return "Deployment" in cluster.written and "InferenceService.status" in cluster.written


async def test_a_service_is_kept_once(cluster: Any, keepers: Keepers, build: Any) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    for _ in range(3):
        keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    assert cluster.written.count("Deployment") == 1


@pytest.mark.parametrize("failure", [ClusterError("HTTP 500", status=500), RuntimeError("a bug")])
async def test_a_patrol_finds_what_no_event_told_of(
    cluster: Any, keepers: Keepers, build: Any, failure: Exception
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    cluster.failures.append(failure)
    patrol = asyncio.create_task(keepers.patrol(["prod"], every_s=0.01))
    await cluster.until(lambda: applied(cluster))
    patrol.cancel()
    await asyncio.gather(patrol, return_exceptions=True)


async def test_a_patrol_that_is_told_of_missed_events_looks_at_once(cluster: Any, keepers: Keepers) -> None:
    patrol = asyncio.create_task(keepers.patrol(["prod"], every_s=3600.0))
    for looks in (1, 2):
        keepers.look_again()
        async with asyncio.timeout(20):
            while cluster.lists.count("Pod") < looks:  # noqa: ASYNC110  lists are counted, not signalled
                await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert cluster.lists.count("Pod") == 2, "it is told once, it looks once"
    patrol.cancel()
    await asyncio.gather(patrol, return_exceptions=True)


@pytest.mark.parametrize("failure", [ClusterError("HTTP 500", status=500), RuntimeError("a bug")])
async def test_a_failed_round_is_tried_again(
    cluster: Any, keepers: Keepers, build: Any, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    cluster.failures.append(failure)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    assert str(failure) in caplog.text


async def test_a_new_generation_and_a_child_s_change_wake(cluster: Any, keepers: Keepers, build: Any) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: cluster.written.count("Deployment") == 1)
    changed = stored(build, generation=4)
    changed["spec"]["replicas"] = {"min": 2, "max": 2}
    cluster.objects["InferenceService", "web"] = changed
    keepers.service_seen("MODIFIED", changed)
    await cluster.until(lambda: cluster.written.count("Deployment") == 2)
    assert cluster.objects["Deployment", "web"]["spec"]["replicas"] == 2
    gone = cluster.objects.pop(("Service", "web"))
    keepers.child_seen("DELETED", gone)
    await cluster.until(lambda: ("Service", "web") in cluster.objects)


async def test_closing_ends_a_keeper_that_is_woken_in_the_same_moment(cluster: Any, office: Office, build: Any) -> None:
    office.pace = Pace(60.0)
    keepers = Keepers(office)
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    await asyncio.sleep(0.1)  # it waits for its next round
    keepers.child_seen("DELETED", cluster.objects["Deployment", "web"])
    async with asyncio.timeout(10):
        await keepers.close()


EVENT: ContextVar[dict[str, Any]] = ContextVar("EVENT")


async def test_a_keeper_does_not_hold_on_to_the_event_that_began_it(cluster: Any, keepers: Keepers, build: Any) -> None:
    """kopf keeps the event in a context variable, which tasks begun in its handlers inherit: 60 kB for each service."""
    cluster.objects["InferenceService", "web"] = stored(build)
    held: list[bool] = []
    apply = cluster.apply

    async def applied_within(obj: dict[str, Any]) -> Any:
        held.append(EVENT in copy_context())
        return await apply(obj)

    cluster.apply = applied_within
    EVENT.set(stored(build))
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    assert held
    assert not any(held)


async def test_a_look_at_everything_saves_the_single_questions(
    cluster: Any, keepers: Keepers, office: Office, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    await keepers.close()
    cluster.gets.clear()
    cluster.written.clear()
    again = Keepers(office)
    assert await again.look(["prod"])
    lists = cluster.lists.count("Pod")
    again.service_seen(None, cluster.objects["InferenceService", "web"])
    before = _sweeps(office)
    async with asyncio.timeout(20):
        while _sweeps(office) < before + 2:  # noqa: ASYNC110  sweeps are counted, not signalled
            await asyncio.sleep(0.01)
    await again.close()
    assert cluster.gets == []
    assert cluster.lists.count("Pod") == lists
    assert not {"Deployment", "Service", "Secret"} & set(cluster.written)


async def test_a_look_is_not_believed_over_a_later_event(
    cluster: Any, keepers: Keepers, office: Office, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    await keepers.close()
    again = Keepers(office)
    assert await again.look(["prod"])
    drifted = cluster.objects["Deployment", "web"]
    drifted["spec"]["replicas"] = 7
    drifted["metadata"]["resourceVersion"] = "99"
    cluster.written.clear()
    again.child_seen("MODIFIED", drifted)
    again.service_seen(None, cluster.objects["InferenceService", "web"])
    await cluster.until(lambda: "Deployment" in cluster.written)
    await again.close()
    assert cluster.objects["Deployment", "web"]["spec"]["replicas"] == 1


async def test_an_event_about_what_we_wrote_ourselves_is_no_news(
    cluster: Any, keepers: Keepers, office: Office, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    cluster.gets.clear()
    keepers.child_seen("ADDED", cluster.objects["Deployment", "web"])
    before = _sweeps(office)
    async with asyncio.timeout(20):
        while _sweeps(office) < before + 2:  # noqa: ASYNC110  sweeps are counted, not signalled
            await asyncio.sleep(0.01)
    assert cluster.gets == []


async def test_a_resync_repairs_what_no_event_told_of(
    cluster: Any, keepers: Keepers, office: Office, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    cluster.objects["NetworkPolicy", "web"]["spec"]["ingress"] = [{}]
    patrol = asyncio.create_task(keepers.patrol(["prod"], every_s=0.01))
    await cluster.until(lambda: cluster.written.count("NetworkPolicy") == 2)
    patrol.cancel()
    await asyncio.gather(patrol, return_exceptions=True)
    assert cluster.objects["NetworkPolicy", "web"]["spec"]["ingress"] != [{}]


async def test_a_deleted_service_s_keeper_ends_and_one_that_comes_back_is_kept_again(
    cluster: Any, keepers: Keepers, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    gone = cluster.objects.pop(("InferenceService", "web"))
    cluster.objects.clear()
    keepers.service_seen("DELETED", gone)
    await _until_ended(keepers)
    cluster.written.clear()
    again = stored(build, uid="uid-2")
    cluster.objects["InferenceService", "web"] = again
    keepers.service_seen("ADDED", again)
    await cluster.until(lambda: applied(cluster))
    assert cluster.objects["Deployment", "web"]["metadata"]["ownerReferences"][0]["uid"] == "uid-2"


async def test_credentials_are_kept_over_passes(cluster: Any, keepers: Keepers, build: Any) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    secret = copy.deepcopy(cluster.objects["Secret", "web-agent"])
    keepers.child_seen("DELETED", cluster.objects.pop(("Service", "web")))
    await cluster.until(lambda: ("Service", "web") in cluster.objects)
    assert cluster.objects["Secret", "web-agent"]["data"] == secret["data"]
    spoilt = cluster.objects["Secret", "web-agent"]
    spoilt["data"]["tls.key"] = ""
    spoilt["metadata"]["resourceVersion"] = "99"
    keepers.child_seen("MODIFIED", spoilt)
    await cluster.until(lambda: cluster.written.count("Secret") == 2)
    renewed = cluster.objects["Secret", "web-agent"]["data"]
    assert renewed["tls.crt"] != secret["data"]["tls.crt"]
    assert renewed["token"] == secret["data"]["token"]


async def test_an_invalid_spec_stops_changes_but_not_the_guard(
    cluster: Any, keepers: Keepers, office: Office, build: Any
) -> None:
    cluster.objects["InferenceService", "web"] = stored(build)
    keepers.service_seen("ADDED", stored(build))
    await cluster.until(lambda: applied(cluster))
    invalid = stored(build, generation=4)
    invalid["spec"]["replicas"] = {"min": 1, "max": 1, "desired": 2}
    cluster.objects["InferenceService", "web"] = invalid
    keepers.service_seen("MODIFIED", invalid)
    await cluster.until(lambda: invalid.get("status", {}).get("phase") == "Invalid")
    before = _sweeps(office)
    cluster.written.clear()
    async with asyncio.timeout(20):
        while _sweeps(office) < before + 3:  # noqa: ASYNC110  sweeps are counted, not signalled
            await asyncio.sleep(0.01)
    assert cluster.written == []
    assert cluster.objects["Deployment", "web"]["spec"]["replicas"] == 1


def _sweeps(office: Office) -> float:
    return office.metrics.registry.get_sample_value("ullage_operator_sweep_seconds_count") or 0.0


async def _until_ended(keepers: Keepers) -> None:
    tasks = [t for t in asyncio.all_tasks() if t.get_name() == f"keeper {KEY}"]
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    await asyncio.sleep(0)
