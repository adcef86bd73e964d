"""One version everywhere, by one command."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version as installed
from pathlib import Path

import pytest
import stamp
from dockerfile import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files with a version, to be changed."""
    for place in stamp.PLACES:
        (tmp_path / place.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / place.path, tmp_path / place.path)
    return tmp_path


def test_all_places_agree_with_what_is_installed() -> None:
    assert stamp.current() == installed("ullage")


def test_no_image_of_ours_has_another_version() -> None:
    tags = {"dev", "dev-cpu", stamp.current(), f"{stamp.current()}-cpu"}
    for file in [*(ROOT / "manifests").rglob("*.yaml"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for tag in re.findall(r"\bullage-(?:operator|agent|engine):([\w.-]+)", file.read_text()):
            assert tag in tags, f"{file}: {tag}"


def test_stamping_changes_every_place(copy: Path) -> None:
    stamp.stamp("1.2.3rc4", copy)
    assert stamp.current(copy) == "1.2.3rc4"
    assert 'version = "1.2.3rc4"' in (copy / "pyproject.toml").read_text()
    changed = (copy / "manifests/operator/deployment.yaml").read_text()
    assert changed.count(":1.2.3rc4\n") == 3
    assert changed.replace("1.2.3rc4", stamp.current()) == (ROOT / "manifests/operator/deployment.yaml").read_text()


@pytest.mark.parametrize("wrong", ["", "1", "v1.2.3", "1.2", "1.2.3 ", "latest"])
def test_what_is_no_version_is_refused(copy: Path, wrong: str) -> None:
    before = stamp.current(copy)
    with pytest.raises(ValueError, match="no version"):
        stamp.stamp(wrong, copy)
    assert stamp.current(copy) == before


def test_a_place_that_differs_is_named(copy: Path) -> None:
    file = copy / "agent" / "Dockerfile"
    file.write_text(file.read_text().replace(f"ARG VERSION={stamp.current()}", "ARG VERSION=9.9.9"))
    with pytest.raises(stamp.Disagreement, match=r"agent/Dockerfile: 9\.9\.9"):
        stamp.current(copy)


def test_a_place_that_lost_its_version_is_named_and_nothing_is_written(copy: Path) -> None:
    file = copy / "engine" / "Dockerfile"
    file.write_text(file.read_text().replace("ARG VERSION=", "ARG OTHER="))
    with pytest.raises(stamp.Disagreement, match="engine/Dockerfile names the version 0 times"):
        stamp.stamp("9.9.9", copy)
    assert "9.9.9" not in (copy / "pyproject.toml").read_text()
