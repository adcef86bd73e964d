"""Single keys from a terminal, without Enter; none where the input is no terminal."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pressed(handle: int) -> Iterator[asyncio.Queue[str]]:
    """Keys as they come. The terminal is put back as it was."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    try:
        before = termios.tcgetattr(handle)
    except (termios.error, OSError, ValueError):
        yield keys
        return
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(handle, 64)
        if not data:  # the terminal is gone
            loop.remove_reader(handle)
            keys.put_nowait("q")
        for character in data.decode(errors="ignore"):
            keys.put_nowait(character)

    tty.setcbreak(handle)
    loop.add_reader(handle, read)
    try:
        yield keys
    finally:
        loop.remove_reader(handle)
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
