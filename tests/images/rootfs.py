"""A container without a container engine: a read-only root file system of plain folders, and a user nobody knows.

Bind mounts in a mount namespace of its own: the system's libraries, the interpreter, the packages under test, a
/etc/passwd with root alone, a writable /tmp. Then chroot to it as user and group 65532 without capabilities. Needs root
and the right to mount; `obstacle` says what is missing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

USER = 65532
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "localtime", "hosts")
_ENTER = "exec chroot --userspec={user}:{user} --groups= {root} /usr/bin/env -i {environment} {command}"


def obstacle() -> str | None:
    """Why no such root file system can be made here; None where it can."""
    if os.geteuid() != 0:
        return "a root file system of plain folders needs root"
    trial = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if trial.returncode == 0 else f"mounting is not allowed here: {trial.stderr.strip()}"


class RootFs:
    """The folders; each command enters them anew."""

    def __init__(self, folder: Path, mounts: Sequence[Path]) -> None:
        """`mounts` are seen under their own paths, read-only; the interpreter is added."""
        self.root = folder / "root"
        self.tmp = folder / "tmp"
        self.root.mkdir(parents=True)
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        (folder / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        self._passwd = folder / "passwd"
        base = Path(sysconfig.get_config_var("installed_base") or sys.base_prefix)
        self._mounts = [base, *mounts]

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: int) -> subprocess.Popen[str]:
        """Run a command inside; with `options` of Popen."""
        script = "\n".join(["set -e", *self._assemble(), self._enter(command, environment)])
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        return subprocess.Popen(enter, text=True, stdin=subprocess.DEVNULL, start_new_session=True, **options)  # type: ignore[call-overload, no-any-return]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end."""
        process = self.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, error = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, out, error)

    def _assemble(self) -> list[str]:
        root = self.root
        lines = [f"mount -t tmpfs -o mode=755 none {root}"]
        for folder in map(Path, SYSTEM):
            if folder.is_symlink():
                lines.append(f"ln -s {folder.readlink()} {root}{folder}")
            elif folder.exists():
                lines += _bind(folder, root)
        lines += [f"mkdir -p {root}/etc {root}/tmp {root}/proc {root}/dev", f"cp {self._passwd} {root}/etc/passwd"]
        lines += [f"if [ -e /etc/{name} ]; then cp -rL /etc/{name} {root}/etc/; fi" for name in ETC]
        lines += [f"touch {root}{device}; mount --bind {device} {root}{device}" for device in DEVICES]
        lines += [f"mount --bind {self.tmp} {root}/tmp", f"mount --rbind /proc {root}/proc"]
        for folder in self._mounts:
            lines += _bind(folder, root)
        return [*lines, f"mount -o remount,bind,ro {root}"]

    def _enter(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        pairs = [f"{name}={value}" for name, value in environment.items()]
        return _ENTER.format(
            user=USER,
            root=self.root,
            environment=" ".join(map(shlex.quote, pairs)),
            command=" ".join(map(shlex.quote, command)),
        )


def _bind(folder: Path, root: Path) -> list[str]:
    kind = "mkdir -p" if folder.is_dir() else f"mkdir -p {root}{folder.parent}; touch"
    return [
        f"{kind} {root}{folder}",
        f"mount --bind {folder} {root}{folder}",
        f"mount -o remount,bind,ro {root}{folder}",
    ]
