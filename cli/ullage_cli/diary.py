"""This program's own log: what its libraries warn of, and the traceback of an exception that nobody foresaw.

People get one line instead, which names the part that broke and the file. The file is made when there is something
to write. Non-goal: the logs of engines and agents, which `processes` writes beside it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import BrokenLoop, CliError, InputError

_logger = logging.getLogger("ullage_cli")
_FORESEEN = (CliError, BrokenPipeError)
"""Errors that the caller turns into an ending by itself."""


class Diary:
    """A context in which log messages go to the file, and unforeseen exceptions leave as `BrokenLoop`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._handler = _Handler(file)

    def __enter__(self) -> Self:
        """Begin to listen.

        Raises:
            InputError: the file's folder cannot be made.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--state-dir: cannot write {self.file}: {error.strerror}") from error
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, _FORESEEN):
                raise BrokenLoop(self.unforeseen(_module_of(error), error)) from error
        finally:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()

    def unforeseen(self, part: str, error: BaseException) -> str:
        """Write down how a part broke; returns the line for people."""
        _logger.error("%s broke", part, exc_info=error)
        where = f"log: {self.file}" if self._handler.problem is None else f"no log: {self._handler.problem}"
        return f"{part} broke: {_in_words(error)} ({where})"


class _Handler(logging.FileHandler):
    """Opens the file at the first message; what hinders writing is kept, where logging would print over the view."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, delay=True, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.problem: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        try:
            super().emit(record)
        except OSError as error:  # from opening the file
            self.problem = _in_words(error)

    def close(self) -> None:
        """Close the file, which tries once more to write what could not be written."""
        try:
            super().close()
        except OSError as error:
            self.problem = _in_words(error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called where writing failed, with the exception at hand."""
        error = sys.exc_info()[1]
        self.problem = _in_words(error) if error is not None else "it could not be written"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _module_of(error: BaseException) -> str:
    """The innermost of our modules that the exception came through."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(names) if name.startswith("ullage_")), names[-1] if names else "ullage")
