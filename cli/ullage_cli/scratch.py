"""A short private folder for sockets, certificate and token of one run.

Unix socket paths end at about a hundred characters, so the folder lies in the system's temporary directory
and not in the state folder. It is removed at the end; what a killed run left is removed by the next one,
which sees by the lock that nobody lives there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

from .errors import InputError

PREFIX = "ullage-up-"
_LOCK = "lock"
_BEING_MADE_S = 60.0


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder that only this user may enter, gone afterwards."""
    root = parent or Path(tempfile.gettempdir())
    sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        with exclusive(folder / _LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove folders of this user whose owner has died."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, or removed by somebody else at this moment
            status = folder.lstat()
            if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if time.time() - status.st_mtime < _BEING_MADE_S:
                continue
            with exclusive(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file; the kernel releases it when the holder dies.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def state_folder(folder: Path) -> Iterator[Path]:
    """The folder of records and logs, made where needed and held by one run at a time.

    Raises:
        InputError: it cannot be written, or another run holds it.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(folder / _LOCK))
        except BlockingIOError as error:
            raise InputError(
                f"--state-dir: {folder} is in use by another `ullage up`; stop it or name another folder"
            ) from error
        except OSError as error:
            raise InputError(f"--state-dir: cannot use {folder}: {error.strerror}; name another folder") from error
        yield folder
