"""The vLLM adapter on recorded expositions of a real server."""

import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_agent.adapters import BUILTIN_ADAPTERS, AdapterConfig
from ullage_agent.adapters.vllm import parse_metrics
from ullage_agent.analysis import Analysis, Findings
from ullage_agent.clock import ManualClock
from ullage_agent.errors import EngineProtocolError
from ullage_agent.wire import ACTIONS, ActionRequest

TRACES = Path(__file__).parent / "traces"


@pytest.fixture(scope="module")
def exposition() -> str:
    return lzma.decompress((TRACES / "vllm-0.32-load.txt.xz").read_bytes()).decode()


def replay(name: str) -> Iterator[tuple[float, Findings]]:
    """Seconds into a trace, and what the agent would have made of each scrape."""
    text = lzma.decompress((TRACES / name).read_bytes()).decode()
    parts = re.split(r"^### scrape ([\d.]+)\n", text, flags=re.MULTILINE)[1:]
    analysis = Analysis()
    for stamp, body in zip(parts[::2], parts[1::2], strict=True):
        at = float(stamp)
        reading = parse_metrics(body.encode(), at)
        assert reading.violations == ()
        yield at - float(parts[0]), analysis.take(reading, at)


def test_reads_a_real_exposition(exposition: str) -> None:
    reading = parse_metrics(exposition.encode(), 5.0)
    state = reading.snapshot
    assert reading.violations == ()
    assert (state.block_tokens, state.total_blocks, state.hot_blocks) == (128, 363, 23)
    assert (state.running, state.waiting, state.preemptions_total) == (9, 31, 0)
    assert (state.prompt_tokens_total, state.generated_tokens_total, state.finished_total) == (3652, 173, 7)
    assert (state.prefix_query_tokens_total, state.prefix_hit_tokens_total) == (4393, 1536)
    assert (state.free_blocks, state.reclaimable_blocks, state.block_bytes) == (None, None, None)
    assert (reading.identity.model, reading.identity.type) == ("smollm2", "vllm")
    assert reading.identity.instance.startswith("started-")


def test_the_older_name_of_usage_reads_the_same(exposition: str) -> None:
    older = exposition.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    older = older.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
    assert parse_metrics(older.encode(), 5.0) == parse_metrics(exposition.encode(), 5.0)


def test_an_unknown_new_name_is_a_violation_and_never_zero(exposition: str) -> None:
    newer = exposition.replace("vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_fraction")
    reading = parse_metrics(newer.encode(), 5.0)
    assert reading.snapshot.hot_blocks is None
    (violation,) = reading.violations
    assert violation.problem == "renamed"
    assert "kv_cache_usage_fraction" in violation.detail


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("vllm:num_requests_running", "running"),
        ("vllm:num_preemptions_total", "preemptions_total"),
        ("vllm:cache_config_info", "total_blocks"),
    ],
)
def test_a_missing_metric_is_a_violation(exposition: str, name: str, attribute: str) -> None:
    lines = [line for line in exposition.splitlines() if not line.startswith(name)]
    reading = parse_metrics("\n".join(lines).encode(), 5.0)
    assert getattr(reading.snapshot, attribute) is None
    assert [violation.metric.startswith(name) for violation in reading.violations] == [True]


@pytest.mark.parametrize(
    ("metric", "value", "problem"),
    [
        ("vllm:kv_cache_usage_perc", "NaN", "not_finite"),
        ("vllm:kv_cache_usage_perc", "+Inf", "not_finite"),
        ("vllm:kv_cache_usage_perc", "57.3", "out_of_range"),  # a percentage after all
        ("vllm:kv_cache_usage_perc", "-0.1", "out_of_range"),
        ("vllm:num_requests_waiting", "1.5", "wrong_type"),
        ("vllm:num_requests_waiting", "-1", "out_of_range"),
        ("vllm:num_requests_waiting", "NaN", "not_finite"),
        ("vllm:num_requests_waiting", "1e300", "out_of_range"),
    ],
)
def test_bad_numbers(exposition: str, metric: str, value: str, problem: str) -> None:
    broken = re.sub(rf"^({metric}{{[^}}]*}}) .*$", rf"\g<1> {value}", exposition, flags=re.MULTILINE)
    reading = parse_metrics(broken.encode(), 5.0)
    assert [(v.metric, v.problem) for v in reading.violations] == [(metric, problem)]
    attribute = "hot_blocks" if "usage" in metric else "waiting"
    assert getattr(reading.snapshot, attribute) is None


@pytest.mark.parametrize(("size", "problem"), [("None", "wrong_type"), ("0", "out_of_range"), ("-5", "wrong_type")])
def test_bad_pool_sizes(exposition: str, size: str, problem: str) -> None:
    broken = exposition.replace('num_gpu_blocks="364"', f'num_gpu_blocks="{size}"')
    assert broken != exposition
    reading = parse_metrics(broken.encode(), 5.0)
    assert (reading.snapshot.total_blocks, reading.snapshot.hot_blocks) == (None, None)
    assert [violation.problem for violation in reading.violations] == [problem]


def test_ranks_are_summed() -> None:
    lines = []
    for rank, usage in (("0", 0.5), ("1", 1.0)):
        lines += [
            f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="101",block_size="16"}} 1.0',
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}',
            f'vllm:num_requests_running{{engine="{rank}"}} 3.0',
        ]
    state = parse_metrics("\n".join(lines).encode(), 5.0).snapshot
    assert (state.total_blocks, state.hot_blocks, state.running) == (200, 150, 6)


@pytest.mark.parametrize("body", [b"", b"<html>not found</html>", b"\xff\xff"])
def test_something_else_than_vllm_says_nothing(body: bytes) -> None:
    reading = parse_metrics(body, 5.0)
    assert reading.snapshot.hot_blocks is None
    assert {violation.problem for violation in reading.violations} == {"missing"}


@given(st.text(max_size=60))
def test_any_line_gives_a_reading_or_an_engine_error(tail: str) -> None:
    try:
        reading = parse_metrics(f"vllm:num_requests_running{tail}\n".encode("utf-8", "replace"), 5.0)
    except EngineProtocolError:
        return
    assert reading.snapshot.running is None or reading.snapshot.running >= 0


def test_pressure_is_seen_well_before_the_first_preemption() -> None:
    """The recording's first preemption is at second 17; vLLM's own counter moves at 58."""
    alarms = [second for second, found in replay("vllm-0.32-pressure.prom.xz") if (found.risk.score or 0) >= 85]
    assert alarms[0] <= 17 - 5


def test_a_load_that_fits_raises_no_alarm() -> None:
    scores = [found.risk.score for _, found in replay("vllm-0.32-load.prom.xz")]
    assert max(score for score in scores if score is not None) < 85


async def test_a_server_without_admin_routes_offers_no_action(
    raw_server: Any, http_answer: Any, exposition: str
) -> None:
    url = await raw_server(http_answer(exposition.encode()), False)
    adapter = BUILTIN_ADAPTERS["vllm"](AdapterConfig(url=url, clock=ManualClock()))
    assert (await adapter.read()).snapshot.hot_blocks == 23
    assert adapter.capabilities() == ()
    for action in ACTIONS:
        assert (await adapter.act(action, ActionRequest(), "k")).outcome == "Unsupported"
    await adapter.close()


def test_the_worst_rank_is_visible(exposition: str) -> None:
    other = exposition.replace('engine="0"', 'engine="1"')
    other = re.sub(r"^(vllm:kv_cache_usage_perc{[^}]*}) .*$", r"\g<1> 1.0", other, flags=re.MULTILINE)
    reading = parse_metrics((exposition + other).encode(), 5.0)
    assert reading.violations == ()
    assert [(rank.name, rank.hot_blocks, rank.total_blocks) for rank in reading.snapshot.ranks] == [
        ("0", 23, 363),
        ("1", 363, 363),
    ]
    assert (reading.snapshot.hot_blocks, reading.snapshot.running) == (386, 18)
    assert reading.histograms["ttft"].count == 30


def test_histograms_give_quantiles_and_created_is_noise(exposition: str) -> None:
    found = parse_metrics(exposition.encode(), 5.0).histograms
    assert set(found) == {"ttft", "inter_token", "end_to_end", "answer_tokens", "prompt_tokens"}
    assert found["ttft"].count == 15
    assert found["ttft"].quantile(0.5) == pytest.approx(1.0 + 1.5 * 1.5 / 2)
    assert found["answer_tokens"].share_above(50) == 0.0
    assert found["answer_tokens"].share_above(20) == pytest.approx(4 / 7)


def test_a_broken_histogram_is_a_violation_and_absent(exposition: str) -> None:
    broken = re.sub(r'(vllm:time_to_first_token_seconds_bucket{[^}]*le="0.5"[^}]*}) .*', r"\g<1> 1e9", exposition)
    reading = parse_metrics(broken.encode(), 5.0)
    assert "ttft" not in reading.histograms
    assert [violation.metric for violation in reading.violations] == ["vllm:time_to_first_token_seconds"]
