"""Helpers for tests against a control plane: kubectl, namespaces, waiting for what is to come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 120.0
"""Bound on every wait: only a failing test comes near it."""
POLL_S = 0.1


class Kubectl:
    """kubectl as one user, in one namespace."""

    def __init__(self, kubeconfig: Path, cache: Path, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self._cache = cache

    def within(self, namespace: str) -> Kubectl:
        """The same in another namespace."""
        return Kubectl(self.kubeconfig, self._cache, namespace)

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output; a failure is an AssertionError with what kubectl said."""
        done = self.attempt(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def attempt(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run without a verdict."""
        program = Path(sys.executable).with_name("kubectl")
        environment = {
            **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self._cache),
        }
        command = [str(program), f"--namespace={self.namespace}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=60)

    def apply(self, obj: Any) -> str:
        """Apply one object or YAML text."""
        text = obj if isinstance(obj, str) else json.dumps(obj)
        return self.run("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text else None

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects that match a label selector."""
        items = json.loads(self.run("get", kind, "-o", "json", f"--selector={selector}"))["items"]
        return list(items)

    def patch_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        """Merge into an object's status."""
        body = json.dumps({"status": status})
        self.run("patch", kind, name, "--subresource=status", "--type=merge", "-p", body)


def establish(kubectl: Kubectl, definitions: Iterable[str]) -> None:
    """Apply CRDs and wait until they are served; a server that has just begun may not find what it was given."""
    for text in definitions:
        kubectl.apply(text)
    wait = ("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    eventually("established CRDs", lambda: kubectl.attempt(*wait).returncode == 0)


def eventually(what: str, look: Callable[[], T | None], *, within_s: float = WAIT_S) -> T:
    """The first true result of `look`; an AssertionError naming `what` when none comes in time."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(POLL_S)
