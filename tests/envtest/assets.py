"""Finds or builds the binaries of a Kubernetes control plane for tests.

Looked for in `KUBEBUILDER_ASSETS`, then in `/usr/local/kubebuilder/bin`, as the ecosystem does. Where they are missing
they are built there by `build.sh`, if this machine can.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager")
DEFAULT_FOLDER = Path("/usr/local/kubebuilder/bin")
BUILD_SCRIPT = Path(__file__).with_name("build.sh")


class AssetsMissing(Exception):
    """There are no binaries and none can be built here; the message says why."""


class AssetsInvalid(Exception):
    """KUBEBUILDER_ASSETS names a folder without them: a mistake, never a reason to skip."""


def complete(folder: Path) -> bool:
    """Whether a folder holds all binaries."""
    return all(os.access(folder / name, os.X_OK) for name in BINARIES)


def obstacle(os_release: str, *, machine: str, user_id: int) -> str | None:
    """Why the binaries cannot be built here, or None."""
    facts = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    found = f"{facts.get('ID', '?')} {facts.get('VERSION_ID', '?')}".replace('"', "")
    if found != "debian 12":
        return f"building them needs Debian 12, this is {found}"
    if machine != "x86_64":
        return f"building them needs amd64, this is {machine}"
    if user_id != 0:
        return "building them needs root"
    return None


def locate(environment: Mapping[str, str], *, default: Path = DEFAULT_FOLDER) -> Path | None:
    """The folder with the binaries, or None where they are to be built in `default`.

    Raises:
        AssetsInvalid: KUBEBUILDER_ASSETS is set, and they are not there.
    """
    named = environment.get("KUBEBUILDER_ASSETS")
    if named:
        if not complete(Path(named)):
            raise AssetsInvalid(f"KUBEBUILDER_ASSETS={named} lacks one of {', '.join(BINARIES)}")
        return Path(named)
    return default if complete(default) else None


def find_or_build(environment: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder with the binaries; builds them (3 to 6 minutes) when they are missing. `say` gets progress lines.

    Raises:
        AssetsMissing: there are none, and none can be built here.
        AssetsInvalid: KUBEBUILDER_ASSETS is wrong.
        subprocess.CalledProcessError: building failed.
    """
    folder = locate(environment)
    if folder is not None:
        return folder
    reason = obstacle(_os_release(), machine=platform.machine(), user_id=os.geteuid())
    if reason is not None:
        raise AssetsMissing(f"no {', '.join(BINARIES)} in {DEFAULT_FOLDER}; {reason}")
    say(f"building a Kubernetes control plane in {DEFAULT_FOLDER}, once, for 3 to 6 minutes")
    command = [str(BUILD_SCRIPT), str(DEFAULT_FOLDER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build:
        for line in build.stdout or ():
            say(line.rstrip())
    if build.returncode:
        raise subprocess.CalledProcessError(build.returncode, command)
    return DEFAULT_FOLDER


def _os_release() -> str:
    path = Path("/etc/os-release")
    return path.read_text() if path.is_file() else ""
