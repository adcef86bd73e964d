"""The API of group `ullage.dev`: `InferenceService` and `Remediation`. The single source of truth.

The CRDs in `manifests/crd` are generated from here (`ullage_operator.crd`); local mode, the policy and the
handlers read objects through here. Field docs become the CRD's descriptions.
Non-goals: reading files (`manifest`), moving a remediation between phases (`remediation`).
"""

from ullage_operator.model.common import (
    API_VERSION,
    ENGINE_ACTIONS,
    FINAL_PHASES,
    GROUP,
    VERSION,
    EngineAction,
    Mode,
    ObjectMeta,
    Phase,
    RemedyAction,
    Stage,
)
from ullage_operator.model.engine import Engine, Eviction, KVCache, Model, Resources, Speculation
from ullage_operator.model.policy import (
    ActionPolicy,
    CompactPolicy,
    EvictPolicy,
    RemediationPolicy,
    ScaleDownPolicy,
    ScaleUpPolicy,
    ThrottlePolicy,
)
from ullage_operator.model.remediation import (
    Evidence,
    Parameters,
    Remediation,
    RemediationSpec,
    RemediationStatus,
)
from ullage_operator.model.service import Condition, InferenceService, LastAction, RiskSummary, ServiceStatus
from ullage_operator.model.spec import Agent, Monitoring, Network, Replicas, ServiceSpec

__all__ = [
    "API_VERSION",
    "ENGINE_ACTIONS",
    "FINAL_PHASES",
    "GROUP",
    "VERSION",
    "ActionPolicy",
    "Agent",
    "CompactPolicy",
    "Condition",
    "Engine",
    "EngineAction",
    "EvictPolicy",
    "Eviction",
    "Evidence",
    "InferenceService",
    "KVCache",
    "LastAction",
    "Mode",
    "Model",
    "Monitoring",
    "Network",
    "ObjectMeta",
    "Parameters",
    "Phase",
    "Remediation",
    "RemediationPolicy",
    "RemediationSpec",
    "RemediationStatus",
    "RemedyAction",
    "Replicas",
    "Resources",
    "RiskSummary",
    "ScaleDownPolicy",
    "ScaleUpPolicy",
    "ServiceSpec",
    "ServiceStatus",
    "Speculation",
    "Stage",
    "ThrottlePolicy",
]
