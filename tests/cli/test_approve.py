"""`ullage approve`: a yes that is written once, and every no with its reason; in files and on a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import Kubectl

from ullage_cli import approve as approving
from ullage_cli.api import ApiFailed, Where, connected
from ullage_cli.commands import run
from ullage_cli.records import RecordFolder
from ullage_operator.model import Remediation

PROPOSED: dict[str, Any] = {"spec": {"mode": "Propose"}, "phase": "Proposed"}


@pytest.fixture
async def stored(tmp_path: Path, make_record: Callable[..., Remediation]) -> RecordFolder:
    """The records of a service that `ullage up` runs, with one proposal."""
    folder = RecordFolder(tmp_path / "demo" / "remediations")
    folder.open()
    await folder.save(make_record(**PROPOSED))
    return folder


async def test_a_yes_in_a_file_is_read_by_the_run(
    stored: RecordFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, changed = approving.approve_file("demo-evict-1", tmp_path, "mara")
    assert changed
    (read,) = await stored.load()
    assert read == record
    assert (read.spec.approved, read.spec.approved_by) == (True, "mara")
    again, changed = approving.approve_file("demo-evict-1", tmp_path, "zoe")
    assert (again.spec.approved_by, changed) == ("mara", False)


def test_printed_for_people_and_for_programs(
    tmp_path: Path, make_record: Callable[..., Remediation], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demo" / "remediations" / "demo-evict-1.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(make_record(**PROPOSED).write()))
    options = ["--local", "--state-dir", str(tmp_path), "--by", "mara"]
    assert run(["approve", "demo-evict-1", *options]) == 0
    assert capsys.readouterr().out.startswith("Approved: evict 20 % on demo-0, risk 88 by classic.\n")
    assert run(["approve", "demo-evict-1", *options, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "name": "demo-evict-1",
        "namespace": "default",
        "service": "demo",
        "pod": "demo-0",
        "action": "evict",
        "phase": "Proposed",
        "approved": True,
        "approvedBy": "mara",
        "changed": False,
    }
    assert run(["approve", "nothing", *options]) == 2
    assert "no 'nothing' under" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"phase": "Expired", "message": "not carried out within 600 s"}, "expired: not carried out within 600 s"),
        ({"phase": "Succeeded"}, "has ended (Succeeded)"),
        ({"phase": "Proposed", "spec": {"mode": "Observe"}}, "decided under mode Observe"),
        ({"phase": "Running", "spec": {"mode": "Enforce"}}, "decided under mode Enforce"),
        ({"phase": "Running", "spec": {"mode": "Propose"}}, "is being carried out already"),
    ],
)
def test_what_cannot_be_approved_says_why(
    make_record: Callable[..., Remediation], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(approving.InputError, match=complaint.replace("(", r"\(").replace(")", r"\)")):
        approving.require_open(make_record(**changes))


def test_an_approval_that_runs_already_was_given(make_record: Callable[..., Remediation]) -> None:
    record = make_record(phase="Running", spec={"mode": "Propose", "approved": True, "approvedBy": "mara"})
    assert not approving.require_open(record)
    assert approving.text(record, changed=False) == "demo-evict-1 was approved before by mara; it is Running."


class Conflicting:
    """An API in which somebody else writes between reading and writing, `times` times."""

    namespace = "default"

    def __init__(self, obj: dict[str, Any], times: int) -> None:
        self.obj = obj
        self.times = times
        self.bodies: list[dict[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any] | None:
        return self.obj if "/remediations/" in path else None

    async def list(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        return []

    async def merge(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        if len(self.bodies) <= self.times:
            self.obj["metadata"]["resourceVersion"] = str(len(self.bodies) + 1)
            raise ApiFailed("conflict", 409)
        return self.obj


@pytest.mark.parametrize("times", [0, 1, approving.ATTEMPTS])
async def test_a_change_in_between_is_looked_at_again(make_record: Callable[..., Remediation], times: int) -> None:
    obj = make_record(**PROPOSED).write()
    obj["metadata"]["resourceVersion"] = "1"
    api = Conflicting(obj, times)
    if times == approving.ATTEMPTS:
        with pytest.raises(ApiFailed):
            await approving.approve_object(api, "demo-evict-1", "mara")  # type: ignore[arg-type]
    else:
        record, changed = await approving.approve_object(api, "demo-evict-1", "mara")  # type: ignore[arg-type]
        assert (record.spec.approved_by, changed) == ("mara", True)
    versions = [body["metadata"]["resourceVersion"] for body in api.bodies]
    assert versions == [str(number + 1) for number in range(len(api.bodies))]


@pytest.mark.envtest
async def test_on_an_api_server(
    kubectl: Kubectl, make_record: Callable[..., Remediation], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("waits", "Proposed"), ("late", "Expired")):
        obj = make_record(name, **{**PROPOSED, "phase": status}).write()
        obj["metadata"]["namespace"] = kubectl.namespace
        kubectl.apply(obj)
        kubectl.patch_status("remed", name, obj["status"])
    where = Where(kubeconfig=kubectl.kubeconfig, namespace=kubectl.namespace)
    async with connected(where) as api:
        _, changed = await approving.approve_object(api, "waits", "mara")
        assert changed
        spec = (kubectl.get("remed", "waits") or {})["spec"]
        assert (spec["approved"], spec["approvedBy"]) == (True, "mara")
        _, changed = await approving.approve_object(api, "waits", "zoe")
        assert not changed
        with pytest.raises(approving.InputError, match="late expired"):
            await approving.approve_object(api, "late", "mara")
        with pytest.raises(approving.InputError, match=f"no 'none' in namespace {kubectl.namespace}; there are"):
            await approving.approve_object(api, "none", "mara")
        service = {"model": {"source": "/m"}, "engine": {"kvCache": {"memory": "48Mi"}}}
        kubectl.apply(
            {
                "apiVersion": "ullage.dev/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": "demo"},
                "spec": service,
            }
        )
        with pytest.raises(approving.InputError, match="demo is an InferenceService; name one of its remediations"):
            await approving.approve_object(api, "demo", "mara")
