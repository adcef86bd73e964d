"""Pods of a test's API server as Prometheus's own discovery would give them (`kubernetes_sd_configs`, role pod).

Debian builds Prometheus without that discovery; the same meta labels reach it through a file, so that the relabelling
of the shipped configuration is what is tried.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

POLL_S = 0.3
Target = dict[str, Any]


def targets(pod: dict[str, Any]) -> Iterator[Target]:
    """One target for each declared port of a pod that has an address."""
    address = pod.get("status", {}).get("podIP")
    if not address:
        return
    about = {**_about(pod), "__meta_kubernetes_pod_ip": address}
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            of_port = {
                "__meta_kubernetes_pod_container_name": container["name"],
                "__meta_kubernetes_pod_container_port_name": port["name"],
                "__meta_kubernetes_pod_container_port_number": str(port["containerPort"]),
            }
            yield {"targets": [f"{address}:{port['containerPort']}"], "labels": {**about, **of_port}}


def _about(pod: dict[str, Any]) -> dict[str, str]:
    metadata = pod["metadata"]
    labels = {
        "__meta_kubernetes_namespace": metadata["namespace"],
        "__meta_kubernetes_pod_name": metadata["name"],
        "__meta_kubernetes_pod_phase": pod["status"].get("phase", "Unknown"),
    }
    for kind in ("label", "annotation"):
        for name, value in (metadata.get(f"{kind}s") or {}).items():
            known = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            labels[f"__meta_kubernetes_pod_{kind}_{known}"] = value
            labels[f"__meta_kubernetes_pod_{kind}present_{known}"] = "true"
    return labels


class Discovery:
    """Keeps a target file up to date with what `pods` gives, while it is entered."""

    def __init__(self, file: Path, pods: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self._file = file
        self._pods = pods
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            with contextlib.suppress(OSError):  # the API server may be slow to answer; ask again
                self._write()

    def _write(self) -> None:
        found = [target for pod in self._pods() for target in targets(pod)]
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(self._file)
