"""The documentation names every reason that a decision can have, with the words of the code."""

from __future__ import annotations

import re
from pathlib import Path

from ullage_operator.policy import Reason
from ullage_operator.policy import types as policy_types

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operator.md"


def test_every_reason_is_explained() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE))
    assert set(rows) == {reason.value for reason in Reason}
    source = Path(policy_types.__file__ or "").read_text()
    found = re.findall(r'^    [A-Z_]+ = "(\w+)"\n    """(.+?)"""', source, re.MULTILINE | re.DOTALL)
    assert rows == {name: " ".join(text.split()) for name, text in found}
