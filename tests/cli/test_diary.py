"""The program's own log: made when needed, and honest when it cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ullage_cli.diary import Diary
from ullage_cli.errors import BrokenLoop, InputError


def test_warnings_go_to_the_file_and_not_over_the_view(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "ullage.log"
    with Diary(file):
        assert not file.exists()
        logging.getLogger("aiohttp.server").warning("a request could not be handled")
    logging.getLogger("aiohttp.server").debug("later")
    assert file.read_text().endswith("WARNING aiohttp.server: a request could not be handled\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [InputError("bad"), BrokenLoop("gone"), BrokenPipeError(), KeyboardInterrupt()])
def test_what_was_foreseen_passes(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Diary(tmp_path / "ullage.log"):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("/dev/full", "OSError: [Errno 28] No space left on device"),
        (".", "IsADirectoryError: [Errno 21] Is a directory: '{file}'"),
    ],
)
def test_a_log_that_cannot_be_written_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, problem: str
) -> None:
    path = tmp_path / file
    with pytest.raises(BrokenLoop) as caught, Diary(path):
        raise RuntimeError("lost")
    assert str(caught.value) == f"{__name__} broke: RuntimeError: lost (no log: {problem.format(file=path)})"
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with (
        pytest.raises(InputError, match=r"--state-dir: cannot write .*ullage\.log"),
        Diary(tmp_path / "logs" / "ullage.log"),
    ):
        raise AssertionError("entered")
