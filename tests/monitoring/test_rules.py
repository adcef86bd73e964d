"""Rules: promtool takes and tests them, they name what exists, and every alert leads to a page that helps."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import boards
import names
import pytest
import yaml
from mixin import parts
from mixin.__main__ import main
from mixin.parts import Alert, Record, Settings
from mixin.render import RULE_FILES, files
from stack import MONITORING, ROOT, program

from ullage_operator.receiver import read_alerts

RUNBOOKS = ROOT / "docs" / "runbooks"
CASES = sorted((Path(__file__).parent / "promtool").glob("*.yaml"))
ALERTS: list[Alert] = [alert for rules in RULE_FILES for alert in rules.alerts()]
RECORDS = [r for rules in RULE_FILES for group in rules.groups for r in group.rules if isinstance(r, Record)]
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Remedy"]
OPERATORS_OWN = ("UllageRiskHigh", "UllageAgentSilent")
"""Alerts that the operator makes for each service."""


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exists() -> set[str]:
    return {*names.defined(), *names.borrowed(), *(record.name for record in RECORDS)}


def runbook(name: str) -> str:
    return (RUNBOOKS / f"{name}.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_rendered_files_are_the_definition_s() -> None:
    assert main(["--check", str(MONITORING)]) == 0


def test_a_changed_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path)]) == 0
    changed = tmp_path / "rules" / "ullage-engines.yaml"
    changed.write_text(changed.read_text().replace("0.95", "0.99"))
    assert main(["--check", str(tmp_path)]) == 1
    assert str(changed) in capsys.readouterr().err


def test_both_forms_of_the_rules_are_the_same() -> None:
    rendered = files(Settings())
    for rules in RULE_FILES:
        plain = yaml.safe_load(rendered[f"rules/{rules.name}.yaml"])
        assert yaml.safe_load(rendered[f"prometheus-operator/{rules.name}.yaml"])["spec"] == plain


def test_waiting_times_can_be_bounded_for_a_demonstration(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    assert main(["--rules", str(file), "--longest-hold", "2s", "--runbooks", "https://example.org/r/"]) == 0
    rules = [r for group in yaml.safe_load(file.read_text())["groups"] for r in group["rules"] if "alert" in r]
    assert {r["alert"]: r["for"] for r in rules} == {a.name: "0s" if a.hold == "0s" else "2s" for a in ALERTS}
    assert rules[0]["annotations"]["runbook_url"] == f"https://example.org/r/{rules[0]['alert']}.md"


@pytest.mark.parametrize("text", ["", "5", "m5", "1h30m", "-1s"])
def test_a_duration_has_one_unit(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parts.seconds(text)


def test_promtool_accepts_the_rules() -> None:
    for rules in RULE_FILES:
        promtool("check", "rules", MONITORING / "rules" / f"{rules.name}.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_rules_fire_when_they_should(case: Path) -> None:
    promtool("test", "rules", case)


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    fires: set[str] = set()
    quiet: set[str] = set()
    for case in CASES:
        for test in yaml.safe_load(case.read_text())["tests"]:
            outcomes = [(check["alertname"], bool(check["exp_alerts"])) for check in test["alert_rule_test"]]
            fires |= {name for name, expected in outcomes if expected}
            if not any(expected for _, expected in outcomes):  # silence before the waiting time is over is no case
                quiet |= {name for name, _ in outcomes}
    assert fires == quiet == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDS], ids=lambda rule: rule.name)
def test_rules_name_what_exists(rule: Alert | Record) -> None:
    found = names.used(rule.expr)
    assert found or rule.name == "UllageTargetDown"
    assert found <= exists()
    known = names.defined()
    for series, label in names.matched(rule.expr):
        assert label in known.get(series, frozenset()) | names.TARGET_LABELS, f"{series} has no label {label}"


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert names.used("rate(llm_preemption_total[5m])") - exists() == {"llm_preemption_total"}
    assert list(names.matched('llm_oom_risk_score{kind="x", pod=~"y"}')) == [
        ("llm_oom_risk_score", "kind"),
        ("llm_oom_risk_score", "pod"),
    ]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_say_where_and_what_next(alert: Alert) -> None:
    assert alert.summary.endswith(".")
    assert len(alert.summary.replace("{{", "").replace("}}", "")) < 140
    about_all = alert.name == "UllageOperatorAbsent"
    assert about_all or "$labels" in alert.summary
    assert alert.description.endswith(".")


@pytest.mark.parametrize("name", [*(alert.name for alert in ALERTS), *OPERATORS_OWN])
def test_every_alert_has_a_runbook(name: str) -> None:
    text = runbook(name)
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    diagnosis = text.split("## Diagnosis")[1].split("## Remedy")[0]
    assert blocks(diagnosis, "promql") or blocks(diagnosis, "sh"), "diagnosis names what to ask"


def test_no_runbook_is_left_over() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("Ullage*.md")}
    assert pages == {*(alert.name for alert in ALERTS), *OPERATORS_OWN}


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_queries_of_runbooks_are_real(page: Path, tmp_path: Path) -> None:
    queries = [line for block in blocks(page.read_text(), "promql") for line in block.splitlines() if line.strip()]
    for query in queries:
        assert names.used(query) <= exists(), query
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", file)


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_series_named_in_runbooks_exist(page: Path) -> None:
    known = {*exists(), *(alert.name for alert in ALERTS)}
    for word in re.findall(r"`([a-z_:]+)(?:\{[^`]*\})?`", page.read_text()):
        if re.match(r"(?:llm|ullage_(?:agent|operator|engine))_.", word):
            assert word in known, word


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda path: path.stem)
def test_dashboards_name_what_exists(board: Path) -> None:
    queries = [query for panel in boards.panels(board) for query in panel.queries]
    queries += [*boards.annotations(board), *(query for _, query in boards.variables(board))]
    known = names.defined()
    for query in queries:
        assert names.used(query) <= exists(), query
        for series, label in names.matched(query):
            assert label in known.get(series, frozenset()) | names.TARGET_LABELS, query


def routed() -> set[str]:
    configuration = yaml.safe_load((MONITORING / "prometheus" / "alertmanager.yml").read_text())
    (route,) = [r for r in configuration["route"]["routes"] if r["receiver"] == "ullage-operator"]
    return set(re.findall(r"Ullage\w+", route["matchers"][0]))


def test_alertmanager_sends_the_operator_what_is_pressure() -> None:
    program("amtool")
    file = MONITORING / "prometheus" / "alertmanager.yml"
    done = subprocess.run([program("amtool"), "check-config", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert routed() <= {alert.name for alert in ALERTS} | set(OPERATORS_OWN)
    text = file.read_text()
    assert set(re.findall(r"Ullage\w+", text)) <= {alert.name for alert in ALERTS} | set(OPERATORS_OWN)


def test_what_is_sent_reaches_the_receiver_s_service_and_pod() -> None:
    expected: list[dict[str, Any]] = []
    for case in CASES:
        for test in yaml.safe_load(case.read_text())["tests"]:
            for check in test["alert_rule_test"]:
                labels = [alert["exp_labels"] for alert in check["exp_alerts"]]
                expected += [{"alertname": check["alertname"], **found} for found in labels]
    sent = [labels for labels in expected if labels["alertname"] in routed()]
    assert sent
    body = {"version": "4", "alerts": [{"status": "firing", "labels": labels} for labels in sent]}
    for told in read_alerts(body, now=0.0):
        assert told is not None
        assert (told.service.namespace, told.service.name, told.alert.pod) == ("chat", "web", "web-1")
