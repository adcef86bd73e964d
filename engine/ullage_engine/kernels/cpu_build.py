"""Compile `cpu.cpp` once for this machine, or find what was compiled before.

A library is looked for where `ULLAGE_CPU_KERNELS` points (images carry one, as they have no compiler), then in the
cache folder, then made there with the system's C++ compiler. Its name holds a hash of the source, the flags, the
compiler and the CPU, so that none is ever used for what it was not made for.

    python -m ullage_engine.kernels.cpu_build FILE [--march x86-64-v4]
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from ullage_engine.errors import KernelError

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
INCLUDED = Path(__file__).with_name("cpu_scores.h")
PREBUILT = "ULLAGE_CPU_KERNELS"
"""Environment variable: path of a library made beforehand."""
COMPILERS = ("c++", "g++", "clang++")
# never -ffast-math: codes must equal torch's, and NaN must stay NaN
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fPIC", "-shared")
TIMEOUT_S = 600
CPU_INFO = Path("/proc/cpuinfo")


def library(cache_dir: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Path of the compiled kernels, made if need be (a quarter of a minute, once).

    Raises:
        KernelError: no compiler, or it failed; the message has its last words.
    """
    prebuilt = environment.get(PREBUILT)
    if prebuilt:
        if not Path(prebuilt).is_file():
            raise KernelError(f"{PREBUILT}: {prebuilt} is not a file; unset it to compile the kernels here")
        return Path(prebuilt)
    compiler = find_compiler(environment)
    target = cache_dir / f"cpu-{_key(compiler)}.so"
    if target.is_file():  # before anything is written: the cache may be read-only by now
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_file():
                log.info("compiling the CPU kernels with %s; this happens once and takes a while", shlex.join(compiler))
                build(target, compiler)
    except (OSError, NotImplementedError) as error:  # the latter of a file system without locks
        reason = getattr(error, "strerror", None) or error
        raise KernelError(f"{cache_dir} cannot be written: {reason}; give another --cache-dir") from error
    return target


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Words of the C++ compiler's command: $CXX, which may bring arguments (`ccache g++`), or the first usual name.

    Raises:
        KernelError: there is none.
    """
    names = (environment["CXX"],) if environment.get("CXX") else COMPILERS
    for name in names:
        command, *arguments = _words(name, environment.get("PATH"))
        found = shutil.which(command, path=environment.get("PATH"))
        if found:
            return found, *arguments
    raise KernelError(f"no C++ compiler ({', '.join(names)}) is on the PATH")


def _words(name: str, path: str | None) -> list[str]:
    """A command in its words; a program whose own path has spaces is one word, and so is what a shell can't read."""
    try:
        return [name] if shutil.which(name, path=path) else shlex.split(name) or [name]
    except ValueError:
        return [name]


def build(target: Path, compiler: tuple[str, ...], march: str = "native") -> None:
    """Compile into `target`, whole or not at all.

    Raises:
        KernelError: the compiler failed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        staging = Path(folder) / target.name
        made_from = f'-DULLAGE_SOURCE="{source_hash()}"'
        command = [*compiler, *FLAGS, _machine_flag(march), made_from, str(SOURCE), "-o", str(staging)]
        # compilers' own temporary files go there too: where the root is read-only, the cache may be all that isn't
        environment = {**os.environ, "TMPDIR": folder}
        try:
            done = subprocess.run(  # noqa: S603 - no shell; the user's own compiler
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
                env=environment,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelError(f"{compiler[0]} did not compile the CPU kernels: {error}") from error
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise KernelError(f"{compiler[0]} failed on the CPU kernels:\n{last}")
        staging.replace(target)


def source_hash() -> str:
    """Of the source: a library carries it, so that one of another version is not called."""
    return hashlib.sha256(_source()).hexdigest()[:16]


def _source() -> bytes:
    return SOURCE.read_bytes() + INCLUDED.read_bytes()


def _machine_flag(march: str) -> str:
    """How compilers are told the CPU: -mcpu on ARM, where -march=native is younger."""
    return f"-mcpu={march}" if platform.machine() in ("aarch64", "arm64") and march == "native" else f"-march={march}"


def _key(compiler: tuple[str, ...]) -> str:
    """Hash of all that a library depends on; the compiler by its files, as asking its version costs a process."""
    stats = [Path(found).resolve().stat() for word in compiler if (found := shutil.which(word))]
    parts = (
        _source(),
        repr(FLAGS).encode(),
        f"{compiler}|{[(stat.st_size, stat.st_mtime_ns) for stat in stats]}".encode(),
        _cpu(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    """What the kernel says of the CPU's instructions."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine().encode()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine()).encode()


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets by the kernel's names; empty where it doesn't say."""
    return frozenset(_cpu().decode().partition(":")[2].split())


def main() -> None:
    """Compile to a given file, for an image or a wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the library to write")
    parser.add_argument("--march", default="native", help="oldest CPU to run on (%(default)s)")
    parsed = parser.parse_args()
    build(parsed.file.absolute(), find_compiler(), parsed.march)


if __name__ == "__main__":
    main()
