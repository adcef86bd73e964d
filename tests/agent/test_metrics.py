"""What Prometheus gets: names, values, and above all what is absent."""

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ullage_agent import metrics
from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig, EngineAdapter
from ullage_agent.adapters.fake import FakeAdapter, Scenario, Step
from ullage_agent.adapters.simulation import PoolSpec
from ullage_agent.board import Board
from ullage_agent.clock import ManualClock
from ullage_agent.collector import make_registry
from ullage_agent.poller import PollConfig, Poller
from ullage_agent.wire import Snapshot, Violation

Series = dict[tuple[str, tuple[str, ...]], float]
LATENCIES = {
    "ttft": "llm_time_to_first_token_seconds",
    "inter_token": "llm_inter_token_seconds",
    "end_to_end": "llm_request_seconds",
}


class Rig:
    def __init__(self, adapter: EngineAdapter, clock: ManualClock) -> None:
        self.board = Board(clock)
        self.poller = Poller(adapter, self.board, clock, PollConfig())
        self.outcomes = {("evict", "Succeeded"): 2, ("evict", "Error"): 1}
        self.registry = make_registry(self.board, self.outcomes, stale_after_s=30.0)

    def scrape(self) -> Series:
        found: Series = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.values()))
                assert key not in found
                found[key] = sample.value
        return found


FULL: dict[str, Any] = {
    "block_tokens": 16,
    "block_bytes": 100,
    "total_blocks": 256,
    "hot_blocks": 200,
    "reclaimable_blocks": 46,
    "free_blocks": 10,
    "largest_free_run_blocks": 4,
    "largest_allocation_blocks": 14,
    "allocated_slots": 3200,
    "filled_slots": 3000,
    "allocator_reserved_bytes": 1000,
    "allocator_allocated_bytes": 900,
    "running": 12,
    "waiting": 1,
    "outstanding_blocks": 40,
    "admitted_total": 20,
    "finished_total": 7,
    "preemptions_total": 1,
    "recomputed_tokens_total": 5,
    "prompt_tokens_total": 900,
    "generated_tokens_total": 300,
    "prefix_query_tokens_total": 900,
    "prefix_hit_tokens_total": 450,
    "host_total_bytes": 5000,
    "host_used_bytes": 100,
    "admission_max_prompt_tokens": 512,
    "step_age_s": 0.5,
}


def scripted(clock: ManualClock, *steps: Step) -> Rig:
    return Rig(FakeAdapter(Scenario(steps=steps, model="m"), clock), clock)


async def test_fixed_names_and_their_values(clock: ManualClock) -> None:
    rig = scripted(clock, Step(snapshot=FULL))
    await rig.poller.poll_once()
    clock.advance(1.5)
    found = rig.scrape()
    expected = {
        ("llm_kv_cache_memory_bytes", ("total",)): 25600.0,
        ("llm_kv_cache_memory_bytes", ("hot",)): 20000.0,
        ("llm_kv_cache_memory_bytes", ("reclaimable",)): 4600.0,
        ("llm_kv_cache_memory_bytes", ("free",)): 1000.0,
        ("llm_kv_cache_fragmentation_ratio", ("external",)): 0.6,
        ("llm_kv_cache_fragmentation_ratio", ("internal",)): 0.0625,
        ("llm_kv_cache_fragmentation_ratio", ("allocator",)): 0.1,
        ("llm_oom_risk_score", ()): 100 * (0.6 * 200 / 256 + 0.4 * 0.75),
        ("llm_oom_risk_term_score", ("classic",)): 100 * (0.6 * 200 / 256 + 0.4 * 0.75),
        ("llm_kv_cache_usage_ratio", ("hot",)): 200 / 256,
        ("llm_kv_cache_usage_ratio", ("reclaimable",)): 46 / 256,
        ("llm_requests_running", ()): 12.0,
        ("llm_requests_waiting", ()): 1.0,
        ("llm_preemptions_total", ()): 1.0,
        ("llm_generated_tokens_total", ()): 300.0,
        ("llm_prefix_cache_hit_ratio", ()): 0.5,
        ("llm_host_cache_memory_bytes", ("used",)): 100.0,
        ("llm_admission_max_prompt_tokens", ()): 512.0,
        ("ullage_agent_sample_age_seconds", ()): 1.5,
        ("ullage_agent_source_up", ("engine",)): 1.0,
        ("ullage_agent_actions_total", ("evict", "Succeeded")): 2.0,
        ("ullage_agent_actions_total", ("evict", "Error")): 1.0,
        ("llm_engine_info", ("fake", "m", "fake", "0")): 1.0,
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(value), key


async def test_unknown_is_absent_and_never_zero(clock: ManualClock) -> None:
    rig = scripted(clock, Step(snapshot={"hot_blocks": 5}))
    await rig.poller.poll_once()
    names = {name for name, _ in rig.scrape() if name.startswith("llm_")}
    assert names == {"llm_engine_info", "llm_engine_liveness", "llm_engine_quiet_seconds"}


async def test_a_zero_that_was_said_is_shown(clock: ManualClock) -> None:
    rig = scripted(clock, Step(snapshot={"waiting": 0, "preemptions_total": 0}))
    await rig.poller.poll_once()
    found = rig.scrape()
    assert found["llm_requests_waiting", ()] == 0.0
    assert found["llm_preemptions_total", ()] == 0.0


async def test_exhaustion_appears_only_when_in_sight(clock: ManualClock) -> None:
    spec = PoolSpec(total=256, hot=100, growth_per_s=5.0, peak=400)
    rig = Rig(FakeAdapter.simulated(spec, clock), clock)
    await rig.poller.poll_once()
    assert ("llm_kv_exhaustion_seconds", ("0.5",)) not in rig.scrape()
    for _ in range(5):
        clock.advance(1.0)
        await rig.poller.poll_once()
    found = rig.scrape()
    assert found["llm_kv_exhaustion_seconds", ("0.5",)] == pytest.approx((256 - 125) / 5)
    assert found["llm_kv_growth_blocks_per_second", ()] == pytest.approx(5.0)


async def test_the_chance_of_exhaustion_appears_once_lengths_are_learned(clock: ManualClock) -> None:
    def at_work(second: int) -> Step:
        counts = {"finished_total": 10 + second, "generated_tokens_total": 400 * second, "prompt_tokens_total": 9000}
        pool = {"block_tokens": 16, "total_blocks": 1000, "hot_blocks": 300, "running": 20, "waiting": 0}
        return Step(snapshot={**pool, **counts})

    rig = scripted(clock, *(at_work(second) for second in range(12)))
    chances = []
    for _ in range(12):
        await rig.poller.poll_once()
        chances.append(rig.scrape().get(("llm_kv_exhaustion_chance", ())))
        clock.advance(1.0)
    assert chances[0] is None  # ten answers teach too little
    assert chances[-1] is not None and 0.0 <= chances[-1] < 0.5  # a third of the pool in use, and level


async def test_latency_quantiles_of_our_own_engine(engine: Any, clock: ManualClock) -> None:
    """What the engine observed since the window began, not since it started."""
    adapter = BUILTIN_ADAPTERS["ullage"](AdapterConfig(url=engine.url, clock=clock))
    rig = Rig(adapter, clock)
    engine.snapshot["latency"] = {name: [[1.0, 50], [2.0, 50], [None, 50]] for name in LATENCIES}
    await rig.poller.poll_once()
    clock.advance(2.0)
    engine.snapshot["latency"] = {name: [[1.0, 50], [2.0, 60], [None, 60]] for name in LATENCIES}
    await rig.poller.poll_once()
    found = rig.scrape()
    for name in LATENCIES.values():
        assert found[name, ("0.5",)] == pytest.approx(1.5)
        assert found[name, ("0.99",)] == pytest.approx(1.99)
    clock.advance(2.0)
    engine.snapshot["latency"]["ttft"] = [[1.0, 5]]
    await rig.poller.poll_once()
    found = rig.scrape()
    assert found["ullage_agent_contract_violations", ("latency.ttft", "out_of_range")] == 1.0
    assert LATENCIES["ttft"] not in {name for name, _ in found}
    assert found[LATENCIES["end_to_end"], ("0.5",)] == pytest.approx(1.5)
    await adapter.close()


async def test_violations_are_shown_once_each(clock: ManualClock) -> None:
    twice = tuple(Violation(metric="m", problem="missing", detail=str(n)) for n in range(2))
    rig = scripted(clock, Step(snapshot={"hot_blocks": 5}, violations=twice))
    await rig.poller.poll_once()
    assert rig.scrape()["ullage_agent_contract_violations", ("m", "missing")] == 1.0


async def test_before_the_first_sample(clock: ManualClock) -> None:
    rig = scripted(clock, Step(error="gone"))
    await rig.poller.poll_once()
    found = rig.scrape()
    assert found["ullage_agent_source_up", ("engine",)] == 0.0
    assert found["ullage_agent_polls_total", ("failed",)] == 1.0
    assert ("ullage_agent_sample_age_seconds", ()) not in found
    assert not any(name.startswith("llm_") for name, _ in found)


async def test_a_dead_engines_series_end_and_its_age_goes_on(clock: ManualClock) -> None:
    rig = scripted(clock, Step(snapshot=FULL), Step(error="gone"))
    await rig.poller.poll_once()
    clock.advance(29.0)
    await rig.poller.poll_once()
    assert ("llm_oom_risk_score", ()) in rig.scrape()
    clock.advance(2.0)
    found = rig.scrape()
    assert not any(name.startswith("llm_") for name, _ in found)
    assert found["ullage_agent_sample_age_seconds", ()] == 31.0
    assert found["ullage_agent_source_up", ("engine",)] == 0.0


async def test_hostile_names_are_escaped(clock: ManualClock) -> None:
    name = 'a"b\\c\nd{}'
    rig = Rig(FakeAdapter(Scenario(steps=(Step(snapshot=FULL),), model=name), clock), clock)
    await rig.poller.poll_once()
    assert any(name in labels for _, labels in rig.scrape())


async def test_openmetrics_is_valid(clock: ManualClock) -> None:
    rig = scripted(clock, Step(snapshot=FULL))
    await rig.poller.poll_once()
    families = list(parse_openmetrics(generate_openmetrics(rig.registry).decode()))
    assert "llm_oom_risk_score" in {family.name for family in families}


def test_every_definition_is_fit_to_read() -> None:
    definitions = [*metrics.GAUGES, *metrics.COUNTERS, metrics.SOURCE_UP, metrics.SAMPLE_AGE, metrics.ACTIONS]
    names = [definition.name for definition in definitions]
    assert len(names) == len(set(names))
    for definition in definitions:
        assert definition.help.endswith(".")
        assert not definition.name.endswith("_total")


def test_every_counter_of_a_snapshot_is_exported() -> None:
    totals = {name for name in Snapshot.__slots__ if name.endswith("_total")}
    assert {counter.attribute for counter in metrics.COUNTERS} == totals
