"""Remediation records as YAML files: durable, readable by people, and theirs to approve.

One file a record, replaced atomically; whoever reads a file sees it whole, before or after. A person approves a
proposal by setting `spec.approved: true` in its file. Non-goal: deciding which records to keep; the sweep does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from ullage_operator.model import Remediation

from .errors import InputError

_SUFFIX = ".yaml"
_UNFINISHED = ".tmp"


class RecordFolder:
    """The records of one service in one folder; the operator's `RecordStore` for local mode."""

    def __init__(self, folder: Path) -> None:
        self.problems: dict[str, str] = {}
        """What is wrong with files that cannot be read now, by file name. Their last good state is used."""
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, int, int], Remediation]] = {}

    def open(self) -> None:
        """Make the folder where needed, clear what a crash left, and insist that every record is readable.

        Raises:
            InputError: the folder or a record in it cannot be used.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob(f".*{_UNFINISHED}"):
                unfinished.unlink()
            self._read_all()
        except OSError as error:
            raise InputError(f"--state-dir: cannot use {self._folder}: {error.strerror}") from error
        for name, problem in self.problems.items():
            raise InputError(f"--state-dir: {self._folder / name}: {problem}; repair or remove the file")

    async def load(self) -> Sequence[Remediation]:
        """All records, in any order."""
        return self._read_all()

    async def save(self, record: Remediation) -> None:
        """Create or replace the record's file; on disk when this returns."""
        final = self._path(record.metadata.name)
        replace_file(final, record)
        self._known[final.name] = (_version(final), record)

    async def delete(self, name: str) -> None:
        """Remove a record's file, if there is one."""
        self._path(name).unlink(missing_ok=True)
        self._known.pop(self._path(name).name, None)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _read_all(self) -> list[Remediation]:
        self.problems = {}
        paths = {path.name: path for path in self._folder.glob(f"[!.]*{_SUFFIX}")}
        self._known = {name: known for name, known in self._known.items() if name in paths}
        for name, path in paths.items():
            try:
                self._refresh(name, path)
            except (OSError, ValueError, yaml.YAMLError) as error:
                self.problems[name] = f"is not a Remediation record: {_one_line(error)}"
        return [record for _, record in self._known.values()]

    def _refresh(self, name: str, path: Path) -> None:
        version = _version(path)
        if name in self._known and self._known[name][0] == version:
            return
        record = Remediation.read(yaml.safe_load(path.read_text(encoding="utf-8")))
        if f"{record.metadata.name}{_SUFFIX}" != name:
            raise ValueError(f"metadata.name is {record.metadata.name!r}, which does not match the file's name")
        self._known[name] = (version, record)


def replace_file(final: Path, record: Remediation) -> None:
    """Write a record's file as a whole: whoever reads it sees the old one or the new one."""
    unfinished = final.with_name(f".{final.name}.{os.getpid()}{_UNFINISHED}")
    with unfinished.open("w", encoding="utf-8") as file:
        yaml.safe_dump(record.write(), file, sort_keys=False, allow_unicode=True, width=110)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(final)
    _sync_folder(final.parent)


def _version(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc']) or 'document'}: {first['msg']}"
    return " ".join(str(error).split())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
