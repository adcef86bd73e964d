"""Small programs that run inside a service's pods, not in the operator: standard library only, put into the pod's
spec as `python3 -c SOURCE ARGUMENTS`, so that images need nothing but the Python that their server runs on.

    copy_gate   init container of the agent's image: lays the admission gate where the engine loads it from
    leave       preStop of the engine: asks for a drain, and waits until it is done
    drain       preStop of the agent: has the agent drain the engine, and keeps the agent alive meanwhile
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def command(name: str) -> tuple[str, ...]:
    """The words that run a hook, its arguments left out."""
    return "python3", "-c", files(__name__).joinpath(f"{name}.py").read_text(encoding="utf-8")
