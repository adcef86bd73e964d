"""Where the control plane's binaries are looked for, and where they can be built."""

from __future__ import annotations

from pathlib import Path

import pytest
from assets import BINARIES, AssetsInvalid, complete, locate, obstacle

DEBIAN = 'ID=debian\nVERSION_ID="12"\n'


def filled(folder: Path, *, without: str = "") -> Path:
    folder.mkdir()
    for name in BINARIES:
        if name != without:
            (folder / name).touch(0o755)
    return folder


def test_the_named_folder_comes_first(tmp_path: Path) -> None:
    named, default = filled(tmp_path / "named"), filled(tmp_path / "default")
    assert locate({"KUBEBUILDER_ASSETS": str(named)}, default=default) == named
    assert locate({}, default=default) == default
    assert locate({}, default=tmp_path / "none") is None


def test_a_wrong_name_is_a_mistake_even_where_the_default_would_do(tmp_path: Path) -> None:
    default, named = filled(tmp_path / "default"), filled(tmp_path / "named", without="etcd")
    with pytest.raises(AssetsInvalid, match="etcd"):
        locate({"KUBEBUILDER_ASSETS": str(named)}, default=default)


def test_complete_means_executable(tmp_path: Path) -> None:
    folder = filled(tmp_path / "f")
    assert complete(folder)
    (folder / "etcd").chmod(0o644)
    assert not complete(folder)


@pytest.mark.parametrize(
    ("os_release", "machine", "user_id", "expected"),
    [
        (DEBIAN, "x86_64", 0, None),
        ("ID=ubuntu\nVERSION_ID=24.04\n", "x86_64", 0, "needs Debian 12, this is ubuntu 24.04"),
        ("", "x86_64", 0, "needs Debian 12, this is ? ?"),
        (DEBIAN, "aarch64", 0, "needs amd64, this is aarch64"),
        (DEBIAN, "x86_64", 1000, "needs root"),
    ],
)
def test_obstacles(os_release: str, machine: str, user_id: int, expected: str | None) -> None:
    found = obstacle(os_release, machine=machine, user_id=user_id)
    assert (found is None) if expected is None else (expected in (found or ""))
