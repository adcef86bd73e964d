"""The CRDs' CEL rules, evaluated by Google's own CEL: they refuse what the models refuse, and nothing else.

API servers before 1.25 evaluate no rules, so a server in the tests may not show this.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.crd import structural_schema
from ullage_operator.errors import ManifestError
from ullage_operator.manifest import load_manifest, read_service
from ullage_operator.model import InferenceService, Remediation

SAMPLES = sorted((Path(__file__).resolve().parents[2] / "manifests" / "samples").glob("*.yaml"))
SMALL = next(sample for sample in SAMPLES if sample.stem == "smollm2")
ENVIRONMENT = cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN})


def violations(schema: dict[str, Any], new: Any, old: Any = None) -> Iterator[str]:
    """Messages of the rules that an object breaks; rules about change are asked only where there is an old object."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        answer = ENVIRONMENT.compile(rule["rule"]).eval(data={"self": new, "oldSelf": old}).plain_value()
        assert isinstance(answer, bool), f"{rule['rule']}: {answer}"
        if not answer:
            yield rule["message"]
    for name, part in schema.get("properties", {}).items():
        if isinstance(new, dict) and name in new:
            yield from violations(part, new[name], old.get(name) if isinstance(old, dict) else None)


def with_defaults(manifest: dict[str, Any]) -> dict[str, Any]:
    """As the server would store a manifest whose spec has every default filled in, valid or not."""
    filled = load_manifest(SMALL).write()
    filled["metadata"] = {"name": "web"}
    return _merged(filled, manifest)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


SERVICE = structural_schema(InferenceService)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.stem)
def test_samples_break_no_rule(sample: Path) -> None:
    stored = load_manifest(sample).write()
    assert list(violations(SERVICE, stored)) == []
    assert yaml.safe_load(sample.read_text())["kind"] == "InferenceService"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": {"replicas": {"min": 3, "max": 2}}}, "min is above max"),
        ({"spec": {"replicas": {"min": 1, "max": 2, "desired": 3}}}, "desired is outside"),
        ({"spec": {"remediation": {"riskThreshold": 50, "releaseThreshold": 50}}}, "releaseThreshold is not below"),
        ({"spec": {"engine": {"type": "vllm"}}}, "image is missing"),
        ({"spec": {"engine": {"speculation": {"method": "draft", "tokens": 4}}}}, "set draftModel with method draft"),
        (
            {"spec": {"engine": {"speculation": {"method": "ngram", "draftModel": "d", "tokens": 4}}}},
            "set draftModel with method draft",
        ),
        (
            {
                "spec": {
                    "engine": {
                        "type": "vllm",
                        "image": "v",
                        "speculation": {"method": "draft", "draftModel": "d", "tokens": 4},
                    }
                }
            },
            "speculation.method draft is for engine type ullage",
        ),
        ({"spec": {"engine": {"type": "vllm", "image": "v", "numerics": "invariant"}}}, "numerics is for engine type"),
        (
            {"spec": {"engine": {"type": "vllm", "image": "v", "kvCache": {"eviction": {"budget": "30%"}}}}},
            "kvCache.eviction is for engine type ullage",
        ),
        (
            {"spec": {"engine": {"type": "vllm", "image": "v", "kvCache": {"eviction": {"policy": "window"}}}}},
            "kvCache.eviction is for engine type ullage",
        ),
        ({"spec": {"engine": {"tensorParallel": 2}}}, "engine type ullage has no"),
        ({"spec": {"engine": {"kvCache": {"memoryShare": 0.5}}}}, "set exactly one of"),
        ({"spec": {"engine": {"maxBatchTokens": 8, "maxSequences": 9}}}, "maxBatchTokens is below"),
        ({"spec": {"engine": {"kvCache": {"memory": "48"}}}}, "memory needs a unit"),
        ({"spec": {"engine": {"kvCache": {"memory": "48m"}}}}, "memory needs a unit"),
        ({"spec": {"agent": {"actionPort": 9400}}}, "must differ"),
        ({"metadata": {"name": "w" * 41}}, "metadata.name must be"),
        ({"metadata": {"name": "1web"}}, "metadata.name must be"),
        ({"metadata": {"name": "a.b"}}, "metadata.name must be"),
    ],
)
def test_rule_and_model_refuse_the_same(changes: dict[str, Any], message: str) -> None:
    manifest = with_defaults(changes)
    broken = list(violations(SERVICE, manifest))
    assert any(message in complaint for complaint in broken), broken
    with pytest.raises(ManifestError):
        read_service(manifest)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with where it is."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")


RULED = {
    f"{model.__name__}{path}": node
    for model in (InferenceService, Remediation)
    for path, node in nodes(structural_schema(model))
    if "x-kubernetes-validations" in node
}


@pytest.mark.parametrize("path", [path for path, node in RULED.items() if "default" in node])
def test_a_default_keeps_the_rules_of_its_object_as_it_stands(path: str) -> None:
    """An API server evaluates them before it fills in the parts, and refuses the whole CRD otherwise."""
    node = RULED[path]
    assert list(violations({**node, "properties": {}}, node["default"])) == []


def test_no_rule_compares_an_object_with_a_map() -> None:
    """The types of an API server differ; only evaluation without types, as here, would let that pass."""
    rules = [rule["rule"] for node in RULED.values() for rule in node["x-kubernetes-validations"]]
    assert rules
    assert [rule for rule in rules if "{" in rule.replace("{0,", "")] == []


SPECS = st.fixed_dictionaries(
    {
        "replicas": st.fixed_dictionaries(
            {"min": st.integers(1, 4), "max": st.integers(1, 4)}, optional={"desired": st.integers(1, 5)}
        ),
        "remediation": st.fixed_dictionaries(
            {
                "riskThreshold": st.sampled_from([1, 50, 60.5, 100]),
                "releaseThreshold": st.sampled_from([0, 49, 50, 99.9]),
            }
        ),
        "agent": st.fixed_dictionaries({"metricsPort": st.integers(8000, 8002), "actionPort": st.integers(8000, 8002)}),
        "engine": st.fixed_dictionaries(
            {"maxBatchTokens": st.integers(1, 4), "maxSequences": st.integers(1, 4), "port": st.integers(8000, 8002)}
        ),
    }
)


@given(spec=SPECS)
def test_they_agree_on_everything_between(spec: dict[str, Any]) -> None:
    manifest = with_defaults({"spec": spec})
    try:
        read_service(manifest)
        refused = False
    except ManifestError:
        refused = True
    assert bool(list(violations(SERVICE, manifest))) == refused


RECORD = {
    "service": "web",
    "pod": "web-1",
    "podUID": "u",
    "action": "evict",
    "parameters": {"ratio": 0.2},
    "reason": "EvictColdBlocks",
    "mode": "Propose",
    "approved": False,
}


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"approved": True, "approvedBy": "mara"}, True),
        ({}, True),
        ({"action": "throttle"}, False),
        ({"pod": "web-2"}, False),
        ({"podUID": "v"}, False),
        ({"parameters": {"ratio": 1.0}}, False),
        ({"mode": "Enforce"}, False),
    ],
)
def test_only_the_approval_of_a_record_may_change(change: dict[str, Any], allowed: bool) -> None:
    schema = structural_schema(Remediation)
    broken = list(violations(schema, {"spec": {**RECORD, **change}}, {"spec": RECORD}))
    assert (broken == []) is allowed
