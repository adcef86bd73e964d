"""The SGLang adapter on an exposition written from SGLang 0.5's source; no real server was at hand."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters.sglang import parse_metrics
from ullage_agent.errors import EngineProtocolError


def exposition(*, rank: str = "0", tp: str = "0", used: int = 600, evictable: int = 300, available: int = 100) -> str:
    labels = f'dp_rank="{rank}",model_name="m",tp_rank="{tp}"'
    values = {
        "max_total_num_tokens": 1000,
        "kv_used_tokens": used,
        "kv_evictable_tokens": evictable,
        "kv_available_tokens": available,
        "token_usage": 0.97,
        "full_token_usage": used / 1000,
        "num_running_reqs": 7,
        "num_queue_reqs": 2,
        "num_retracted_requests_total": 3,
        "prompt_tokens_total": 5000,
        "generation_tokens_total": 900,
        "num_requests_total": 40,
        "cached_tokens_total": 1200,
        "cache_hit_rate": 0.24,
    }
    lines = [f"sglang:{name}{{{labels}}} {float(value)}" for name, value in values.items()]
    for bound, count in (("0.1", 4), ("1.0", 9), ("+Inf", 10)):
        lines.append(f'sglang:time_to_first_token_seconds_bucket{{{labels},le="{bound}"}} {count}')
    return "\n".join([*lines, "process_start_time_seconds 1.7e9"]) + "\n"


def test_reads_an_exposition() -> None:
    reading = parse_metrics(exposition().encode(), 5.0)
    state = reading.snapshot
    assert reading.violations == ()
    assert (state.block_tokens, state.total_blocks) == (1, 1000)
    assert (state.hot_blocks, state.reclaimable_blocks, state.free_blocks) == (600, 300, 100)
    assert (state.running, state.waiting, state.preemptions_total, state.finished_total) == (7, 2, 3, 40)
    assert (state.prefix_query_tokens_total, state.prefix_hit_tokens_total) == (5000, 1200)
    assert (reading.identity.type, reading.identity.model) == ("sglang", "m")
    assert reading.histograms["ttft"].count == 10


def test_tensor_parallel_workers_count_once_and_data_parallel_ranks_add_up() -> None:
    text = exposition() + exposition(tp="1") + exposition(rank="1", used=990, evictable=0, available=10)
    state = parse_metrics(text.encode(), 5.0).snapshot
    assert (state.total_blocks, state.hot_blocks, state.running, state.finished_total) == (2000, 1590, 14, 80)
    assert [(rank.name, rank.hot_blocks, rank.reclaimable_blocks) for rank in state.ranks] == [
        ("0", 600, 300),
        ("1", 990, 0),
    ]
    assert parse_metrics(text.encode(), 5.0).histograms["ttft"].count == 20


def test_parts_by_priority_do_not_count_beside_the_whole() -> None:
    parts = "".join(
        f'sglang:num_running_reqs{{dp_rank="0",model_name="m",priority="{priority}",tp_rank="0"}} {count}\n'
        for priority, count in (("", 7), ("10", 2), ("20", 5))
    )
    text = re.sub(r"sglang:num_running_reqs.*\n", parts, exposition())
    assert parse_metrics(text.encode(), 5.0).snapshot.running == 7


def test_streaming_and_other_requests_add_up() -> None:
    split = "num_requests_total|time_to_first_token"
    others = [
        line.replace("{", '{is_streaming="true",') for line in exposition().splitlines() if re.search(split, line)
    ]
    reading = parse_metrics((exposition() + "\n".join(others) + "\n").encode(), 5.0)
    assert reading.snapshot.finished_total == 80
    assert reading.histograms["ttft"].count == 20


def test_decoded_tokens_are_known_before_requests_end() -> None:
    labels = 'dp_rank="0",model_name="m",tp_rank="0"'
    more = "".join(
        f'sglang:realtime_tokens_total{{{labels},mode="{mode}"}} {count}\n'
        for mode, count in (("prefill_compute", 9000), ("decode", 1500))
    )
    assert parse_metrics((exposition() + more).encode(), 5.0).snapshot.generated_tokens_total == 1500


def test_an_older_version_says_usage_alone() -> None:
    text = re.sub(r"sglang:token_usage.*\n", "", exposition()).replace("full_token_usage", "token_usage")
    lines = [line for line in text.splitlines() if ":kv_" not in line]
    reading = parse_metrics("\n".join(lines).encode(), 5.0)
    assert reading.violations == ()
    assert (reading.snapshot.hot_blocks, reading.snapshot.free_blocks) == (600, None)


def test_an_engine_that_disagrees_with_itself_is_not_believed() -> None:
    text = re.sub(r"(sglang:full_token_usage{.*}) .*", r"\g<1> 0.2", exposition())
    reading = parse_metrics(text.encode(), 5.0)
    assert reading.snapshot.hot_blocks is None
    assert [(v.metric, v.problem) for v in reading.violations] == [("sglang:kv_used_tokens", "out_of_range")]


@pytest.mark.parametrize(
    ("metric", "value", "attribute", "problem"),
    [
        ("full_token_usage", "NaN", None, "not_finite"),
        ("num_queue_reqs", "+Inf", "waiting", "not_finite"),
        ("num_running_reqs", "-1", "running", "out_of_range"),
        ("max_total_num_tokens", "0", "total_blocks", "out_of_range"),
    ],
)
def test_bad_numbers(metric: str, value: str, attribute: str | None, problem: str) -> None:
    text = re.sub(rf"(sglang:{metric}{{.*}}) .*", rf"\g<1> {value}", exposition())
    reading = parse_metrics(text.encode(), 5.0)
    assert (f"sglang:{metric}", problem) in [(v.metric, v.problem) for v in reading.violations]
    if attribute is not None:
        assert getattr(reading.snapshot, attribute) is None


def test_a_renamed_metric_is_told() -> None:
    text = exposition().replace("sglang:num_queue_reqs", "sglang:num_queued_reqs")
    (violation,) = parse_metrics(text.encode(), 5.0).violations
    assert violation.problem == "renamed"


@given(st.text(max_size=60))
def test_any_line_gives_a_reading_or_an_engine_error(tail: str) -> None:
    try:
        reading = parse_metrics(f"sglang:num_running_reqs{tail}\n".encode("utf-8", "replace"), 5.0)
    except EngineProtocolError:
        return
    assert reading.snapshot.running is None or reading.snapshot.running >= 0


async def test_registered(clock: Any) -> None:
    from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig

    adapter = BUILTIN_ADAPTERS["sglang"](AdapterConfig(url="http://127.0.0.1:1", clock=clock))
    assert adapter.capabilities() == ()
    await adapter.close()
