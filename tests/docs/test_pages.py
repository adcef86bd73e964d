"""The pages themselves: generated parts are up to date, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fences import ROOT, matches, pages


def test_generated_pages_and_pictures_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", pages(), ids=[str(page.relative_to(ROOT)) for page in pages()])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|#", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve()
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("expected", "printed", "fits"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\n…", "a\nb\nc", True),
        ("…\nc", "a\nb\nc", True),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("a\n…\nd", "a\nd", True),
        ("a\n…", "a", True),
        ("a\nc", "a\nb\nc", False),
        ("…\nx\n…", "a\nb", False),
    ],
)
def test_dots_stand_for_any_lines(expected: str, printed: str, fits: bool) -> None:
    assert matches(expected, printed) is fits
