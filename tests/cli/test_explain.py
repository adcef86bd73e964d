"""`ullage explain`: every part of the story, the policy asked again, and where records are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_cli.commands import run
from ullage_cli.explain.otherwise import ask_again, otherwise
from ullage_cli.explain.story import REASONS, tell
from ullage_cli.running import announced
from ullage_operator.manifest import load_manifest
from ullage_operator.model import InferenceService, Remediation

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests" / "samples" / "smollm2.yaml"
SEEN: dict[str, Any] = {
    "sampledAt": "2026-01-01T00:00:00Z",
    "score": 88.4,
    "winner": "forecast",
    "terms": {"forecast": 88.4, "classic": 71.0},
    "totalBlocks": 200,
    "hotBlocks": 150,
    "reclaimableBlocks": 30,
    "freeBlocks": 20,
    "largestFreeRunBlocks": 5,
    "running": 12,
    "waiting": 3,
    "exhaustionSeconds": 9.0,
}


@pytest.fixture
def record(make_record: Callable[..., Remediation]) -> Remediation:
    """An eviction that worked, with all that was seen."""
    return make_record(
        spec={"inputs": SEEN},
        phase="Succeeded",
        startedAt="2026-01-01T00:00:00Z",
        answeredAt="2026-01-01T00:00:01Z",
        finishedAt="2026-01-01T00:00:06Z",
        attempts=1,
        blocksFreed=42,
        bytesFreed=42 * 195840,
        before=SEEN,
        after=SEEN | {"sampledAt": "2026-01-01T00:00:06Z", "score": 51.0, "hotBlocks": 110},
    )


@pytest.fixture
def service() -> InferenceService:
    return load_manifest(SAMPLE)


def test_the_story_has_the_figures(record: Remediation, service: InferenceService) -> None:
    story = tell(record, otherwise(record, service))
    assert story.title == "demo-evict-1: evict 20 % on demo-0, Succeeded"
    assert "was 88 of 100, by forecast (how soon admitted work would no longer fit)" in story.seen
    assert "Other terms: classic 71" in story.seen
    assert "Of 200 blocks 150 hot (75 %), 30 cached, 20 free in runs of up to 5." in story.seen
    assert "12 requests ran, 3 waited." in story.seen
    assert story.rule.startswith("EvictColdBlocks: Risk is at the threshold")
    assert "It freed 42 blocks, 7.8 MiB." in story.done
    assert "Risk went from 88 to 51 within 6 s. Hot blocks went from 75 to 55 % of the pool." in story.outcome
    assert "full at about 2026-01-01 00:00:09 UTC" in story.otherwise


def test_the_alternative_is_the_policys_own_answer(record: Remediation, service: InferenceService) -> None:
    decision = ask_again(record, service, ())
    assert decision.action == "compact"  # 20 free blocks in runs of 5: scattered
    together = record.model_copy(
        update={"spec": record.spec.model_copy(update={"inputs": record.spec.inputs.model_copy(
            update={"largest_free_run_blocks": 20})})}
    )  # fmt: skip
    assert ask_again(together, service, ()).action == "throttle"
    assert "With evict turned off the policy would have taken throttle" in otherwise(together, service)


def test_later_records_do_not_change_the_alternative(
    record: Remediation, service: InferenceService, make_record: Callable[..., Remediation]
) -> None:
    later = make_record(
        "later", spec={"action": "compact"}, phase="Ineffective", finishedAt="2026-01-01T01:00:00Z",
        proposedAt="2026-01-01T00:59:00Z",
    )  # fmt: skip
    assert ask_again(record, service, (later,)) == ask_again(record, service, ())


def test_what_was_only_noted_down_or_proposed_was_not_done(make_record: Callable[..., Remediation]) -> None:
    noted = make_record(spec={"mode": "Observe"}, phase="Expired")
    assert tell(noted, "").done.startswith("Nothing: the mode was Observe")
    waiting = make_record(spec={"mode": "Propose"}, phase="Proposed")
    story = tell(waiting, "")
    assert "never started" in story.done and "waits for approval" in story.outcome


def test_approval_and_repeated_sending_are_told(make_record: Callable[..., Remediation]) -> None:
    sent = make_record(
        spec={"mode": "Propose", "approved": True, "approvedBy": "ann"},
        phase="Running",
        startedAt="2026-01-01T00:00:00Z",
        attempts=3,
    )
    done = tell(sent, "").done
    assert "approved by ann" in done and "sent 3 times under one key" in done


def test_an_eviction_of_nothing_is_told(make_record: Callable[..., Remediation]) -> None:
    empty = make_record(
        phase="Ineffective", startedAt="2026-01-01T00:00:00Z", answeredAt="2026-01-01T00:00:01Z", blocksFreed=0
    )
    assert "It freed nothing." in tell(empty, "").done


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"action": "release"}, "lifted by itself"),
        ({"action": "scaleDown"}, "one engine more than the load needed"),
        ({"inputs": SEEN | {"winner": "host"}}, "memory outside the cache (host)"),
        ({"inputs": SEEN | {"exhaustionSeconds": None}}, "not known: no exhaustion was in sight"),
    ],
)
def test_the_alternative_of_each_kind(
    make_record: Callable[..., Remediation], spec: dict[str, Any], expected: str
) -> None:
    assert expected in otherwise(make_record(spec=spec), None)


def test_rules_are_told_as_the_operators_page_tells_them() -> None:
    page = (ROOT / "docs" / "operator.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", page, re.M))
    for reason, words in REASONS.items():
        assert rows[reason] == words


def written(record: Remediation, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{record.metadata.name}.yaml"
    file.write_text(yaml.safe_dump(record.write()))
    return file


def test_a_record_in_a_file(record: Remediation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(written(record, tmp_path))]) == 0
    words = capsys.readouterr().out
    assert [line for line in words.splitlines() if line and not line.startswith(" ")][1:] == [
        "Seen",
        "Rule",
        "Done",
        "Outcome",
        "Otherwise",
    ]
    assert all(len(line) <= 96 for line in words.splitlines())


def test_a_record_of_a_local_run_after_its_end(
    record: Remediation, service: InferenceService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "smollm2"
    written(record, state / "remediations")
    with announced(state, service, [("smollm2-0", "http://127.0.0.1:9/metrics")]):
        pass
    assert run(["explain", "demo-evict-1", "--local", "--state-dir", str(tmp_path), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "the policy would have taken" in document["otherwise"]
    assert document["record"]["metadata"]["name"] == "demo-evict-1"


def test_a_name_that_is_not_there(record: Remediation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(record, tmp_path / "smollm2" / "remediations")
    assert run(["explain", "other", "--local", "--state-dir", str(tmp_path)]) == 2
    assert "there are demo-evict-1" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["kind: [", "kind: Other\n", "text"])
def test_a_file_that_is_no_record(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    assert run(["explain", str(file)]) == 2
    assert "is no Remediation" in capsys.readouterr().err
