"""Memory of the engine's control group, v1 or v2, and its pressure stalls (PSI). The folder is injected.

Used memory leaves out inactive file pages, which the kernel drops before it kills anyone. A file that is absent or
says something else leaves its value unknown.
"""

from __future__ import annotations

from pathlib import Path

from ullage_agent.wire import Host

UNLIMITED = 2**53
"""v1 says "no limit" by a number near 2^63."""


def read_host(group: Path) -> Host | None:
    """Memory of the group at `group`: a v2 group's folder, a v1 memory group's, or a v1 root that has `memory/`.
    None where it is none of them."""
    if (group / "memory.current").exists():
        return _read_v2(group)
    for folder in (group, group / "memory"):
        if (folder / "memory.usage_in_bytes").exists():
            return _read_v1(folder)
    return None


def _read_v2(group: Path) -> Host:
    pressure = _pressure(group / "memory.pressure")
    return Host(
        limit_bytes=_limit(_number(group / "memory.max")),
        used_bytes=_used(_number(group / "memory.current"), _stat(group / "memory.stat", "inactive_file")),
        psi_some_avg10=pressure.get("some"),
        psi_full_avg10=pressure.get("full"),
    )


def _read_v1(group: Path) -> Host:
    hierarchical = _stat(group / "memory.stat", "hierarchical_memory_limit")
    limits = [limit for limit in (hierarchical, _number(group / "memory.limit_in_bytes")) if limit is not None]
    return Host(
        limit_bytes=_limit(min(limits, default=None)),
        used_bytes=_used(_number(group / "memory.usage_in_bytes"), _stat(group / "memory.stat", "total_inactive_file")),
    )


def _limit(limit: int | None) -> int | None:
    return limit if limit is not None and 0 < limit < UNLIMITED else None


def _used(current: int | None, droppable: int | None) -> int | None:
    return None if current is None else max(0, current - (droppable or 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _stat(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal() and len(value) < 20:
            return int(value)
    return None


def _pressure(path: Path) -> dict[str, float]:
    """`some avg10=1.23 …` → share of the last ten seconds."""
    found: dict[str, float] = {}
    for line in _text(path).splitlines():
        kind, _, rest = line.partition(" ")
        for pair in rest.split():
            name, _, value = pair.partition("=")
            try:
                share = float(value) / 100.0
            except ValueError:
                continue
            if name == "avg10" and 0.0 <= share <= 1.0:
                found[kind] = share
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
