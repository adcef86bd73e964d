"""Becomes another program that cannot outlive its parent.

Run as `python -I -S leash.py PARENT_PID PROGRAM [ARGUMENT …]`. It asks the kernel to kill this process when
the parent dies, however it dies, and then executes the program, which keeps that wish. Done here and not
between fork and exec in the parent, where Python code may deadlock. Standard library only, so it starts in
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Execute `arguments[1:]` on the leash of process `arguments[0]`; returns only on failure."""
    parent, program = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.stderr.write(f"error: prctl: {os.strerror(ctypes.get_errno())}\n")
        return 1
    if os.getppid() != parent:  # it died before the wish was registered
        return 1
    try:
        os.execvp(program[0], program)  # noqa: S606 - arguments are ours, no shell is involved
    except OSError as error:
        sys.stderr.write(f"error: cannot start {program[0]}: {error.strerror}\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
