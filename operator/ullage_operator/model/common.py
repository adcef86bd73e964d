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
EngineAction = Literal["evict", "compact", "throttle", "release"]
"""Carried out by an engine's agent."""
ScaleAction = Literal["scaleUp", "scaleDown"]
"""Carried out by the cluster."""
RemedyAction = Literal["evict", "compact", "throttle", "release", "scaleUp", "scaleDown"]
Stage = Literal["Scaling", "Cancelling", "Draining", "Removing", "Restoring"]
"""Steps within a running scaleUp (the first two) or scaleDown (the others)."""
ENGINE_ACTIONS: tuple[EngineAction, ...] = ("evict", "compact", "throttle", "release")
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
