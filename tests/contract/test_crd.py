"""The CRDs, the models and the samples say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_operator import crd as crd_module
from ullage_operator.crd import KINDS, crd, crds, structural_schema
from ullage_operator.manifest import load_manifest
from ullage_operator.model import InferenceService, Remediation

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "manifests" / "crd"
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
MODELS = (InferenceService, Remediation)


def test_the_files_are_what_the_models_say() -> None:
    assert crd_module.main(["--check", str(FOLDER)]) == 0


def test_drift_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd_module.main(["--write", str(tmp_path)]) == 0
    file = tmp_path / "ullage.dev_remediations.yaml"
    file.write_text(file.read_text().replace("bytesFreed", "bytesLost"))
    assert crd_module.main(["--check", str(tmp_path)]) == 1
    assert "ullage.dev_remediations.yaml is not what the models say" in capsys.readouterr().err


def nodes(schema: dict[str, Any], path: str = "$") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, part in schema.get("properties", {}).items():
        found += nodes(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            found += nodes(schema[key], f"{path}[{key}]")
    return found


@pytest.mark.parametrize("model", MODELS)
def test_schemas_are_structural(model: Any) -> None:
    """Every node has a type; nothing that Kubernetes forbids, or treats as untyped, is in it."""
    for path, node in nodes(structural_schema(model)):
        assert node.get("type") in ("object", "array", "string", "integer", "number", "boolean"), path
        forbidden = {"$ref", "anyOf", "oneOf", "allOf", "const", "title", "x-kubernetes-int-or-string"}
        assert not forbidden & set(node), path
        assert not ("properties" in node and "additionalProperties" in node), path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert isinstance(node.get(bound, True), bool), path


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_explained(model: Any) -> None:
    for path, node in nodes(structural_schema(model)):
        own = path.count(".") >= 1 and not path.startswith("$.metadata") and path not in ("$.apiVersion", "$.kind")
        if own and not path.endswith("]"):
            assert node.get("description"), path


def test_a_status_has_no_defaults() -> None:
    for model in MODELS:
        for path, node in nodes(structural_schema(model)):
            if path.startswith("$.status"):
                assert "default" not in node, path


def test_without_cel_there_is_none() -> None:
    assert any("x-kubernetes-validations" in text for text in crds().values())
    assert not any("x-kubernetes-validations" in text for text in crds(cel=False).values())


def test_optional_fields_in_rules_are_guarded() -> None:
    """A rule on a field without default fails where it is absent, unless it asks first."""
    for model in MODELS:
        for path, node in nodes(structural_schema(model)):
            for rule in node.get("x-kubernetes-validations", []):
                for name in set(re.findall(r"(?:self|oldSelf)\.(\w+)", rule["rule"])) - {"metadata", "matches"}:
                    part = node["properties"][name]
                    present = name in node.get("required", []) or "default" in part
                    assert present or f"has(self.{name})" in rule["rule"], f"{path}: {rule['rule']}"


def test_columns_and_subresources_point_at_fields_that_exist() -> None:
    for kind in KINDS:
        version = crd(kind)["spec"]["versions"][0]
        known = {path.removeprefix("$") for path, _ in nodes(version["schema"]["openAPIV3Schema"])}
        known.add(".metadata.creationTimestamp")
        paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
        paths += list(version["subresources"].get("scale", {}).values())
        assert set(paths) <= known


def admit(schema: dict[str, Any], value: Any, path: str = "$") -> Any:
    """What an API server would store: unknown fields refused, defaults filled in, types and bounds checked."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    assert isinstance(value, kinds[schema["type"]]), path
    assert not (isinstance(value, bool) and schema["type"] in ("integer", "number")), path
    assert value in schema.get("enum", [value]), path
    if isinstance(value, str):
        assert re.search(schema.get("pattern", ""), value), path
        assert len(value) >= schema.get("minLength", 0), path
    if schema["type"] in ("integer", "number"):
        assert value >= schema.get("minimum", value), path
        assert value <= schema.get("maximum", value), path
    if isinstance(value, list):
        return [admit(schema["items"], item, f"{path}[]") for item in value]
    if isinstance(value, dict) and "properties" in schema:
        return _admit_object(schema, value, path)
    return value


def _admit_object(schema: dict[str, Any], value: dict[str, Any], path: str) -> dict[str, Any]:
    unknown = set(value) - set(schema["properties"])
    assert not unknown, f"{path}: {unknown}"
    filled = {
        name: value.get(name, part.get("default"))
        for name, part in schema["properties"].items()
        if name in value or "default" in part
    }
    assert set(schema.get("required", [])) <= set(filled), path
    return {name: admit(schema["properties"][name], item, f"{path}.{name}") for name, item in filled.items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.stem)
def test_samples_are_good_both_ways(sample: Path) -> None:
    raw = yaml.safe_load(sample.read_text())
    stored = admit(structural_schema(InferenceService), raw)
    by_server = InferenceService.read({**stored, "metadata": raw["metadata"]})
    assert by_server == load_manifest(sample), "the CRD's defaults are the model's defaults"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.stem)
def test_what_the_model_writes_the_schema_admits(sample: Path) -> None:
    written = load_manifest(sample).write()
    written["metadata"] = {}
    admit(structural_schema(InferenceService), written)


def test_the_generator_is_a_program() -> None:
    command = [sys.executable, "-m", "ullage_operator.crd", "--check", str(FOLDER)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
