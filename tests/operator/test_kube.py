"""Answers of the API server: what says that an object is not there, and what only looks like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ullage_operator.errors import ClusterError
from ullage_operator.kube import Cluster, _answer

STATUS = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
ABSENT = json.dumps({**STATUS, "message": 'services "web" not found', "details": {"name": "web", "kind": "services"}})
NOT_LOADED = json.dumps({**STATUS, "message": "the server could not find the requested resource", "details": {}})


class Answering(Cluster):
    """Gives one answer to everything."""

    async def _call(self, method: str, path: str, *rest: Any, **named: Any) -> dict[str, Any]:
        return _answer(f"{method} {path}", 404, self.api)  # type: ignore[arg-type]


async def test_a_named_404_is_absence() -> None:
    cluster = Answering(ABSENT.encode())  # type: ignore[arg-type]
    assert await cluster.get("Service", "prod", "web") is None
    await cluster.delete("Service", "prod", "web")


@pytest.mark.parametrize("body", [NOT_LOADED, "404 page not found", "[]"])
async def test_a_server_that_is_starting_does_not_make_objects_vanish(body: str) -> None:
    cluster = Answering(body.encode())  # type: ignore[arg-type]
    with pytest.raises(ClusterError):
        await cluster.get("InferenceService", "prod", "web")
    with pytest.raises(ClusterError):
        await cluster.delete("Remediation", "prod", "r")
    assert await cluster.resources("x.io/v1") == frozenset()
