"""The reference of both kinds, from their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from ullage_operator.crd import crds

HEAD = """\
# Reference: InferenceService and Remediation

Group `ullage.dev/v1alpha1`. Generated from the schemas by `python docs/generate`; `kubectl explain infsvc.spec` shows
the same. A field marked * must be given. Rules across fields stand below each table.
"""


def page() -> str:
    """The page."""
    parts = [HEAD]
    for text in crds().values():
        crd = yaml.safe_load(text)
        names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        parts.append(f"## {names['kind']} (`{names['shortNames'][0]}`)\n\n{schema.get('description', '')}\n")
        for part in ("spec", "status"):
            parts += list(_section(part, schema["properties"][part], 3))
        columns = [column["name"] for column in version.get("additionalPrinterColumns", [])]
        parts.append(f"`kubectl get {names['shortNames'][0]}` shows: {', '.join(columns)}.\n")
    return "\n".join(parts)


def _section(path: str, schema: dict[str, Any], level: int) -> Iterator[str]:
    rows, inner = [], []
    for name, field in sorted((schema.get("properties") or {}).items(), key=_given_first(schema)):
        star = "*" if name in schema.get("required", ()) else ""
        body = field.get("items", field) if field.get("type") == "array" else field
        rows.append(f"| `{name}`{star} | {_type(field)} | {_default(field)} | {_words(field)} |")
        if body.get("properties"):
            inner.append((f"{path}.{name}" + ("[]" if body is not field else ""), body))
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    rules = [f"- {_cell(rule['message'])}" for rule in schema.get("x-kubernetes-validations", []) if "message" in rule]
    description = f"{schema['description']}\n\n" if schema.get("description") else ""
    yield f"{'#' * level} `{path}`\n\n{description}" + "\n".join(table) + "\n"
    if rules:
        yield "\n".join(rules) + "\n"
    for where, body in inner:
        yield from _section(where, body, min(level + 1, 5))


def _given_first(schema: dict[str, Any]) -> Any:
    required = schema.get("required", ())
    return lambda entry: (entry[0] not in required, 0)


def _type(field: dict[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "quantity"
    if field.get("enum"):
        return " or ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map of {_type(field['additionalProperties'])}"
    return kind + _range(field)


def _range(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is None and high is None:
        return ""
    opening = "above " if field.get("exclusiveMinimum") else "from "
    closing = "below " if field.get("exclusiveMaximum") else "to "
    parts = [f"{opening}{low:g}" if low is not None else "", f"{closing}{high:g}" if high is not None else ""]
    return f" {' '.join(part for part in parts if part)}"


def _default(field: dict[str, Any]) -> str:
    if "default" not in field or isinstance(field["default"], dict | list):
        return ""
    return f"`{json.dumps(field['default'])}`"


def _words(field: dict[str, Any]) -> str:
    return _cell(str(field.get("description", "")))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
