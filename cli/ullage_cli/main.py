"""`ullage`: the program. Until a command takes the signals over, an interrupt ends the process at once.

Python would raise KeyboardInterrupt wherever it happens to be. While modules are imported, that is often in a place
that drops exceptions (a weak reference's callback, a finalizer, a library's C code), and the interrupt is lost.
Nothing is started or written that early, so the kernel's own way to end a process leaves nothing behind.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the program; returns its exit status."""
    end_at_once_when_interrupted()
    from .commands import run  # only now: the libraries behind take long to import

    return run()


def complete() -> int:
    """`kubectl_complete-ullage`: answers kubectl, which completes `kubectl ullage …` by it."""
    end_at_once_when_interrupted()
    from .commands import run
    from .completion import complete_plugin

    return complete_plugin(sys.argv[1:], lambda: run())


def end_at_once_when_interrupted() -> None:
    """Let SIGINT end this process as SIGTERM and SIGHUP do, unless whoever started it chose to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
