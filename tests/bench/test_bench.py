"""The benchmarks' own arithmetic: a wrong figure there would be believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure import machine, percentile, summary
from throughput import parse, verdict
from tiers import Run, Turn, merged, overlap, total
from workload import Job, mixed_lengths, plain_mix, shared_prefix_mix


def test_summary_of_known_times() -> None:
    found = summary(10.0, [[11.0, 11.5, 12.0], [12.0, 12.1, 14.0]])
    assert (found["requests"], found["generated_tokens"], found["seconds"]) == (2, 6, 4.0)
    assert found["tokens_per_s"] == 1.5
    assert found["ttft_p50_s"] == 1.5
    assert found["ttft_p99_s"] == pytest.approx(1.99)
    assert found["inter_token_p50_s"] == 0.5
    assert summary(0.0, [[1.0]])["inter_token_p50_s"] is None


def test_percentiles() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(101)), 99) == 99
    assert percentile([3, 1, 2], 50) == 2


def test_mixes_have_the_shape_they_say() -> None:
    text = list(range(10_000))
    plain = plain_mix(text, requests=32, prompt_tokens=128)
    assert [len(prompt) for prompt in plain] == [128] * 32
    assert len({token for prompt in plain for token in prompt}) == 32 * 128
    shared = shared_prefix_mix(text, requests=8, groups=2, shared_tokens=64, own_tokens=16)
    assert [len(prompt) for prompt in shared] == [80] * 8
    assert len({tuple(prompt[:64]) for prompt in shared}) == 2
    assert len({tuple(prompt[64:]) for prompt in shared}) == 8
    with pytest.raises(ValueError, match="4096 tokens of text"):
        plain_mix(text[:4000], requests=32, prompt_tokens=128)
    assert mixed_lengths(50, longest=200) == mixed_lengths(50, longest=200)
    assert all(1 <= prompt <= 200 and 1 <= answer <= 200 for prompt, answer, _ in mixed_lengths(500, longest=200))


def test_job_survives_the_way_to_another_process(tmp_path: Path) -> None:
    job = Job(
        name="j",
        model="m",
        prompts=[[1, 2], [3]],
        output_tokens=4,
        dtype="float32",
        threads=1,
        options={"kv_type": "fp8"},
    )
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.total_tokens == 11


def test_ratios_are_null_without_the_peer() -> None:
    mixes = {"plain": {"ullage": {"tokens_per_s": 30.0}, "transformers": {"tokens_per_s": 12.0}}}
    found = verdict(mixes)
    assert (found["ratio_transformers"], found["ratio_vllm_cpu"]) == (2.5, None)
    assert found["ratio_transformers_shared"] is None
    assert verdict({})["tokens_per_s"] is None


def test_the_machine_is_described_without_its_name() -> None:
    import socket

    assert socket.gethostname() not in str(machine())
    assert machine()["cores"] >= 1
    assert parse([]).requests == 32


def test_overlap_counts_no_time_twice() -> None:
    assert merged([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert total([(0, 2), (3, 4)]) == 3
    assert overlap([(0, 2), (1, 2), (3, 4)], [(1, 3.5)]) == pytest.approx(1.5 / 3)
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(0, 1)]) == 0


def test_returning_turns_are_those_after_the_first() -> None:
    run = Run([Turn(0, 0, 5.0, [1]), Turn(1, 1, 1.0, [4]), Turn(1, 0, 5.0, [3]), Turn(0, 1, 2.0, [2])])
    assert sorted(run.returning()) == [1.0, 2.0]
    assert run.answers() == [[1], [2], [3], [4]]


def test_ratios_of_speculation_are_of_tokens_per_second() -> None:
    import speculation

    plain = speculation.Run(seconds=10.0, tokens=100, steps=100, drafted=0, accepted=0)
    found = speculation.summary(
        {"copy": (plain, speculation.Run(seconds=4.0, tokens=80, steps=20, drafted=90, accepted=60))}
    )
    assert found["ratio_copy"] == 2.0
    assert found["acceptance"] == {"copy": 0.667}
    assert found["tokens_per_step"] == {"copy": 4.0}
    assert found["tokens_per_s"] == {"copy": [10.0, 20.0]}
    assert speculation.summary({"free": (plain, plain)})["acceptance"] == {"free": 0.0}
