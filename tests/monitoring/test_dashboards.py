"""Dashboards: files as rendered, and every query answered by a real Prometheus that holds demo data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boards
import pytest
from cluster import eventually
from demo import DemoServer
from mixin.__main__ import main
from stack import Prometheus

TAGS = {"namespace": "chat", "ullage_service": "web", "pod": "web-1"}
OPERATOR = {"namespace": "ullage-system", "pod": "ullage-operator-1"}
CHOSEN = {"namespace": "chat", "service": "web", "pod": "web-1"}
SCRAPES = 8
"""Scrapes after which a rate over the shortest window has two samples, and recording rules have run on them."""
QUERIES = [(board, query) for board in boards.BOARDS for panel in boards.panels(board) for query in panel.queries]


def configuration(address: str, rules: Path) -> dict[str, Any]:
    """Scrape the demo once a second; the rules as they are, evaluated as often."""
    jobs = [("agent", TAGS), ("engine", TAGS), ("operator", OPERATOR)]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": name, "metrics_path": f"/{name}", "static_configs": [{"targets": [address], "labels": labels}]}
            for name, labels in jobs
        ],
    }


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the demo for a while."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "rules.yaml"
    assert main(["--rules", str(rules)]) == 0
    with DemoServer() as server, Prometheus(folder, configuration(server.address, rules)) as running:
        seen = f'count_over_time(ullage_operator_leader{{namespace="ullage-system"}}[1h]) >= {SCRAPES}'
        eventually(f"{SCRAPES} scrapes", lambda: running.instant(seen))
        eventually("recorded series", lambda: running.instant("service:llm_prefix_hit:ratio_rate15m_avg1d"))
        yield running


@pytest.mark.parametrize(("board", "query"), QUERIES, ids=[f"{b.stem}-{i}" for i, (b, _) in enumerate(QUERIES)])
def test_every_query_has_an_answer(prometheus: Prometheus, board: Path, query: str) -> None:
    namespace = "ullage-system" if board.stem == "ullage-operator" else "chat"
    assert boards.has_data(prometheus, query, {**CHOSEN, "namespace": namespace}), query
    assert boards.has_data(prometheus, query, {}), query


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda path: path.stem)
def test_every_variable_offers_something(prometheus: Prometheus, board: Path) -> None:
    found = {name: boards.choices(prometheus, query, {}) for name, query in boards.variables(board)}
    offered = {"namespace": "chat", "service": "web", "pod": "web-1"}
    if board.stem == "ullage-operator":
        offered = {"namespace": "ullage-system"}
    assert {name: [offered[name]] for name in found} == found


def test_every_mark_has_something_to_mark(prometheus: Prometheus) -> None:
    marks = [query for board in boards.BOARDS for query in boards.annotations(board)]
    assert len(marks) == 2
    for query in marks:
        assert boards.has_data(prometheus, query, {}), query


def test_a_query_without_data_is_noticed(prometheus: Prometheus) -> None:
    assert not boards.has_data(prometheus, "llm_of_another_name", {})
    assert not boards.has_data(prometheus, 'llm_oom_risk_score{pod=~"$pod"}', {"pod": "web-2"})


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda path: path.stem)
def test_dashboards_can_be_used(board: Path) -> None:
    content = boards.load(board)
    ids = [panel["id"] for panel in content["panels"]]
    assert len(ids) == len(set(ids))
    for panel in content["panels"]:
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "$datasource"
            assert panel["fieldConfig"]["defaults"].get("unit"), panel["title"]
    assert content["templating"]["list"][0]["name"] == "datasource"
    assert content["uid"] == board.stem


def test_the_service_view_shows_what_was_asked_for() -> None:
    content = boards.load(next(board for board in boards.BOARDS if board.stem == "ullage-service"))
    kinds = {panel["title"]: panel["type"] for panel in content["panels"]}
    assert kinds["Usage against throughput"] == "timeseries"
    assert kinds["Whole time of requests"] == "heatmap"
    assert kinds["Terms of the risk"] == "timeseries"
    assert "gauge" in {panel["type"] for panel in content["panels"] if panel["title"] == "Fragmentation"}
    assert [mark["name"] for mark in content["annotations"]["list"]] == ["Remedies"]
