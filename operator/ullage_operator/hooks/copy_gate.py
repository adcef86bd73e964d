"""copy_gate FOLDER: lay the gate, one file of the standard library alone, beside an engine that loads it."""

import importlib.util
import pathlib
import sys


def main(folder: pathlib.Path) -> None:
    spec = importlib.util.find_spec("ullage_agent.gate")
    if spec is None or spec.origin is None:
        raise SystemExit("the agent's image has no admission gate; use the image of this operator's release")
    package = folder / "ullage_agent"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "gate.py").write_bytes(pathlib.Path(spec.origin).read_bytes())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
