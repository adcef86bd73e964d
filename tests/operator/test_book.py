"""The book of objects: whatever order events and lists come in, no object ever goes back in time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.book import Book, ServiceKey

KEY = ServiceKey("prod", "web")


def obj(uid: str, version: int, service: str | None = "web") -> dict[str, Any]:
    labels = {"ullage.dev/service": service} if service else {}
    return {"metadata": {"uid": uid, "namespace": "prod", "labels": labels, "resourceVersion": str(version)}}


def versions(book: Book) -> dict[str, int]:
    return {o["metadata"]["uid"]: int(o["metadata"]["resourceVersion"]) for o in book.of(KEY)}


def test_an_old_event_does_not_undo_our_own_write() -> None:
    book = Book()
    book.observe(None, obj("a", 7))
    book.observe("MODIFIED", obj("a", 5))
    assert versions(book) == {"a": 7}


def test_a_list_drops_what_is_gone_and_keeps_what_is_newer() -> None:
    book = Book()
    for uid, version in (("a", 9), ("b", 3)):
        book.observe("ADDED", obj(uid, version))
    book.replace(KEY, [obj("a", 8)])
    assert versions(book) == {"a": 9}


def test_objects_without_a_service_are_not_ours() -> None:
    book = Book()
    book.observe("ADDED", obj("a", 1, None))
    assert book.of(KEY) == []
    assert book.of(ServiceKey("prod", "")) == []


def test_deleted_and_forgotten() -> None:
    book = Book()
    book.observe("DELETED", obj("never-seen", 1))
    book.observe("ADDED", obj("a", 1))
    book.observe("DELETED", obj("a", 2))
    assert versions(book) == {}
    book.observe("ADDED", obj("b", 3))
    book.forget(KEY)
    assert versions(book) == {}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20)), max_size=20))
def test_versions_only_rise(events: list[tuple[str, int]]) -> None:
    book = Book()
    before: dict[str, int] = {}
    for uid, version in events:
        book.observe("MODIFIED", obj(uid, version))
        now = versions(book)
        assert all(now[known] >= value for known, value in before.items())
        before = now
    assert before == {uid: max(v for u, v in events if u == uid) for uid, _ in events}
