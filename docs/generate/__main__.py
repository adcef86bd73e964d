"""Write what is generated in the docs, or check it: `python docs/generate [--check]`.

References come from the definitions in the code, pictures from `pictures.py`. With `--check` nothing is written, and
the exit status is 1 where a file differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands_page
import crd_page
import metrics_page
import pictures

DOCS = Path(__file__).resolve().parents[1]
FILES: dict[str, Callable[[], str]] = {
    "reference-crd.md": crd_page.page,
    "reference-metrics.md": metrics_page.page,
    "reference-cli.md": commands_page.page,
    **{f"images/{name}.svg": draw for name, draw in pictures.PICTURES.items()},
}


def main(arguments: list[str]) -> int:
    """Write or check all files; the exit status."""
    stale = []
    for name, make in FILES.items():
        file, text = DOCS / name, make()
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            file.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        sys.stderr.write(f"error: docs/{', docs/'.join(stale)} differ from the code; run python docs/generate\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
