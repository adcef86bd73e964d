"""Compile Triton's CUDA driver module without a driver: `python triton_seed.py FOLDER` fills FOLDER like its cache.

Triton compiles that module where a kernel first runs, with the C compiler found there; an image for running has none.
The module's place in the cache depends on Triton's own source and the platform alone. It is linked against a libcuda
without content, as the real one comes with the node's driver; so it cannot be loaded here, only made.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = "libcuda.so.1"


def seed(folder: Path) -> list[Path]:
    """The files made.

    Raises:
        RuntimeError: Triton left nothing in the folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch) / "empty.c"
        empty.touch()
        command = ["gcc", "-shared", f"-Wl,-soname,{STUB}", "-o", str(Path(scratch) / STUB), str(empty)]
        subprocess.run(command, check=True)  # noqa: S603  a fixed command
        os.environ |= {"TRITON_CACHE_DIR": str(folder), "TRITON_LIBCUDA_PATH": scratch}
        from triton.backends.nvidia.driver import CudaUtils  # reads its environment when imported

        with contextlib.suppress(ImportError):  # made, and not to be loaded without a driver
            CudaUtils()
    made = sorted(folder.rglob("cuda_utils*.so"))
    if not made:
        raise RuntimeError(f"Triton left no driver module in {folder}; has its way of compiling changed?")
    return made


if __name__ == "__main__":
    for path in seed(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
