"""The book of objects: whatever order events and lists come in, no object ever goes back in time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.book import REMEMBERED, Book, ServiceKey

KEY = ServiceKey("prod", "web")


def obj(uid: str, version: int, service: str | None = "web") -> dict[str, Any]:
    labels = {"ullage.dev/service": service} if service else {}
    metadata = {"uid": uid, "name": f"n-{uid}", "namespace": "prod", "labels": labels, "resourceVersion": str(version)}
    return {"metadata": metadata}


def new() -> Book[tuple[str, int]]:
    return Book(lambda o: (o["metadata"]["uid"], int(o["metadata"]["resourceVersion"])))


def versions(book: Book[tuple[str, int]]) -> dict[str, int]:
    return dict(book.of(KEY))


def test_an_old_event_does_not_undo_our_own_write() -> None:
    book = new()
    book.observe(None, obj("a", 7))
    book.observe("MODIFIED", obj("a", 5))
    assert versions(book) == {"a": 7}


def test_a_list_drops_what_is_gone_and_keeps_what_is_newer() -> None:
    book = new()
    for uid, version in (("a", 9), ("b", 3)):
        book.observe("ADDED", obj(uid, version))
    book.replace(KEY, [obj("a", 8)])
    assert versions(book) == {"a": 9}


def test_objects_without_a_service_are_not_ours() -> None:
    book = new()
    book.observe("ADDED", obj("a", 1, None))
    assert book.of(KEY) == []
    assert book.of(ServiceKey("prod", "")) == []


def test_deleted_and_forgotten() -> None:
    book = new()
    book.observe("DELETED", obj("never-seen", 1))
    book.observe("ADDED", obj("a", 1))
    book.observe("DELETED", obj("a", 2))
    assert versions(book) == {}
    book.observe("ADDED", obj("b", 3))
    book.forget(KEY)
    assert versions(book) == {}


def test_a_list_that_was_begun_before_a_deletion_does_not_undo_it() -> None:
    book = new()
    for uid in "ab":
        book.observe("ADDED", obj(uid, 1))
    book.observe("DELETED", obj("a", 2))
    book.drop(KEY, "n-b")
    book.replace(KEY, [obj("a", 1), obj("b", 1)])
    assert versions(book) == {}


def test_a_list_of_everything_empties_what_has_nothing_within_its_scope_only() -> None:
    book, other = new(), ServiceKey("elsewhere", "web")
    book.observe("ADDED", obj("a", 9))
    far = obj("far", 1)
    far["metadata"]["namespace"] = "elsewhere"
    book.observe("ADDED", far)
    book.replace_all([obj("a", 3), obj("b", 3), obj("c", 3, None)], within=lambda key: key.namespace == "prod")
    assert versions(book) == {"a": 9, "b": 3}
    book.replace_all([], within=lambda key: key.namespace == "prod")
    assert versions(book) == {}
    assert [uid for uid, _ in book.of(other)] == ["far"]


def test_each_version_is_read_once_and_names_are_known() -> None:
    reads: list[str] = []
    book = Book(lambda o: reads.append(o["metadata"]["uid"]))
    for _ in range(3):
        book.observe("MODIFIED", obj("a", 4))
    assert reads == ["a"]
    assert (book.holds(KEY, "n-a"), book.holds(KEY, "n-b")) == (True, False)


def test_remembered_deletions_are_bounded() -> None:
    book = new()
    for number in range(REMEMBERED + 1):
        book.observe("DELETED", obj(str(number), 1))
    book.observe("ADDED", obj("0", 1))
    book.observe("ADDED", obj("1", 1))
    assert versions(book) == {"0": 1}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20)), max_size=20))
def test_versions_only_rise(events: list[tuple[str, int]]) -> None:
    book = new()
    before: dict[str, int] = {}
    for uid, version in events:
        book.observe("MODIFIED", obj(uid, version))
        now = versions(book)
        assert all(now[known] >= value for known, value in before.items())
        before = now
    assert before == {uid: max(v for u, v in events if u == uid) for uid, _ in events}
