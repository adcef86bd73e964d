"""`ullage top`: rows from objects and metrics, the picture on a fake terminal, keys, and local services."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ullage_cli.api import ApiFailed, Where
from ullage_cli.commands import run
from ullage_cli.errors import BrokenLoop
from ullage_cli.exposition import AgentMetrics
from ullage_cli.running import announced, read_running
from ullage_cli.top.fleet import EngineRow, Fleet, Trail, action_row, engine_row, ordered, service_row
from ullage_cli.top.keys import pressed
from ullage_cli.top.loop import Viewer
from ullage_cli.top.picture import frame, plain, pool_bar
from ullage_cli.top.sources import ClusterSource, LocalSource, last_change
from ullage_cli.view import ASCII, UNICODE
from ullage_operator.manifest import load_manifest
from ullage_operator.model import Remediation

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "smollm2.yaml"
BUSY = AgentMetrics(
    engine="ullage",
    model="m",
    risk=91.0,
    terms={"classic": 91.0, "forecast": 20.0},
    memory={"total": 100.0, "hot": 60.0, "reclaimable": 20.0},
    exhaustion_s=12.0,
    running=5.0,
    waiting=2.0,
    liveness="working",
    sources={"engine": True, "device": False},
)


def service(name: str, risk: float | None, engines: Sequence[EngineRow] = ()) -> Any:
    obj = {
        "metadata": {"namespace": "prod", "name": name},
        "spec": {"replicas": {"min": 1}, "remediation": {"mode": "Enforce", "riskThreshold": 80}},
        "status": {"phase": "Ready", "readyReplicas": 1, **({"risk": {"score": risk, "term": "host"}} if risk else {})},
    }
    return service_row(obj, engines)


def drawn(fleet: Fleet, width: int = 100, height: int = 24) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    trail = Trail()
    trail.enter(fleet)
    console.print(frame(fleet, trail, order="risk", width=width, height=height))
    return out.getvalue()


def test_an_engines_own_word_comes_before_the_status() -> None:
    row = service("a", 40.0, [EngineRow(name="a-0", metrics=BUSY)])
    assert (row.risk, row.term, row.exhaustion_s) == (91.0, "classic", 12.0)
    unread = service("a", 40.0, [EngineRow(name="a-0", problem="forbidden")])
    assert (unread.risk, unread.term) == (40.0, "host")


def test_what_is_wrong_with_an_engine_is_named() -> None:
    assert engine_row("e", "no answer").problem == "no answer"
    assert engine_row("e", BUSY).problem == ""
    blind = replace(BUSY, sources={"engine": False})
    assert "cannot read its engine" in engine_row("e", blind).problem
    broken = replace(BUSY, violations=(("vllm:usage", "missing"),))
    assert engine_row("e", broken).problem == "vllm:usage is missing"


def test_orders() -> None:
    waiting = service("c", 10.0, [EngineRow(name="c-0", metrics=replace(BUSY, risk=10.0, waiting=9.0))])
    rows = [service("b", None), waiting, service("a", 50.0)]
    assert [row.name for row in ordered(rows, "risk")] == ["a", "c", "b"]
    assert [row.name for row in ordered(rows, "name")] == ["a", "b", "c"]
    assert ordered(rows, "waiting")[0].name == "c"


def test_the_picture_shows_services_engines_and_remediations(effective: Remediation) -> None:
    record = effective.write()
    actions = (action_row(record, last_change(record)),)
    rows = (service("a", 40.0, [EngineRow(name="a-0", metrics=BUSY)]),)
    picture = drawn(Fleet(at=last_change(record) + 30, source="here", services=rows, actions=actions))
    assert "prod/a" in picture and "a-0" in picture
    assert "91 classic" in picture and "12 s" in picture
    assert "█" * 12 + "▒" * 4 + "·" * 4 in picture
    assert "30 s ago" in picture and "Succeeded" in picture


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_picture_fits_the_terminal(width: int) -> None:
    rows = tuple(service(f"service-{i}", float(i), [EngineRow(name="e", metrics=BUSY)]) for i in range(40))
    lines = drawn(Fleet(at=0.0, source="here", services=rows), width=width, height=20).splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= width for line in lines)
    assert any("more lines" in line for line in lines)


def test_parts_of_a_pool_that_exist_are_seen() -> None:
    crowded = AgentMetrics(memory={"total": 1000.0, "hot": 998.0, "reclaimable": 1.0})
    assert len(pool_bar(crowded, UNICODE, 20).plain) == 20
    barely = AgentMetrics(memory={"total": 1000.0, "hot": 1.0, "reclaimable": 1.0})
    assert pool_bar(barely, ASCII, 10).plain == "#=........"
    assert pool_bar(AgentMetrics(), ASCII, 10).plain == "–"


def test_columns_for_a_pipe() -> None:
    rows = (service("a", 40.0, [EngineRow(name="a-0", problem="Pending")]), service("b", None))
    text = plain(Fleet(at=0.0, source="here", services=rows))
    assert "! a-0: Pending" in text
    assert "prod/b" in text
    assert plain(Fleet(at=0.0, source="here")) == "no services: here"


class Scripted:
    """A source that gives what it is told, and an error where it is told None."""

    def __init__(self, *fleets: Fleet | None) -> None:
        self.fleets = list(fleets)

    async def read(self) -> Fleet:
        found = self.fleets.pop(0) if len(self.fleets) > 1 else self.fleets[0]
        if found is None:
            raise BrokenLoop("the server is gone")
        return found


def viewer(source: Scripted, out: io.StringIO) -> Viewer:
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    return Viewer(source=source, console=console, interval_s=3600.0, clock=lambda: 0.0)


async def test_keys_sort_pause_and_quit() -> None:
    out = io.StringIO()
    view = viewer(Scripted(Fleet(at=0.0, source="here", services=(service("a", 5.0),))), out)
    keys: asyncio.Queue[str] = asyncio.Queue()
    for key in "s q":
        keys.put_nowait(key)
    await asyncio.wait_for(view.run(keys), 20)
    assert (view.order, view.paused) == ("name", True)
    assert "by name" in out.getvalue() and "(paused)" in out.getvalue()


async def test_a_source_that_fails_for_once_leaves_what_was_known() -> None:
    view = viewer(Scripted(None), io.StringIO())
    view.fleet = Fleet(at=0.0, source="here", services=(service("a", 5.0),))
    await view.take()
    assert view.fleet.problem == "the server is gone"
    assert "the server is gone" in drawn(view.fleet)
    assert view.fleet.services


async def test_a_source_that_never_worked_ends_it() -> None:
    with pytest.raises(BrokenLoop):
        await viewer(Scripted(None), io.StringIO()).run(asyncio.Queue())


async def test_keys_come_from_a_terminal_one_by_one() -> None:
    ours, theirs = pty.openpty()
    try:
        with pressed(theirs) as keys:
            os.write(ours, b"sq")
            assert [await asyncio.wait_for(keys.get(), 20) for _ in range(2)] == ["s", "q"]
    finally:
        os.close(ours)
        os.close(theirs)


async def test_no_terminal_no_keys(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pressed(file.fileno()) as keys:
        assert keys.empty()


def test_trails_are_bounded_and_forget_what_is_gone() -> None:
    trail = Trail(length=3)
    for risk in range(5):
        trail.enter(Fleet(at=0.0, source="", services=(service("a", float(risk + 1)),)))
    assert trail.risks == {("prod", "a"): [3.0, 4.0, 5.0]}
    trail.enter(Fleet(at=0.0, source=""))
    assert trail.risks == {}


async def test_local_services_are_found_by_their_state(tmp_path: Path, effective: Remediation) -> None:
    import yaml

    state = tmp_path / "smollm2"
    (state / "remediations").mkdir(parents=True)
    (state / "remediations" / "demo-evict-1.yaml").write_text(yaml.safe_dump(effective.write()))
    (state / "remediations" / "torn.yaml").write_text("kind: [")
    with announced(state, load_manifest(SAMPLE), [("smollm2-0", "http://127.0.0.1:9/metrics")]):
        fleet = await LocalSource(tmp_path, clock=lambda: 1.0).read()
    assert [row.name for row in fleet.services] == ["smollm2"]
    assert fleet.services[0].phase == "Unreachable"
    assert [row.phase for row in fleet.actions] == ["Succeeded"]
    assert read_running(tmp_path) == []


def test_what_a_killed_run_left_is_not_believed(tmp_path: Path) -> None:
    state = tmp_path / "gone"
    state.mkdir()
    content = {"pid": 2**22 + 1, "service": {"x": 1}, "replicas": [1]}
    (state / "running.json").write_text(json.dumps(content))
    assert read_running(tmp_path) == []
    (state / "running.json").write_text("{")
    assert read_running(tmp_path) == []


def test_once_prints_bare_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--agent", "http://127.0.0.1:9", "--once"]) == 0
    assert "cannot be reached" in capsys.readouterr().out
    assert run(["top", "--agent", "http://127.0.0.1:9", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["services"][0]["engines"][0]["problem"]


def test_a_missing_state_folder_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["top", "--local", "--state-dir", str(tmp_path / "no"), "--once"]) == 2
    assert capsys.readouterr().err.startswith("error: --state-dir")


class FakeApi:
    """An API server with one service of two pods; `refused` is what asking an agent gives."""

    server, namespace = "https://api", "prod"

    def __init__(self, refused: str | None) -> None:
        self.refused = refused

    async def get(self, path: str) -> dict[str, Any] | None:
        return {"items": []} if path.endswith("inferenceservices") else None

    async def list(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        if path.endswith("pods"):
            labels = {"ullage.dev/service": "web"}
            return [
                {"metadata": {"name": name, "namespace": "prod", "labels": labels}, "status": {"podIP": ip}}
                for name, ip in (("web-1", "10.0.0.1"), ("web-2", None))
            ]
        if path.endswith("inferenceservices"):
            status = {"phase": "Ready", "readyReplicas": 1, "risk": {"score": 33, "term": "classic"}}
            return [{"metadata": {"name": "web", "namespace": "prod"}, "spec": {}, "status": status}]
        return []

    async def text(self, path: str) -> str:
        if self.refused:
            raise ApiFailed(f"GET {path}: {self.refused}", 403)
        return (
            'ullage_agent_info{version="1"} 1.0\nllm_oom_risk_score 77.0\nllm_oom_risk_term_score{term="host"} 77.0\n'
        )


async def test_a_cluster_is_read_through_its_api_server() -> None:
    api: Any = FakeApi(None)
    fleet = await ClusterSource(api, Where()).read()
    (service_,) = fleet.services
    assert (service_.risk, service_.term, service_.ready) == (77.0, "host", 1)
    assert [engine.problem for engine in service_.engines] == ["", "Pending"]


async def test_who_may_not_ask_agents_sees_the_statuses() -> None:
    api: Any = FakeApi("HTTP 403: forbidden")
    fleet = await ClusterSource(api, Where()).read()
    (service_,) = fleet.services
    assert (service_.risk, service_.term) == (33, "classic")
    assert service_.engines[0].problem == ""
    assert "pods/proxy" in fleet.problem
