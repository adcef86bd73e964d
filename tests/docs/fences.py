"""Commands in the docs: found, with the mark that says how each is run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLS = ("sh", "bash", "console")
_MARK = re.compile(r"^<!-- (run|not run): (.+) -->$")
_OUTPUT = "<!-- output -->"
RUNBOOK = "runbook"

README: dict[str, str] = {
    "make demo": "not run: installs the whole product; CI runs the same program by tests/e2e and docs/quickstart.md",
    "kubectl apply -k manifests/default": "run: cluster",
    "kubectl get infsvc,remed": "run: cluster",
    "pip install -c constraints.txt '.[agent]'": "not run: installs packages; the rest is in docs/quickstart.md",
}
"""How each block of README.md is run, by its first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of commands."""

    file: str
    line: int
    text: str
    kind: str
    """How it is run; empty where it is not."""
    reason: str = ""
    """Why it is not run."""
    output: str | None = None
    """What it must print, `…` standing for anything."""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"


def pages() -> list[Path]:
    """All pages that may hold commands."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[Block]:
    """All blocks of commands; one without a mark has neither kind nor reason."""
    return [block for page in pages() for block in _blocks(page)]


def _blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    name, found = str(page.relative_to(ROOT)), []
    index = 0
    while index < len(lines):
        fence = re.match(r"^```(\w*)", lines[index])
        if not fence:
            index += 1
            continue
        end = next(i for i in range(index + 1, len(lines)) if lines[i].startswith("```"))
        if fence[1] in SHELLS:
            text = "\n".join(lines[index + 1 : end])
            kind, reason = _mark(name, lines[index - 1] if index else "", text)
            found.append(
                Block(file=name, line=index + 1, text=text, kind=kind, reason=reason, output=_output(lines, end + 1))
            )
        index = end + 1
    return found


def _mark(name: str, before: str, text: str) -> tuple[str, str]:
    said = _MARK.match(before.strip())
    if said is None and name == "README.md":
        said = _MARK.match(f"<!-- {README.get(text.splitlines()[0].partition(' #')[0].strip(), '')} -->")
    if said is not None:
        return (said[2], "") if said[1] == "run" else ("", said[2])
    return (RUNBOOK, "") if name.startswith("docs/runbooks/") else ("", "")


def _output(lines: list[str], at: int) -> str | None:
    if at + 1 >= len(lines) or lines[at].strip() != _OUTPUT:
        return None
    end = next(i for i in range(at + 2, len(lines)) if lines[i].startswith("```"))
    return "\n".join(lines[at + 2 : end])


def matches(expected: str, printed: str) -> bool:
    """Whether a text fits; a line `…` stands for any lines, or none."""
    wanted = [line.rstrip() for line in expected.splitlines()]
    return _fits(wanted, [line.rstrip() for line in printed.strip().splitlines()])


def _fits(wanted: list[str], found: list[str]) -> bool:
    if not wanted:
        return not found
    if wanted[0] == "…":
        return any(_fits(wanted[1:], found[start:]) for start in range(len(found) + 1))
    return bool(found) and wanted[0] == found[0] and _fits(wanted[1:], found[1:])
