"""Private folders: gone afterwards, swept after a killed run, never taken from somebody alive."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ullage_cli.errors import InputError
from ullage_cli.scratch import scratch_folder, state_folder, sweep

LONG_AGO = 1_000_000_000


def test_it_is_private_short_and_gone_afterwards(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "0.sock").write_text("")
    assert list(tmp_path.iterdir()) == []
    with scratch_folder() as folder:
        assert len(str(folder / "0.sock")) < 100


def test_it_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch_folder(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path: Path) -> None:
    source = (
        "import os, pathlib, sys; from ullage_cli.scratch import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    sweep(tmp_path)
    assert left.exists()  # it could be one that is being made at this moment
    os.utime(left, (LONG_AGO, LONG_AGO))
    sweep(tmp_path)
    assert not left.exists()


def test_a_living_run_keeps_its_folder(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        os.utime(folder, (LONG_AGO, LONG_AGO))
        sweep(tmp_path)
        assert folder.exists()


def test_links_and_strangers_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "ullage-up-link").symlink_to(other)
    (tmp_path / "ullage-up-file").write_text("")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "ullage-up-file", "ullage-up-link"]


def test_a_state_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with state_folder(tmp_path / "a" / "b") as folder:
        assert folder.is_dir()
        with pytest.raises(InputError, match="is in use by another"), state_folder(folder):
            raise AssertionError("held twice")
    with state_folder(folder):
        pass


def test_a_state_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    complaint = r"--state-dir: cannot use .*/file/x: .*; name another folder"
    with pytest.raises(InputError, match=complaint), state_folder(tmp_path / "file" / "x"):
        raise AssertionError("made below a file")
