"""The view fits its terminal, says everything, and never by colour alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ullage_agent.wire import EngineIdentity, Forecast, Fragmentation, RiskReport, Snapshot
from ullage_cli.board import Board, Reading, combine
from ullage_cli.screen import LiveScreen, PlainScreen
from ullage_cli.view import ASCII, UNICODE, Counts, Glyphs, Scene, frame, plain_line, sparkline, usage_bar
from ullage_operator.model import Remediation

SCENE = Scene(
    service="smollm2",
    model="smollm2-135m",
    url="http://127.0.0.1:8000",
    replicas=1,
    elapsed_s=43.2,
    phase="load: ramp",
    counts=Counts(ok=7, failed=0),
    threshold=85,
)


def report(score: float = 87.5, *, hot: int = 150, cached: int = 60, free: int = 4, generated: int = 0) -> RiskReport:
    return RiskReport(
        engine=EngineIdentity(type="fake", instance="i"),
        generated_at=0.0,
        sample_age_s=0.1,
        score=score,
        winner="classic",
        terms={"classic": score, "forecast": 40.0},
        snapshot=Snapshot(
            sampled_at=0.0,
            block_tokens=16,
            block_bytes=195840,
            total_blocks=hot + cached + free,
            hot_blocks=hot,
            reclaimable_blocks=cached,
            free_blocks=free,
            running=9,
            waiting=1,
            finished_total=7,
            generated_tokens_total=generated,
        ),
        fragmentation=Fragmentation(external=0.75, internal=0.04, allocator=0.0),
        forecast=Forecast(exhaustion_p10_s=5.0, exhaustion_p50_s=12.0, exhaustion_p90_s=75.0),
    )


def drawn(board: Board, scene: Scene = SCENE, *, width: int = 80, color: bool = False, glyphs: Glyphs = UNICODE) -> str:
    sink = io.StringIO()
    console = Console(
        file=sink, width=width, height=24, force_terminal=color, color_system="truecolor" if color else None
    )
    console.print(frame(board, scene, glyphs, width))
    return sink.getvalue()


@pytest.fixture
def busy(make_record: Callable[..., Remediation], effective: Remediation) -> Board:
    board = Board(pod_uids=["u0"])
    for second in range(70):
        board.take(combine({"demo-0": report(float(second), generated=40 * second)}, (), float(second)), ())
    board.take(combine({"demo-0": report(generated=2800)}, (), 70.0), [make_record()])
    board.take(combine({"demo-0": report(generated=2840)}, (), 71.0), [effective])
    return board


def test_everything_is_on_the_screen(busy: Board) -> None:
    picture = drawn(busy)
    for part in (
        "smollm2-135m at http://127.0.0.1:8000/v1",
        "1 replica",
        "43 s",
        "hot 150 (70 %)",
        "reclaimable 60 (28 %)",
        "free 4 (2 %)",
        "214 blocks of 16 tokens, 40.0 MiB",
        "external 0.75",
        "internal 0.04",
        "allocator 0.00",
        "88 critical by classic",
        "peak 88",
        "full in ~12 s (5 s to 1:15)",
        "classic 88",
        "forecast 40",
        "running 9",
        "waiting 1",
        "ok 7",
        "failed 0",
        "40.0 tokens/s",
        "load: ramp",
        "decided",
        "evict 20 % on demo-0, risk 88 by classic",
        "done",
        "freed 42 blocks, 7.8 MiB",
        "effective",
        "risk 88 → 71",
    ):
        assert part in picture, part


@pytest.mark.parametrize("width", [80, 120, 40])
def test_it_fits_the_terminal(busy: Board, width: int) -> None:
    lines = drawn(busy, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    if width >= 80:
        assert len(lines) <= 23


def test_it_has_one_height_so_that_nothing_jumps(busy: Board) -> None:
    assert len(drawn(busy).splitlines()) == len(drawn(Board(pod_uids=["u0"])).splitlines())


def test_many_remediations_do_not_grow_it(busy: Board, make_record: Callable[..., Remediation]) -> None:
    before = len(drawn(busy).splitlines())
    for index in range(30):
        reading = replace(busy.reading or Reading(at=0, terms={}), at=72.0 + index)
        busy.take(reading, [make_record(name=f"r{index}")])
    assert len(drawn(busy).splitlines()) == before


def test_colours_only_repeat_what_characters_say(busy: Board) -> None:
    plain, colored = drawn(busy), drawn(busy, color=True)
    assert "\x1b[" in colored
    assert "\x1b[" not in plain
    assert all(glyph in plain for glyph in (UNICODE.hot, UNICODE.reclaimable, UNICODE.free))
    assert "\x1b[31m" not in colored  # no red that must be told from a green
    assert "\x1b[32m" not in colored


def test_nothing_known_is_said_as_such() -> None:
    picture = drawn(Board(pod_uids=["u0"]))
    assert "no reading yet" in picture
    assert "unknown" in picture
    assert "none yet" in picture


def test_an_unreachable_agent_is_shown() -> None:
    board = Board(pod_uids=["u0"])
    board.take(combine({}, ("demo-0: no answer within 2 s",), 1.0), ())
    assert "! demo-0: no answer within 2 s" in drawn(board)
    assert "risk –" in plain_line(board, SCENE)


def test_plain_line_has_the_essence(busy: Board) -> None:
    line = plain_line(busy, SCENE)
    for part in (
        "43 s",
        "ramp",
        "risk 88 (classic)",
        "hot 150",
        "reclaimable 60",
        "free 4",
        "of 214",
        "0.75/0.04/0.00",
    ):
        assert part in line, part


@given(hot=st.integers(0, 300), cached=st.integers(0, 300), free=st.integers(0, 300), width=st.integers(10, 200))
def test_the_bar_is_exactly_as_wide_as_asked_and_hides_nothing(hot: int, cached: int, free: int, width: int) -> None:
    reading = Reading(at=0, terms={}, total=hot + cached + free, hot=hot, reclaimable=cached, free=free)
    for glyphs in (UNICODE, ASCII):
        bar = usage_bar(reading, glyphs, width).plain
        if hot + cached + free == 0:
            assert bar == "no reading yet"
            continue
        assert len(bar) == width
        assert (glyphs.hot in bar) == (hot > 0)
        assert (glyphs.reclaimable in bar) == (cached > 0)
        assert (glyphs.free in bar) == (free > 0)


def test_the_worst_engine_speaks_for_all_and_blocks_add_up() -> None:
    reading = combine({"a": report(20, hot=10), "b": report(90, hot=150)}, (), 0.0)
    assert (reading.worst, reading.risk) == ("b", 90)
    assert (reading.hot, reading.running, reading.reporting) == (160, 18, 2)


def test_a_figure_that_one_engine_cannot_say_is_not_made_up() -> None:
    silent = replace(report(10), snapshot=replace(report().snapshot or Snapshot(sampled_at=0), hot_blocks=None))
    assert combine({"a": report(20), "b": silent}, (), 0.0).hot is None


def test_plain_screen_prints_one_line_a_second_and_one_per_event(
    busy: Board, make_record: Callable[..., Remediation]
) -> None:
    lines: list[str] = []
    now = [0.0]
    screen = PlainScreen(lines.append, lambda: now[0])
    for step in range(21):
        now[0] = step / 4
        screen.update(busy, SCENE, busy.happenings[:1] if step == 5 else ())
    assert len([line for line in lines if "* decided: evict 20 %" in line]) == 1
    assert len(lines) == 1 + 6


def test_plain_screen_reports_progress_of_a_long_start_sparingly() -> None:
    lines: list[str] = []
    now = [0.0]
    screen = PlainScreen(lines.append, lambda: now[0])
    for step in range(40):
        now[0] = step / 2
        screen.starting("engine: converting" if step < 30 else "engine: loading", now[0])
    assert len([line for line in lines if "converting" in line]) == 3
    assert len([line for line in lines if "loading" in line]) == 1


def test_live_screen_redraws_in_place_and_keeps_the_last_picture(busy: Board) -> None:
    sink = io.StringIO()
    console = Console(file=sink, width=80, height=24, force_terminal=True, color_system=None)
    with LiveScreen(console) as screen:
        screen.starting("engine-0 is starting: loading", 3.0)
        screen.note("OpenAI API at http://127.0.0.1:8000/v1")
        screen.update(busy, SCENE, ())
        screen.update(busy, replace(SCENE, phase="load: easing off"), ())
    written = sink.getvalue()
    assert "engine-0 is starting: loading" in written
    assert "OpenAI API at http://127.0.0.1:8000/v1" in written
    assert "load: easing off" in written.rsplit("load: ramp", 1)[1]
    assert "\x1b[1A" in written  # the cursor went up to draw over the picture before


def test_a_terminal_without_unicode_gets_ascii_bars(busy: Board) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace"), width=80)
    assert console.encoding == "ascii"
    picture = drawn(busy, glyphs=ASCII)
    assert not set(picture) & set(UNICODE.hot + UNICODE.reclaimable + UNICODE.spark)
    assert "####" in picture


def test_gaps_in_the_minute_are_blank_and_short_ones_are_bridged() -> None:
    line = sparkline([(0.0, 10.0), (2.0, 90.0), (20.0, 50.0), (21.0, None)], 21.0, UNICODE, 60).plain
    assert line[-22:] == "▁▁███" + " " * 13 + "  " + "▅▅"
