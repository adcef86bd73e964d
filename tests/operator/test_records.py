"""Records on the API: written in two steps as the API demands, readable whatever state they are found in."""

from __future__ import annotations

from typing import Any

import pytest

from ullage_operator.book import Book, ServiceKey
from ullage_operator.errors import ClusterError
from ullage_operator.model import Remediation
from ullage_operator.policy import Inputs, Reason, decide
from ullage_operator.records import ClusterRecords, read_record


def api_form(record: Any, version: int = 1, **changes: Any) -> dict[str, Any]:
    obj: dict[str, Any] = record.write()
    obj["metadata"] |= {
        "uid": f"uid-{record.metadata.name}",
        "resourceVersion": str(version),
        "creationTimestamp": "2027-01-15T08:00:00Z",
        "managedFields": [{"manager": "x"}],
    }
    return {**obj, **changes}


class Store:
    """Remediation objects behind the calls of `kube.Cluster`, with the API's rules: create ignores a status."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists = 0
        self.version = 10

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[dict[str, Any]]:
        assert (kind, namespace, selector) == ("Remediation", "prod", "ullage.dev/service=web")
        self.lists += 1
        return list(self.objects.values())

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        name = obj["metadata"]["name"]
        if name in self.objects:
            raise ClusterError("exists", status=409)
        return self._put(name, {k: v for k, v in obj.items() if k != "status"})

    async def write_status(self, kind: str, namespace: str, name: str, status: Any) -> dict[str, Any]:
        old = self.objects[name]
        return self._put(name, {**old, "status": {**old.get("status", {}), **status}})

    async def delete(self, kind: str, namespace: str, name: str) -> None:
        self.objects.pop(name, None)

    def _put(self, name: str, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = {**obj["metadata"], "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.objects[name] = {**obj, "metadata": metadata}
        return self.objects[name]


@pytest.fixture
def store() -> Store:
    return Store()


def make(
    build: Any, store: Store, book: Book[Remediation | None] | None = None, *, listed: bool = False
) -> ClusterRecords:
    return ClusterRecords(
        build.service(),
        cluster=store,  # type: ignore[arg-type]
        book=book or Book(read_record),
        listed=listed,
    )


async def test_saved_loaded_and_deleted(build: Any, store: Store) -> None:
    records = make(build, store)
    record = build.record(started_at=-1)
    await records.load()
    await records.save(record)
    assert await make(build, store).load() == await records.load()
    (loaded,) = await records.load()
    assert (loaded.spec, loaded.status) == (record.spec, record.status)
    owner = store.objects[record.metadata.name]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "uid-web"
    await records.delete(record.metadata.name)
    assert await records.load() == []


async def test_an_approval_is_not_overwritten(build: Any, store: Store) -> None:
    records = make(build, store)
    record = build.record(phase="Proposed")
    await records.save(record)
    store.objects[record.metadata.name]["spec"]["approved"] = True
    await records.save(build.record(phase="Approved"))
    assert store.objects[record.metadata.name]["spec"]["approved"] is True


async def test_a_record_created_before_an_answer_was_lost(build: Any, store: Store) -> None:
    record = build.record(started_at=-1)
    await store.create(record.write())
    await make(build, store).save(record)
    assert store.objects[record.metadata.name]["status"]["phase"] == "Running"


async def test_listed_once_and_not_at_all_where_everything_was(build: Any, store: Store) -> None:
    records = make(build, store)
    for _ in range(3):
        await records.load()
    assert store.lists == 1
    await make(build, store, listed=True).load()
    assert store.lists == 1


async def test_events_bring_what_others_write(build: Any, store: Store) -> None:
    book = Book(read_record)
    records = make(build, store, book)
    record = build.record(phase="Proposed")
    await records.save(record)
    approved = api_form(build.record(phase="Proposed", approved=True), version=99)
    book.observe("MODIFIED", approved)
    (loaded,) = await records.load()
    assert loaded.spec.approved


def test_a_record_cut_off_before_its_status_was_written_ends_unsent(build: Any) -> None:
    """Running is written before anything is sent, so an object without a status was never acted on."""
    obj = api_form(build.record(service=build.service()))
    del obj["status"]
    record = read_record(obj)
    assert record is not None
    inputs = Inputs(service=build.service(), observations=(build.observation(90),), records=(record,))
    decision = decide(inputs, build.now)
    assert (decision.reason, decision.execute) == (Reason.OVERDUE, None)


@pytest.mark.parametrize(
    "damage",
    [{"spec": {}}, {"spec": None}, {"status": {"phase": "Nonsense"}}, {"kind": "Pod"}, {"metadata": {"name": ""}}],
)
def test_an_unreadable_record_is_left_out_and_named(
    build: Any, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_record(api_form(build.record(), **damage)) is None
    assert "is not readable" in caplog.text


def test_fields_of_a_newer_version_do_no_harm(build: Any) -> None:
    obj = api_form(build.record())
    obj["spec"]["future"] = obj["status"]["future"] = {"a": 1}
    assert read_record(obj) is not None


def test_keys_show_as_namespace_and_name() -> None:
    assert str(ServiceKey("prod", "web")) == "prod/web"
