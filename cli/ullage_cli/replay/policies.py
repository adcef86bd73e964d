"""Policies by name: an InferenceService manifest, or a few settings that differ from another policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ullage_operator.errors import ManifestError
from ullage_operator.manifest import load_manifest, read_service
from ullage_operator.model import API_VERSION, InferenceService

from ..errors import InputError

DEFAULT: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": "InferenceService",
    "metadata": {"name": "replayed"},
    "spec": {
        "model": {"source": "recorded"},
        "engine": {"type": "ullage", "kvCache": {"memory": "1Gi"}},
    },
}


def policy(text: str | None, base: InferenceService | None = None) -> InferenceService:
    """A service with the policy that `text` names: None for the defaults, a manifest, or `key=value,…` on `base`.

    Raises:
        InputError: it cannot be read, or a setting makes no sense.
    """
    try:
        if text is None:
            return read_service(DEFAULT)
        if "=" not in text or Path(text).exists():
            return load_manifest(text)
        return read_service(with_settings(base or read_service(DEFAULT), text))
    except ManifestError as error:
        raise InputError(f"--policy: {error}") from error


def with_settings(base: InferenceService, text: str) -> dict[str, Any]:
    """`base` with settings of its remediation policy changed: `riskThreshold=75,evict.ratio=0.3`."""
    document = base.write()
    remediation: dict[str, Any] = document["spec"].setdefault("remediation", {})
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--policy: {part!r} is not KEY=VALUE; write riskThreshold=75,evict.ratio=0.3 or a file")
        *path, last = key.strip().removeprefix("spec.remediation.").split(".")
        place = remediation
        for name in path:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"--policy: {key.strip()!r}: {name} has no settings inside")
        place[last] = yaml.safe_load(value)
    return document


def polled(service: InferenceService, seconds: float) -> InferenceService:
    """The same for data that was read at other intervals: what counts as stale follows them."""
    agent = service.spec.agent.model_copy(update={"poll_seconds": max(service.spec.agent.poll_seconds, seconds)})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"agent": agent})})
