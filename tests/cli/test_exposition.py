"""An agent's metrics read back: what `top` and `doctor` know is what a real agent exports."""

from __future__ import annotations

import inspect
import re

import pytest

import ullage_cli.exposition
from ullage_agent import metrics
from ullage_cli.exposition import AgentMetrics, read_agent

TEXT = """
ullage_agent_info{version="0.1.0"} 1.0
llm_engine_info{type="vllm",instance_id="a",version="0.32",model="m"} 1.0
llm_oom_risk_score 88.5
llm_oom_risk_term_score{term="classic"} 88.5
llm_oom_risk_term_score{term="forecast"} 12.0
llm_kv_cache_memory_bytes{state="total"} 1000.0
llm_kv_cache_memory_bytes{state="hot"} 700.0
llm_kv_cache_memory_bytes{state="reclaimable"} 200.0
llm_kv_exhaustion_seconds{quantile="0.1"} 4.0
llm_kv_exhaustion_seconds{quantile="0.5"} 9.0
llm_requests_running 3.0
llm_preemptions_total 2.0
llm_engine_liveness{state="working"} 1.0
ullage_agent_source_up{source="engine"} 1.0
ullage_agent_source_up{source="device"} 0.0
ullage_agent_certificate_valid 0.0
ullage_agent_contract_violations{metric="vllm:x",problem="missing"} 1.0
"""


def test_figures_are_read() -> None:
    found = read_agent(TEXT)
    assert (found.engine, found.engine_version, found.model, found.agent_version) == ("vllm", "0.32", "m", "0.1.0")
    assert (found.risk, found.winner, found.exhaustion_s) == (88.5, "classic", 9.0)
    assert (found.share("hot"), found.share("reclaimable"), found.share("free")) == (0.7, 0.2, None)
    assert (found.running, found.waiting, found.preemptions) == (3.0, None, 2.0)
    assert found.liveness == "working"
    assert found.sources == {"engine": True, "device": False}
    assert found.certificate_valid is False
    assert found.violations == (("vllm:x", "missing"),)


def test_token_slots_stand_in_where_bytes_are_not_told() -> None:
    tokens = {"total": 10.0, "hot": 4.0}
    assert AgentMetrics(tokens=tokens).share("hot") == 0.4
    assert AgentMetrics().share("hot") is None


@pytest.mark.parametrize("text", ["", "up 1.0\n", "<html>"])
def test_other_answers_are_no_agents(text: str) -> None:
    with pytest.raises(ValueError):
        read_agent(text)


def test_every_name_that_is_read_is_one_that_an_agent_exports() -> None:
    exported = {gauge.name for gauge in metrics.GAUGES} | {f"{c.name}_total" for c in metrics.COUNTERS}
    exported |= {metrics.SOURCE_UP.name, metrics.SAMPLE_AGE.name, metrics.CERTIFICATE_VALID.name}
    exported |= {f"{metrics.ENGINE_INFO.name}_info", f"{metrics.AGENT_INFO.name}_info"}
    read = set(re.findall(r'"((?:llm|ullage_agent)_[a-z_]+)"', inspect.getsource(ullage_cli.exposition)))
    assert len(read) > 15
    assert read <= exported


def test_labels_are_those_of_the_definitions() -> None:
    by_name = {gauge.name: gauge.labels for gauge in metrics.GAUGES}
    assert by_name["llm_oom_risk_term_score"] == ("term",)
    assert by_name["llm_kv_cache_memory_bytes"] == by_name["llm_kv_cache_tokens"] == ("state",)
    assert by_name["llm_kv_exhaustion_seconds"] == ("quantile",)
    assert by_name["llm_engine_liveness"] == ("state",)
    assert by_name["ullage_agent_contract_violations"] == ("metric", "problem")
    assert set(metrics.ENGINE_INFO.labels) >= {"type", "version", "model"}
