"""What both kinds share: group and version, metadata, the words for modes, phases and actions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ullage_operator.fields import Part

GROUP = "ullage.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Mode = Literal["Observe", "Propose", "Enforce"]
Phase = Literal["Proposed", "Approved", "Running", "Succeeded", "Ineffective", "Failed", "Expired"]
RemedyAction = Literal["evict", "throttle", "release"]
FINAL_PHASES: frozenset[Phase] = frozenset({"Succeeded", "Ineffective", "Failed", "Expired"})


class ObjectMeta(Part, extra="ignore"):
    """The parts of Kubernetes' own metadata that are used here; the others are accepted and left alone."""

    name: str = Field(min_length=1, max_length=253)
    namespace: str = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
