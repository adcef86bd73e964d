"""Where the view goes: redrawn in place on a terminal, else plain lines, one a second at most and one per event."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from . import words
from .board import Board, Happening
from .view import ASCII, UNICODE, Scene, frame, plain_line

_REFRESH_PER_S = 4
_STARTING_SECONDS_PER_LINE = 5.0


class Screen(Protocol):
    """An entered context that shows things; nothing is shown before or after."""

    def starting(self, what: str, elapsed_s: float) -> None:
        """Progress while nothing serves yet. May be called often."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def update(self, board: Board, scene: Scene, fresh: Sequence[Happening]) -> None:
        """A new reading, and what happened with it. Called about once a second."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LiveScreen:
    """Redraws one picture in place; the last one stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._glyphs = UNICODE if console.encoding.lower().startswith("utf") else ASCII
        self._live = Live(
            console=console, auto_refresh=False, refresh_per_second=_REFRESH_PER_S, vertical_overflow="crop"
        )

    def starting(self, what: str, elapsed_s: float) -> None:
        """One line that names what is waited for."""
        line = Text(f" {words.duration(elapsed_s):>6}  {what}", no_wrap=True, overflow="ellipsis")
        self._live.update(line, refresh=True)

    def note(self, text: str) -> None:
        """A line above the picture."""
        self._console.print(text, highlight=False)

    def update(self, board: Board, scene: Scene, fresh: Sequence[Happening]) -> None:
        """Draw the frame anew."""
        self._live.update(frame(board, scene, self._glyphs, self._console.width), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class PlainScreen:
    """Prints lines, for pipes, logs and people who prefer them."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds_per_line: float = 1.0,
    ) -> None:
        self._write = write or _print
        self._clock = clock
        self._seconds_per_line = seconds_per_line
        self._last_line_at = float("-inf")
        self._last_words = ""

    def starting(self, what: str, elapsed_s: float) -> None:
        """A line when something new is waited for, and every few seconds."""
        now = self._clock()
        if what == self._last_words and now - self._last_line_at < _STARTING_SECONDS_PER_LINE:
            return
        if now - self._last_line_at < self._seconds_per_line:
            return
        self._last_words, self._last_line_at = what, now
        self._write(f"{words.duration(elapsed_s):>6}  {what}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._write(text)

    def update(self, board: Board, scene: Scene, fresh: Sequence[Happening]) -> None:
        """A line per event, and one for the state if a second has passed."""
        for happening in fresh:
            elapsed = words.duration(scene.elapsed_s)
            self._write(f"{elapsed:>6}  * {happening.stage}: {words.describe(happening)}")
        now = self._clock()
        if now - self._last_line_at >= self._seconds_per_line:
            self._last_line_at = now
            self._write(plain_line(board, scene))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def choose_screen(*, plain: bool) -> LiveScreen | PlainScreen:
    """The live view on a capable terminal, plain lines anywhere else."""
    console = Console(highlight=False)
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainScreen()
    return LiveScreen(console)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
