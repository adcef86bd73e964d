"""The summary says what reports and records said, and its JSON has exactly the promised keys."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ullage_cli.board import Board, Reading
from ullage_cli.commands import conclude
from ullage_cli.load import Tally
from ullage_cli.session import Ending
from ullage_cli.summary import json_line, outcome, text
from ullage_operator.model import Remediation


def reading(at: float, risk: float | None, generated: int = 0) -> Reading:
    return Reading(at=at, terms={}, reporting=1, risk=risk, finished=9, generated=generated)


@pytest.fixture
def board(make_record: Callable[..., Remediation], effective: Remediation) -> Board:
    board = Board(pod_uids=["u0"])
    board.take(reading(0.0, 10.0), ())
    board.take(reading(5.0, 88.4, 0), [make_record()])
    board.take(reading(10.0, 70.0, 200), [effective])
    board.take(reading(30.0, 20.04, 400), [])
    board.take(reading(60.0, 20.04, 400), [])
    return board


def test_json_has_exactly_the_promised_keys(board: Board) -> None:
    tally = Tally(ok=7, failed=1, refusals=2, failures=["HTTP 500"])
    assert json.loads(json_line(outcome(board, tally, 61.23))) == {
        "risk_peak": 88.4,
        "risk_after": 20.0,
        "bytes_freed": 42 * 195840,
        "blocks_freed": 42,
        "remediations": 1,
        "requests_ok": 7,
        "requests_failed": 1,
        "tokens_per_s": 16.0,  # 400 tokens from second 5, where the first came, to second 30, where the last did
        "seconds": 61.2,
    }
    assert "\n" not in json_line(outcome(board, tally, 61.23))


def test_a_record_of_an_earlier_run_that_ends_in_this_one_does_not_count(
    board: Board, make_record: Callable[..., Remediation]
) -> None:
    before, settled = outcome(board, None, 1.0), board.settled
    left = make_record(
        "demo-evict-0", {"podUID": "gone"}, answeredAt="2026-01-01T00:00:01Z", bytesFreed=7, blocksFreed=7
    )
    ended = left.model_copy(update={"status": left.status.model_copy(update={"phase": "Failed"})})
    assert board.take(reading(61.0, 20.04, 400), [left]) == []
    assert board.take(reading(62.0, 20.04, 400), [ended]) == []
    assert outcome(board, None, 1.0) == before
    assert board.settled == settled


def test_words(board: Board) -> None:
    tally = Tally(ok=7, failed=1, refusals=2, failures=["HTTP 500"])
    assert text(outcome(board, tally, 61.23)).splitlines() == [
        "Served for 1:01 at 16.0 tokens/s: 7 requests answered, 1 failed.",
        "Refused for a moment and then answered: 2 times.",
        "  failed 1 times: HTTP 500",
        "Risk peaked at 88 and is 20 now; 1 remediation freed 42 blocks (7.8 MiB):",
        "  evict 20 % on demo-0: freed 42 blocks, risk 88 → 71, effective",
    ]


def test_what_was_cut_short_is_said(board: Board) -> None:
    tally = Tally(ok=7, abandoned=2)
    assert text(outcome(board, tally, 61.23, "the end of --duration, in phase 'ramp'")).splitlines()[:2] == [
        "Served for 1:01 at 16.0 tokens/s: 7 requests answered, 0 failed.",
        "Cut short by the end of --duration, in phase 'ramp': the demo was not done, 2 requests were cut off.",
    ]


def test_without_a_load_the_engines_counts_stand_and_unknown_stays_unknown(board: Board) -> None:
    result = outcome(board, None, 61.0).to_json()
    assert (result["requests_ok"], result["requests_failed"]) == (9, None)
    assert outcome(Board(pod_uids=["u0"]), None, 1.0).to_json()["risk_peak"] is None
    assert "never read" in text(outcome(Board(pod_uids=["u0"]), None, 1.0))


@pytest.mark.parametrize(
    ("failed", "problem", "interrupted", "status"),
    [(0, None, False, 0), (1, None, False, 1), (0, "engine died", False, 1), (0, None, True, 130), (2, None, True, 1)],
)
def test_exit_status(
    board: Board,
    capsys: pytest.CaptureFixture[str],
    failed: int,
    problem: str | None,
    interrupted: bool,
    status: int,
) -> None:
    ending = Ending(outcome=outcome(board, Tally(ok=1, failed=failed), 1.0), problem=problem, interrupted=interrupted)
    assert conclude(ending, to_the_end=True) == status
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["requests_failed"] == failed
    assert captured.err == (f"error: {problem}\n" if problem else "")


def test_being_stopped_is_the_normal_end_of_serving(board: Board) -> None:
    ending = Ending(outcome=outcome(board, None, 1.0), interrupted=True)
    assert conclude(ending, to_the_end=False) == 0
    assert conclude(Ending(interrupted=True), to_the_end=False) == 130
