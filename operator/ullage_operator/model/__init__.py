"""The API of group `ullage.dev`: `InferenceService` and `Remediation`. The single source of truth.

The CRDs in `manifests/crd` are generated from here (`ullage_operator.crd`); local mode, the policy and the
handlers read objects through here. Field docs become the CRD's descriptions.
Non-goals: reading files (`manifest`), moving a remediation between phases (`remediation`).
"""

from ullage_operator.model.common import (
    API_VERSION,
    FINAL_PHASES,
    GROUP,
    VERSION,
    Mode,
    ObjectMeta,
    Phase,
    RemedyAction,
)
from ullage_operator.model.remediation import (
    Evidence,
    Parameters,
    Remediation,
    RemediationSpec,
    RemediationStatus,
)
from ullage_operator.model.service import Condition, InferenceService, LastAction, RiskSummary, ServiceStatus
from ullage_operator.model.spec import (
    Agent,
    Engine,
    Eviction,
    EvictPolicy,
    KVCache,
    Model,
    RemediationPolicy,
    Replicas,
    Resources,
    ServiceSpec,
    ThrottlePolicy,
)

__all__ = [
    "API_VERSION",
    "FINAL_PHASES",
    "GROUP",
    "VERSION",
    "Agent",
    "Condition",
    "Engine",
    "EvictPolicy",
    "Eviction",
    "Evidence",
    "InferenceService",
    "KVCache",
    "LastAction",
    "Mode",
    "Model",
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
    "ServiceSpec",
    "ServiceStatus",
    "ThrottlePolicy",
]
