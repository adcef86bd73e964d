"""Blocks in files: a bounded folder of slots that survives the process.

A slot is one file, written beside its place and moved there in one act, so that whenever the process dies a slot holds
one whole block or another. A file names what it holds (chain digest, its parent's, tokens, tenant) and what it was
made by (`fingerprint`: format, model, weights, cache type, layout), and carries checksums of both header and bytes.
What does not match is never used. Not synced: after a crash of the machine checksums tell what got lost.

Layout of a file: `MAGIC`, header length (4 bytes), header checksum (8), header (JSON), block bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ullage_engine.errors import ConfigError
from ullage_engine.prefix import PrefixEntry, PrefixIndex
from ullage_engine.tiers.movers import Bytes, checked, checksum
from ullage_engine.tiers.transfer import Copy, Kind, Mover, TierFault

log = logging.getLogger(__name__)

MAGIC = b"ULLKV001"
MAX_HEADER = 64 * 1024
SUFFIX = ".kv"
_FIXED = len(MAGIC) + 12


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    fingerprint: str
    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    tenant: str
    size: int
    checksum: int
    serial: int
    """Greater than that of any file written before."""

    def to_bytes(self) -> bytes:
        """Magic, length, checksum and JSON."""
        body = json.dumps(
            {
                "fingerprint": self.fingerprint,
                "digest": self.digest.hex(),
                "parent": None if self.parent is None else self.parent.hex(),
                "tokens": self.tokens,
                "tenant": self.tenant,
                "size": self.size,
                "checksum": self.checksum,
                "serial": self.serial,
            }
        ).encode()
        return MAGIC + len(body).to_bytes(4, "little") + _sum(body) + body


class Rejected(Exception):
    """A file that cannot be used; the message is one of a few fixed reasons."""


def read_header(data: bytes) -> tuple[Header, int]:
    """The header at the start of a file, and its length with all that precedes the block's bytes.

    Raises:
        Rejected: it is none, or damaged.
    """
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    body = data[_FIXED : _FIXED + length]
    if data[: len(MAGIC)] != MAGIC:
        raise Rejected("another format")
    if len(body) != length or data[len(MAGIC) + 4 : _FIXED] != _sum(body):
        raise Rejected("damaged header")
    found: dict[str, Any] = json.loads(body)
    parent = found["parent"]
    header = Header(
        fingerprint=found["fingerprint"],
        digest=bytes.fromhex(found["digest"]),
        parent=None if parent is None else bytes.fromhex(parent),
        tokens=tuple(found["tokens"]),
        tenant=found["tenant"],
        size=found["size"],
        checksum=found["checksum"],
        serial=found["serial"],
    )
    return header, _FIXED + length


class BlockFolder:
    """The files of one engine, by slot. Opened once; `spill` and `fetch` then run each in a thread of its own.

    Args:
        folder: made if it is not there; no other engine may use it.
        slots: files there may be.
        fingerprint: what must be equal for bytes to be of use.
        host: the slots of the host tier, which files are written from and read into.

    Raises:
        ConfigError: the folder cannot be used, or lacks room.
    """

    def __init__(self, folder: Path, slots: int, fingerprint: str, host: Bytes) -> None:
        self._folder = folder
        self._slots = slots
        self._fingerprint = fingerprint
        self._host = host
        self._serial = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--disk-dir: {str(folder)!r} cannot be used: {error}; give another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--disk-dir: {str(folder)!r} is used by another engine; give each its own") from error
        try:
            self._check_room()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let another engine use the folder."""
        os.close(self._lock)

    def movers(self) -> dict[Kind, Mover]:
        return {"spill": self.spill, "fetch": self.fetch}

    def spill(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        return [self._guarded(self._write, copy) for copy in copies]

    def fetch(self, copies: Sequence[Copy]) -> list[int | TierFault | None]:
        return [self._guarded(self._read, copy) for copy in copies]

    def restore(self, index: PrefixIndex) -> list[tuple[int, PrefixEntry]]:
        """Offer again what an earlier engine left: slots and their entries. What is of no use is ignored, in a line."""
        refused: Counter[str] = Counter()
        found: dict[bytes, tuple[Header, int]] = {}
        self._tidy()
        for slot in range(self._slots):
            try:
                header = self._header(slot)
            except Rejected as problem:
                refused[str(problem)] += 1
                continue
            if header is None:
                continue
            self._serial = max(self._serial, header.serial)
            held = found.get(header.digest)
            if held is None or held[0].serial < header.serial:
                found[header.digest] = (header, slot)
        entries = _offer(index, found)
        refused["no way to it"] += len(found) - len(entries)
        kept = [(found[digest][1], entry) for digest, entry in entries.items()]
        reasons = ", ".join(f"{count} ({reason})" for reason, count in refused.items() if count)
        log.info("disk tier: %d blocks of an earlier run found; ignored: %s", len(kept), reasons or "none")
        return kept

    # -- parts ---------------------------------------------------------------------------------------------------

    def _guarded(self, act: Any, copy: Copy) -> int | TierFault | None:
        try:
            result: int | TierFault | None = act(copy)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return TierFault("unavailable" if isinstance(error, OSError) else "corrupt", f"{self._folder}: {error}")
        return result

    def _write(self, copy: Copy) -> int | TierFault | None:
        data, entry = self._host[copy.slot], copy.entry
        if entry is None:
            raise ValueError("what has no digest can't be named on the disk")
        found = checked(checksum(data), copy)
        if isinstance(found, TierFault):
            return found
        self._serial += 1
        parent = None if entry.parent is None else entry.parent.digest
        header = Header(
            self._fingerprint, entry.digest, parent, entry.tokens, entry.tenant, data.nbytes, found, self._serial
        )
        beside = self._path(copy.file, ".tmp")
        try:
            beside.touch(mode=0o600)
            with beside.open("wb") as file:
                file.write(header.to_bytes())
                file.write(data)
            beside.replace(self._path(copy.file))
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return found

    def _read(self, copy: Copy) -> int | TierFault | None:
        data, entry = self._path(copy.file).read_bytes(), copy.entry
        try:
            header, start = read_header(data)
        except Rejected as problem:
            return TierFault("corrupt", f"{self._path(copy.file)}: {problem}")
        wanted = None if entry is None else (entry.digest, entry.tokens, entry.tenant)
        if (header.digest, header.tokens, header.tenant) != wanted or header.fingerprint != self._fingerprint:
            return TierFault("corrupt", f"{self._path(copy.file)} holds another block than was written to it")
        body = np.frombuffer(data, np.uint8, offset=start)
        if body.nbytes != self._host.shape[1] or checksum(body) != header.checksum:
            return TierFault("corrupt", f"{self._path(copy.file)}: damaged or cut off")
        np.copyto(self._host[copy.slot], body)
        return header.checksum

    def _header(self, slot: int) -> Header | None:
        """What a file at hand says it holds; None where there is no file."""
        path = self._path(slot)
        try:
            with path.open("rb") as file:
                header, start = read_header(file.read(MAX_HEADER))
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Rejected("unreadable") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Rejected("damaged header") from error
        if header.fingerprint != self._fingerprint:
            raise Rejected("another model, cache type or layout")
        if header.size != self._host.shape[1] or size != start + header.size:
            raise Rejected("cut off")
        return header

    def _tidy(self) -> None:
        """Remove what an earlier engine left half written, or beyond the room that this one may use."""
        for path in self._folder.glob("[0-9]*"):
            if path.suffix != SUFFIX or not path.stem.isdecimal() or int(path.stem) >= self._slots:
                path.unlink(missing_ok=True)

    def _path(self, slot: int, more: str = "") -> Path:
        return self._folder / f"{slot:08d}{SUFFIX}{more}"

    def _check_room(self) -> None:
        there = sum(path.stat().st_size for path in self._folder.glob(f"*{SUFFIX}"))
        wanted, free = self._slots * self._host.shape[1], shutil.disk_usage(self._folder).free
        if wanted > free + there:
            raise ConfigError(
                f"--disk-memory: {wanted} bytes do not fit {str(self._folder)!r}, which has {free} bytes free beside "
                f"the {there} it holds already; lower it or give another folder"
            )


def _offer(index: PrefixIndex, found: dict[bytes, tuple[Header, int]]) -> dict[bytes, PrefixEntry]:
    """Publish what can be reached from the start of a prompt, parents first."""
    children: dict[bytes | None, list[Header]] = {}
    for header, _ in found.values():
        children.setdefault(header.parent, []).append(header)
    entries: dict[bytes, PrefixEntry] = {}
    todo: list[tuple[PrefixEntry | None, Header]] = [(None, header) for header in children.get(None, [])]
    while todo:
        parent, header = todo.pop()
        entry = index.publish(parent, header.tokens, None, 0, header.tenant)
        # the digest is of the salt and all tokens before: an equal one proves that the file belongs here
        if entry is None or entry.digest != header.digest:
            if entry is not None:
                index.forget(entry)
            continue
        entries[header.digest] = entry
        todo.extend((entry, child) for child in children.get(header.digest, []))
    return entries


def _sum(body: bytes) -> bytes:
    return checksum(np.frombuffer(body, np.uint8)).to_bytes(8, "little")
