"""`ullage replay`: both kinds of files, the policies' lanes, estimated effects, words and picture."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ullage_agent.adapters.base import Reading
from ullage_agent.adapters.vllm import parse_metrics
from ullage_agent.analysis import Analysis, Surroundings
from ullage_agent.record import Recorder
from ullage_agent.wire import ActionResult, EngineIdentity, Snapshot
from ullage_cli.commands import run
from ullage_cli.errors import InputError
from ullage_cli.replay.data import first_preemption
from ullage_cli.replay.effects import Effects
from ullage_cli.replay.lane import Lane, outcome
from ullage_cli.replay.policies import policy, polled
from ullage_cli.replay.readings import read_file
from ullage_operator.model import Remediation

TRACE = Path(__file__).parents[1] / "agent" / "traces" / "vllm-0.32-pressure.prom.xz"
SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "smollm2.yaml"


def reading(at: float, hot: int, cached: int = 20, **more: Any) -> Reading:
    state = Snapshot(
        sampled_at=1000.0 + at,
        block_tokens=16,
        block_bytes=1000,
        total_blocks=200,
        hot_blocks=hot,
        reclaimable_blocks=cached,
        free_blocks=200 - hot - cached,
        largest_free_run_blocks=(200 - hot - cached) // 2,
        running=10,
        waiting=0,
        **more,
    )
    return Reading(snapshot=state, identity=EngineIdentity(type="ullage", instance="a"))


@pytest.fixture
def filling(tmp_path: Path) -> Callable[..., Path]:
    """A recording of a pool that fills by two blocks a second and stays full; `acted` enters a real action."""

    def make(*, acted: bool = False, seconds: int = 120) -> Path:
        path = tmp_path / "filling.rec.gz"
        recorder, analysis = Recorder(path), Analysis()
        for second in range(seconds):
            one = reading(float(second), hot=min(180, 40 + 2 * second), preemptions_total=int(second > 90))
            found = analysis.take(one, float(second))
            recorder.sample(float(second), one, Surroundings(), found.risk.score, found.risk.terms)
            if acted and second == 60:
                result = ActionResult(action="evict", outcome="Succeeded", message="freed 5 blocks")
                recorder.action(60.0, "request", "EvictColdBlocks", result)
        recorder.close()
        return path

    return make


@pytest.fixture
def vllm_range(tmp_path: Path) -> Path:
    """The recorded pressure trace of a real vLLM as Prometheus would give it back."""
    parts = re.split(r"### scrape (\S+)\n", lzma.decompress(TRACE.read_bytes()).decode())[1:]
    series: dict[tuple[str, tuple[tuple[str, str], ...]], list[list[Any]]] = {}
    for at, text in zip(parts[::2], parts[1::2], strict=True):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("vllm:") and not sample.name.endswith("_bucket"):
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    series.setdefault(key, []).append([float(at), str(sample.value)])
    result = [{"metric": {"__name__": name, "pod": "vllm-0", **dict(labels)}, "values": v}
              for (name, labels), v in series.items()]  # fmt: skip
    path = tmp_path / "range.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    return path


def lane(text: str | None = None, **more: Any) -> Lane:
    settings = {"estimate": True, "capabilities": ("evict", "throttle", "release"), **more}
    return Lane(name=text or "default", service=policy(text), **settings)


def test_a_recording_is_read_whole(filling: Callable[..., Path]) -> None:
    found = read_file(filling(acted=True))
    assert (len(found.moments), found.seconds, found.engine) == (120, 119.0, "ullage")
    assert found.moments[5].wall == 1005.0
    assert [(act.at, act.action) for act in found.acts] == [(60.0, "evict")]
    assert first_preemption(found) == 91.0


def test_a_replay_decides_as_the_analysis_and_policy_do(filling: Callable[..., Path]) -> None:
    recording = read_file(filling())
    one = lane()
    one.run(recording)
    # what the lane computed for readings that nothing was done about yet is what the agent had recorded
    untouched = [i for i, point in enumerate(one.points) if point.at < one.happenings[0].at]
    assert len(untouched) > 10
    for index in untouched:
        assert one.points[index].risk == pytest.approx(recording.moments[index].score)
    first = next(h for h in one.happenings if h.verdict == "Act")
    assert (first.action, first.reason) == ("evict", "EvictColdBlocks")
    assert (first.risk or 0) >= 85


def test_evictions_lower_what_the_policy_sees_afterwards(filling: Callable[..., Path]) -> None:
    recording = read_file(filling())
    acting, blind = lane(), lane("mode=Observe")
    for one in (acting, blind):
        one.run(recording)
    with_steps, without = outcome(acting, 91.0), outcome(blind, 91.0)
    assert with_steps.blocks_freed > 0 and without.blocks_freed == 0
    assert with_steps.effective > 0
    assert with_steps.at_risk_s < without.at_risk_s
    assert with_steps.lead_s is not None and with_steps.lead_s > 0


def test_a_lower_threshold_acts_earlier(filling: Callable[..., Path]) -> None:
    recording = read_file(filling())
    late, early = lane("riskThreshold=95"), lane("riskThreshold=65,releaseThreshold=40")
    for one in (late, early):
        one.run(recording)
    assert outcome(early, None).first_action_s < outcome(late, None).first_action_s  # type: ignore[operator]


def test_replays_repeat_exactly(filling: Callable[..., Path]) -> None:
    recording = read_file(filling())
    first, second = lane(), lane()
    for one in (first, second):
        one.run(recording)
    assert first.happenings == second.happenings
    assert first.points == second.points


def test_recorded_effects_are_not_added_to(filling: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = filling(acted=True)
    assert run(["replay", str(path), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["policies"][0]["effects"] == "recorded"
    assert document["recordedActions"][0]["action"] == "evict"
    recording = read_file(path)
    one = lane(estimate=False)
    one.run(recording)
    assert [p.hot for p in one.points] == [m.reading.snapshot.hot_blocks / 200 for m in recording.moments if m.reading]


def test_what_was_evicted_is_missing_for_as_long_as_sequences_stay(make_record: Callable[..., Remediation]) -> None:
    effects = Effects()
    before = effects.apply(reading(0.0, hot=100, cached=20, finished_total=0), 0.0).snapshot
    result = effects.act(make_record(spec={"parameters": {"ratio": 0.5}}), before, 0.0)
    assert result.blocks_freed == 60  # 20 cached ones, then 40 hot ones
    after = effects.apply(reading(1.0, hot=100, cached=20, finished_total=1), 1.0).snapshot
    assert after.hot_blocks == 64  # of 40, e^-0.1 are still missing after a second of a mean stay of ten
    assert after.total_blocks == after.hot_blocks + (after.reclaimable_blocks or 0) + (after.free_blocks or 0)
    later = effects.apply(reading(200.0, hot=100, cached=20, finished_total=200), 200.0).snapshot
    assert (later.hot_blocks, later.reclaimable_blocks) == (100, 20)


def test_some_hot_blocks_always_stay(make_record: Callable[..., Remediation]) -> None:
    effects = Effects()
    effects.act(make_record(spec={"parameters": {"ratio": 1.0}}), reading(0.0, hot=100, cached=0).snapshot, 0.0)
    assert effects.apply(reading(0.0, hot=100, cached=0), 0.0).snapshot.hot_blocks == 20


def test_an_eviction_of_nothing_is_ineffective(make_record: Callable[..., Remediation]) -> None:
    assert Effects().act(make_record(), reading(0.0, hot=0, cached=0).snapshot, 0.0).outcome == "Ineffective"


@pytest.mark.parametrize(
    ("spare", "outcome", "freed", "after"),
    [
        (4, "Succeeded", 4, (96, 84, 40, 0)),
        (0, "Ineffective", 0, (100, 80, 40, 0)),
        (None, "Succeeded", 0, (100, 80, 80, None)),
    ],
)
def test_a_compaction_frees_what_the_engine_says_it_would_and_else_joins_the_free_blocks(
    make_record: Callable[..., Remediation], spare: int | None, outcome: str, freed: int, after: tuple[int | None, ...]
) -> None:
    effects, one = Effects(), reading(0.0, hot=100, cached=20, compactable_blocks=spare)
    record = make_record(spec={"action": "compact", "parameters": {"budgetMs": 200}})
    result = effects.act(record, one.snapshot, 0.0)
    assert (result.outcome, result.blocks_freed) == (outcome, freed)
    state = effects.apply(one, 1.0).snapshot
    assert (state.hot_blocks, state.free_blocks, state.largest_free_run_blocks, state.compactable_blocks) == after


def test_a_throttle_is_in_force_until_it_ends(make_record: Callable[..., Remediation]) -> None:
    effects = Effects()
    record = make_record(spec={"action": "throttle", "parameters": {"maxPromptTokens": 64, "ttlSeconds": 10}})
    effects.act(record, reading(0.0, hot=1).snapshot, 0.0)
    assert effects.apply(reading(9.0, hot=1), 9.0).snapshot.admission_max_prompt_tokens == 64
    assert effects.apply(reading(10.0, hot=1), 10.0).snapshot.admission_max_prompt_tokens is None


def test_vllms_own_metrics_from_prometheus(vllm_range: Path) -> None:
    found = read_file(vllm_range)
    assert found.engine == "vllm"
    assert len(found.moments) == 150
    parts = re.split(r"### scrape (\S+)\n", lzma.decompress(TRACE.read_bytes()).decode())[1:]
    direct = parse_metrics(parts[61].encode(), float(parts[60])).snapshot
    rebuilt = found.moments[30].reading
    assert rebuilt is not None
    assert replace(rebuilt.snapshot, sampled_at=0.0) == replace(direct, sampled_at=0.0)
    assert first_preemption(found) == pytest.approx(58, abs=1.5)


def test_a_throttle_comes_before_vllms_counter_moves(vllm_range: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(vllm_range), "-o", "json"]) == 0
    lane_ = json.loads(capsys.readouterr().out)["policies"][0]
    assert lane_["actions"].keys() == {"throttle"}  # vLLM frees nothing on demand
    assert lane_["leadSeconds"] > 30


def test_an_agents_metrics_from_prometheus(tmp_path: Path) -> None:
    def series(name: str, value: float, **labels: str) -> dict[str, Any]:
        values = [[1000 + i, str(value + i)] for i in range(5)]
        return {"metric": {"__name__": name, "pod": "p", **labels}, "values": values}

    result = [
        series("llm_kv_cache_memory_bytes", 200_000, state="total"),
        series("llm_kv_cache_memory_bytes", 100_000, state="hot"),
        series("llm_kv_cache_memory_bytes", 50_000, state="reclaimable"),
        series("llm_kv_cache_memory_bytes", 50_000, state="free"),
        series("llm_kv_cache_fragmentation_ratio", 0.5, kind="external"),
        series("llm_requests_running", 4),
        series("llm_engine_info", 1, instance_id="x", type="vllm"),
    ]
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({"data": {"result": result}}))
    first = read_file(path).moments[0].reading
    assert first is not None
    state = first.snapshot
    assert (state.total_blocks, state.hot_blocks, state.reclaimable_blocks, state.free_blocks) == (1000, 500, 250, 250)
    assert (state.largest_free_run_blocks, state.running) == (125, 4)
    assert first.identity == EngineIdentity(type="vllm", instance="x")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "neither a recording"),
        ("[]", "holds no values"),
        ('[{"metric": {}, "values": [[1, "1"]]}]', "has no name"),
        ('[{"metric": {"__name__": "up"}, "values": [[1, "1"]]}]', "neither llm_kv_cache_memory_bytes"),
        ('{"format": "ullage-recording", "version": 99}\n', "version 99"),
        ('{"format": "ullage-recording", "version": 1}\n', "no reading"),
    ],
)
def test_files_that_cannot_be_used(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(InputError, match=re.escape(complaint)):
        read_file(path)


def test_several_engines_need_a_name(tmp_path: Path) -> None:
    result = [
        {"metric": {"__name__": "llm_kv_cache_memory_bytes", "state": "total", "pod": pod}, "values": [[1, "100"]]}
        for pod in ("a", "b")
    ]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(result))
    with pytest.raises(InputError, match="several engines"):
        read_file(path)
    assert len(read_file(path, "a").moments) == 1
    with pytest.raises(InputError, match="has no 'c'"):
        read_file(path, "c")


def test_policies_by_settings_and_by_manifest() -> None:
    changed = policy("riskThreshold=75,evict.ratio=0.3,mode=Propose")
    assert changed.spec.remediation.risk_threshold == 75
    assert changed.spec.remediation.evict.ratio == 0.3
    assert changed.spec.remediation.mode == "Propose"
    sample = policy(str(SAMPLE))
    assert sample.metadata.name == "smollm2"
    assert policy("evict.ratio=0.9", sample).spec.remediation.throttle.max_prompt_tokens == 512


@pytest.mark.parametrize("text", ["riskThreshold=500", "nonsense=1", "riskThreshold=85,x", "mode.x=1", "/no/such.yaml"])
def test_policies_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError, match="--policy"):
        policy(text)


def test_staleness_follows_the_interval_of_the_data() -> None:
    assert polled(policy(None), 15.0).stale_after_s == 75.0
    assert polled(policy(None), 0.2).stale_after_s == policy(None).stale_after_s


def test_two_policies_in_words_and_as_a_picture(
    filling: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "timeline.svg"
    arguments = ["replay", str(filling()), "--policy", str(SAMPLE), "--policy", "riskThreshold=70", "--plot", str(plot)]
    assert run(arguments) == 0
    words = capsys.readouterr().out
    assert re.search(r"^ +smollm2 +riskThreshold=70$", words, re.M)
    assert "EvictColdBlocks" in words and "estimated" in words
    drawing = plot.read_text()
    ElementTree.fromstring(drawing)
    assert "first preemption" in drawing and ">evict<" in drawing


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.rec"], "FILE: nowhere.rec"),
        (["FILE", "--can", "fly"], "--can: 'fly'"),
        (["FILE", *("--policy", "riskThreshold=80") * 5], "at most 4"),
        (["FILE", "--plot", "/nowhere/x.svg"], "--plot"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], complaint: str, filling: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(filling(seconds=10))
    assert run(["replay", *(path if word == "FILE" else word for word in words)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert any(line.startswith("error: ") and complaint in line for line in said)
