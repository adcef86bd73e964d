"""The disk tier: what survives a restart, and files that are not what they were."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import numpy as np
import pytest
from tiered import Tiered, expected, make_tiered

from ullage_engine.errors import ConfigError
from ullage_engine.tiers.disk import MAGIC, BlockFolder
from ullage_engine.tiers.manager import Bounds
from ullage_engine.tiers.scripted import Script

PROMPT = [1, 2, 3, 4] * 4
MORE = [4, 3, 2, 1] * 8


def start(folder: Path, **options: object) -> Tiered:
    settings: dict[str, object] = {"blocks": 16, "host": 8, "disk": 16, "folder": folder}
    return make_tiered(**(settings | options))  # type: ignore[arg-type]


def stop(tiered: Tiered, *, keep: bool = True) -> None:
    tiered.engine.close(keep=keep)
    assert tiered.folder is not None
    tiered.folder.close()


def found(tiered: Tiered) -> int:
    return len(tiered.engine.pool.match(PROMPT))


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What an engine left that ended in order."""
    tiered = start(tmp_path)
    tiered.ask([*PROMPT, 0])
    stop(tiered)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def test_a_restarted_engine_finds_what_an_earlier_one_left(left: Path) -> None:
    tiered = start(left)
    assert found(tiered) == 4
    outputs = tiered.submit("again", [*PROMPT, 2], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 2], 3)
    assert outputs[0].cached_tokens == 16
    assert tiered.residency.manager.tally["disk"].hit_tokens == 16
    assert tiered.engine.snapshot(None, draining=False).disk is not None
    stop(tiered)


def test_only_the_owner_can_read_the_files(left: Path) -> None:
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(left))


def test_what_leaves_the_host_tier_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    tiered = start(tmp_path, blocks=9, host=6, disk=40)
    tiered.ask([*PROMPT, 0])
    for i in range(5):
        tiered.ask([i, i, i, i, *MORE[:20], 0])
    assert tiered.residency.manager.tally["host"].evicted > 0
    entries = tiered.engine.pool.match(PROMPT)
    assert any(entry.block is None and not tiered.residency.manager.host.holds(entry) for entry in entries)
    outputs = tiered.submit("again", [*PROMPT, 2], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 2], 3)
    assert outputs[0].cached_tokens > 0
    assert tiered.residency.manager.tally["disk"].hit_tokens > 0
    stop(tiered)


def test_what_waits_is_brought_to_the_host_tier_before_its_turn(left: Path) -> None:
    tiered = start(left, sequences=1)
    tiered.submit("first", [3] * 5, 8)
    tiered.engine.step()
    tiered.submit("next", [*PROMPT, 2], 3)
    tiered.engine.step()
    for _ in range(4):
        tiered.engine.step()
    assert tiered.engine.scheduler.waiting, "the first one ended too soon to show it"
    assert all(tiered.residency.manager.host.holds(entry) for entry in tiered.engine.pool.match(PROMPT))
    tiered.finish()
    stop(tiered)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 3])


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 20] ^= 1
    path.write_bytes(data)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00" * 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [cut, flip_last, flip_header, garbage, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("running", [False, True], ids=["before the start", "while it runs"])
def test_a_damaged_file_costs_a_computation_and_nothing_else(left: Path, damage: object, running: bool) -> None:
    if not running:
        damage(files(left)[1])  # type: ignore[operator]
    tiered = start(left)
    if running:
        for path in files(left):
            damage(path)  # type: ignore[operator]
    outputs = tiered.submit("again", [*PROMPT, 2], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 2], 3)
    tiered.settle()
    tiered.engine.check_integrity()
    assert tiered.engine.pool.in_flight == 0
    stop(tiered)


def test_a_file_under_another_name_is_not_taken_for_what_it_replaced(left: Path) -> None:
    tiered = start(left)
    first, second = files(left)[:2]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    outputs = tiered.submit("again", [*PROMPT, 2], 3)
    tiered.finish()
    assert [output.token for output in outputs] == expected([*PROMPT, 2], 3)
    assert tiered.residency.manager.tally["disk"].failed > 0
    stop(tiered)


def test_another_models_files_are_ignored_with_a_message(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tiered = start(left, fingerprint="another")
    assert found(tiered) == 0
    assert "4 (another model, cache type or layout)" in caplog.text
    assert tiered.ask([*PROMPT, 2], 3) == expected([*PROMPT, 2], 3)
    stop(tiered)


def test_blocks_without_their_prefix_are_ignored(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for path in files(left):
        if b'"parent": null' in path.read_bytes():
            path.unlink()
    tiered = start(left)
    assert found(tiered) == 0
    assert "3 (no way to it)" in caplog.text
    stop(tiered)


@pytest.mark.parametrize("steps", range(0, 30, 3))
def test_killed_in_any_state_it_starts_again(tmp_path: Path, steps: int) -> None:
    tiered = start(tmp_path, script=Script(progress=0.5), host=4)
    for i in range(3):
        tiered.submit(f"r{i}", [*PROMPT[: 4 * (i + 1)], i], 6)
    for _ in range(steps):
        tiered.engine.step()
    (tmp_path / "00000003.kv.tmp").write_bytes(b"half")
    assert tiered.folder is not None
    tiered.folder.close()  # what the kernel does for a process that is killed
    again = start(tmp_path)
    assert not (tmp_path / "00000003.kv.tmp").exists()
    assert again.ask([*PROMPT, 2], 3) == expected([*PROMPT, 2], 3)
    again.engine.check_integrity()
    stop(again)


def test_a_full_disk_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = start(tmp_path, host=4, bounds=Bounds(pause_s=30.0))
    full = tmp_path / "no room"
    monkeypatch.setattr(tiered.folder, "_folder", full)  # a folder that is not there refuses all writes
    for i in range(4):
        tiered.ask([i, *PROMPT, 0], 1)
    tally = tiered.residency.manager.tally["disk"]
    assert tally.failed > 0
    assert tally.stored == 0
    before = tally.failed
    for i in range(4):
        tiered.ask([i, i, *PROMPT, 0], 1)
    assert tally.failed == before, "a disk that had just failed was asked again"
    tiered.engine.check_integrity()
    monkeypatch.undo()
    tiered.clock.now += 31
    tiered.ask([*PROMPT, 3, 3, 3, 3], 1)
    tiered.ask([2, *PROMPT, 3, 3, 3], 1)
    assert tally.stored > 0
    stop(tiered)


def test_one_folder_serves_one_engine(left: Path) -> None:
    tiered = start(left)
    with pytest.raises(ConfigError, match=r"--disk-dir: .* is used by another engine"):
        start(left)
    stop(tiered)
    stop(start(left))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--disk-dir: .* cannot be used"):
        start(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--disk-memory: .* do not fit"):
        BlockFolder(tmp_path / "big", 1 << 40, "f", np.zeros((1, 1 << 20), np.uint8))
    stop(start(tmp_path / "big"))


def test_a_smaller_budget_removes_what_is_beyond_it(left: Path) -> None:
    tiered = start(left, disk=2)
    assert len(files(left)) <= 2
    stop(tiered)
