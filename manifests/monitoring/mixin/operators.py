"""Rules about the operator. Only for installations that have one: its absence is an alert."""

from __future__ import annotations

from mixin.parts import Alert, Group, RuleFile, risen

_INEFFECTIVE = risen('ullage_operator_actions_total{outcome="Ineffective"}', "30m")
_ENDED = risen("ullage_operator_actions_total", "30m")
_ERRORS = risen('ullage_operator_errors_total{kind!="invalid"}', "10m")

OPERATOR = RuleFile(
    name="ullage-operator",
    about="The operator. Leave this file out where agents run without one.",
    groups=(
        Group(
            name="ullage-operator",
            rules=(
                Alert(
                    name="UllageOperatorAbsent",
                    expr="absent(ullage_operator_leader == 1)",
                    hold="5m",
                    severity="critical",
                    summary="No Ullage operator leads.",
                    description="Nobody decides on remedies and nobody repairs engines. Engines go on serving; "
                    "throttles end by themselves.",
                ),
                Alert(
                    name="UllageEnginesUnread",
                    expr="sum by (namespace) (ullage_operator_stale_engines) > 0",
                    hold="5m",
                    severity="warning",
                    summary="The operator in {{ $labels.namespace }} knows nothing fresh about {{ $value }} engines.",
                    description="It does not evict, throttle or remove what it cannot see. Certificate, token, "
                    "NetworkPolicy or the agent itself is the cause.",
                ),
                Alert(
                    name="UllageRemediationIneffective",
                    expr=f"sum by (namespace, action) ({_INEFFECTIVE}) >= 3 and"
                    f" sum by (namespace, action) ({_INEFFECTIVE}) > 0.5 * sum by (namespace, action) ({_ENDED})",
                    hold="0s",
                    severity="warning",
                    summary="Most remedies of kind {{ $labels.action }} do not help.",
                    description="{{ $value | humanize }} of the last half hour ended without a measured effect. The "
                    "operator goes on to the next step of the ladder.",
                ),
                Alert(
                    name="UllageOperatorErrors",
                    expr=f"sum by (namespace, kind) ({_ERRORS}) > 5",
                    hold="10m",
                    severity="warning",
                    summary="Rounds of the operator in {{ $labels.namespace }} fail ({{ $labels.kind }}).",
                    description="{{ $value | humanize }} within ten minutes. cluster: the API server refuses or does "
                    "not answer; unexpected: a defect, with a traceback in its log.",
                ),
                Alert(
                    name="UllageSweepSlow",
                    expr="histogram_quantile(0.99, sum by (namespace, le) "
                    "(rate(ullage_operator_sweep_seconds_bucket[5m]))) > 5",
                    hold="15m",
                    severity="warning",
                    summary="Sweeps of the operator in {{ $labels.namespace }} are slow.",
                    description="P99 is {{ $value | humanizeDuration }}: it sees risk late and reacts late.",
                ),
            ),
        ),
    ),
)
