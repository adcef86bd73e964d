"""Bad manifests: each is refused in one line that names object, field, value and remedy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.errors import ManifestError
from ullage_operator.fields import parse_bytes
from ullage_operator.manifest import load_manifest, read_service

REMOVED = object()


def changed(build: Any, path: str, value: object) -> dict[str, Any]:
    manifest = copy.deepcopy(build.manifest())
    *parents, last = path.split(".")
    part = manifest
    for key in parents:
        part = part.setdefault(key, {})
    if value is REMOVED:
        del part[last]
    else:
        part[last] = value
    return manifest


BAD: list[tuple[str, object, str]] = [
    ("spec.replicas", {"min": 3, "max": 2}, "spec.replicas.min: 3 is above max 2; lower min or raise max"),
    ("spec.replicas", {"max": 2, "desired": 3}, "spec.replicas.desired: 3 is outside min..max 1..2; widen the range"),
    ("spec.replicas.minimum", 3, "spec.replicas.minimum: 3 is set, but there is no such field; did you mean min?"),
    ("spec.engine.kv_cache", {}, "spec.engine.kv_cache: {} is set, but there is no such field; did you mean kvCache?"),
    ("spec.zzz", 1, "spec.zzz: 1 is set, but there is no such field; known here: model, engine"),
    ("spec.engine.kvCache.memory", "48MB", "'48MB' is not a Kubernetes quantity; write \"48Mi\""),
    ("spec.engine.kvCache.memory", "48 MiB", "'48 MiB' is not a Kubernetes quantity; write \"48Mi\""),
    ("spec.engine.kvCache.memory", "lots", "'lots' is not a Kubernetes quantity; write a number with Ki, Mi or Gi"),
    ("spec.engine.kvCache.memory", "-48Mi", "'-48Mi' is negative; give an amount above 0"),
    ("spec.engine.kvCache.memory", 48, '48 is a number without a unit; write a quoted quantity like "48Mi"'),
    (
        "spec.engine.kvCache.memory",
        "48",
        "'48' is 48 bytes, less than 1Mi; a suffix is missing",
    ),
    (
        "spec.engine.kvCache.memory",
        "48m",
        "'48m' is 0 bytes, less than 1Mi; a suffix is missing",
    ),
    ("spec.engine.kvCache.memory", "NaN", "'NaN' is not a Kubernetes quantity"),
    ("spec.engine.kvCache.memory", "48Mi\n", "is not a Kubernetes quantity"),
    ("spec.engine.kvCache.memory", REMOVED, "spec.engine.kvCache.memory: is missing; set it"),
    ("spec.engine.kvCache.blockSize", 17, "spec.engine.kvCache.blockSize: 17 is refused: input should be 8, 16 or 32"),
    ("spec.engine.type", "vllm", "spec.engine.image: is missing; name an image of vllm"),
    ("spec.engine.maxBatchTokens", 32, "spec.engine.maxBatchTokens: 32 is below maxSequences 64"),
    ("spec.engine.port", "8000", "spec.engine.port: '8000' is refused: input should be a valid integer"),
    ("spec.engine.port", True, "spec.engine.port: True is refused"),
    (
        "spec.engine.resources",
        {"limits": {"cpu": 2}},
        "spec.engine.resources.limits.cpu: 2 is a number; write it in quotes",
    ),
    ("spec.agent", {"actionPort": 8000}, "spec.agent.actionPort: 8000 is also engine.port; choose another port"),
    ("spec.model", REMOVED, "spec.model: is missing; set it (The model that is served)"),
    ("spec.model.source", REMOVED, "spec.model.source: is missing; set it (A Hugging Face folder"),
    ("spec.model.source", "", "spec.model.source: '' is refused"),
    ("spec", REMOVED, "spec: is missing"),
    ("spec", "x", "spec: 'x' is refused"),
    ("spec.remediation.mode", "enforce", "spec.remediation.mode: 'enforce' is refused: input should be 'Observe'"),
    ("spec.remediation.releaseThreshold", 85, "releaseThreshold: 85 is not below riskThreshold 85; lower it"),
    ("spec.remediation.evict.ratio", 0, "spec.remediation.evict.ratio: 0 is refused: input should be greater than 0"),
    ("metadata.name", "Web_1", "metadata.name: 'Web_1' is not a DNS label; use lower-case letters"),
    ("metadata.name", "x" * 41, "has 41 characters; use at most 40"),
    ("metadata.name", "web\n", "is not a DNS label"),
    ("apiVersion", "v1", "apiVersion: 'v1' is not served; write ullage.dev/v1alpha1"),
]


@pytest.mark.parametrize(("path", "value", "expected"), BAD, ids=[f"{p}={v!r}"[:60] for p, v, _ in BAD])
def test_bad_field(build: Any, path: str, value: object, expected: str) -> None:
    with pytest.raises(ManifestError) as caught:
        read_service(changed(build, path, value))
    message = str(caught.value)
    assert expected in message
    assert message.startswith("InferenceService/")
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, [], 3, "text", True])
def test_what_is_no_object_is_refused_with_what_an_object_has(value: object) -> None:
    with pytest.raises(ManifestError) as caught:
        read_service(value)
    message = str(caught.value)
    assert message.startswith(f"InferenceService/(unnamed): (object): {value!r} is refused: ")
    assert message.endswith("; give an object with apiVersion, kind, metadata, spec")
    assert "\n" not in message


def test_further_problems_are_counted(build: Any) -> None:
    manifest = changed(build, "spec.engine.port", 0)
    manifest["spec"]["suspend"] = "yes"
    with pytest.raises(ManifestError, match=r"\(and 1 more\)$"):
        read_service(manifest)


def test_a_newer_server_s_fields_are_no_fault_of_a_stored_object(build: Any) -> None:
    manifest = changed(build, "spec.engine.futureField", 1)
    assert read_service(manifest, stored=True).metadata.name == "web"
    with pytest.raises(ManifestError):
        read_service(manifest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds 0 objects of kind InferenceService (found: nothing)"),
        ("kind: Pod\n---\nkind: Service\n", "holds 0 objects of kind InferenceService (found: Pod, Service)"),
        ("kind: InferenceService\n---\nkind: InferenceService\n", "holds 2 objects"),
        ("kind: [\n", "is not valid YAML"),
        (
            "kind: InferenceService\napiVersion: ullage.dev/v1alpha1\n",
            "(unnamed): metadata: is missing",
        ),
        ("apiVersion: ullage.dev/v1alpha1\nkind: InferenceService\nmetadata: 3\n", "metadata: 3 is refused"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(ManifestError) as caught:
        load_manifest(file)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file or directory; check the path"):
        load_manifest(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="is not valid YAML"):
        load_manifest(tmp_path / "binary.yaml")


def test_a_file_may_hold_other_objects_beside_the_service(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "Namespace"}, build.manifest()]))
    assert load_manifest(file).metadata.name == "web"


def test_written_and_read_back(build: Any) -> None:
    service = build.service()
    assert read_service(service.write()) == service


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PATHS = sorted({path for path, _, _ in BAD})


@given(path=st.sampled_from(PATHS), value=JSON)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(build: Any, path: str, value: object) -> None:
    try:
        read_service(changed(build, path, value))
    except ManifestError as error:
        assert str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "size"), [("48Mi", 48 * 2**20), ("1.5Gi", 3 * 2**29), ("2M", 2_000_000), ("1Pi", 2**50)]
)
def test_quantities_are_kubernetes_own(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["48MiB", "1e3", "+1Mi", "1_0Mi", "Mi", "", "0x1Mi"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_bytes(text)
