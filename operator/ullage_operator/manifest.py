"""Read an `InferenceService` from a file or an API object; say in one line what is wrong with it.

Non-goal: checks that need the machine (does the model exist, does it fit): the engine makes those.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ullage_operator.errors import ManifestError
from ullage_operator.fields import FAULT
from ullage_operator.model import API_VERSION, InferenceService

_WRITTEN_KEYS = ("apiVersion", "kind", "metadata", "spec")


def load_manifest(path: Path | str) -> InferenceService:
    """Read the one `InferenceService` in a YAML or JSON file; other documents in it are passed over.

    Raises:
        ManifestError: unreadable, none or several in it, or invalid.
    """
    source = Path(path)
    try:
        documents = list(yaml.safe_load_all(source.read_text(encoding="utf-8")))
    except OSError as error:
        raise ManifestError(f"{source}: {error.strerror or error}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"{source}: is not valid YAML: {_one_line(str(error))}") from error
    services = [item for item in documents if isinstance(item, dict) and item.get("kind") == "InferenceService"]
    if len(services) != 1:
        found = [str(item.get("kind")) for item in documents if isinstance(item, dict)]
        raise ManifestError(
            f"{source}: holds {len(services)} objects of kind InferenceService"
            f" (found: {', '.join(found) or 'nothing'}); give a file with exactly one"
        )
    return read_service(services[0])


def read_service(obj: object, *, stored: bool = False) -> InferenceService:
    """Validate an object. `stored` is for objects from the API server: defaults of a newer CRD are ignored.

    Raises:
        ManifestError: one line with object, field, value and remedy.
    """
    if isinstance(obj, dict) and obj.get("apiVersion") != API_VERSION:
        version = obj.get("apiVersion")
        remedy = f"write {API_VERSION}"
        raise ManifestError(f"{_object_name(obj)}: apiVersion: {version!r} is not served; {remedy}")
    try:
        return InferenceService.read(obj, lenient=stored)
    except ValidationError as error:
        raise ManifestError(explain(error, obj)) from error


def explain(error: ValidationError, obj: object) -> str:
    """One line for a failed validation of `obj`: the first problem, and how many more there are."""
    problems = error.errors(include_url=False)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _one_line(f"{_object_name(obj)}: {_problem(problems[0])}{more}")


def _object_name(obj: object) -> str:
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return _one_line(f"InferenceService/{name or '(unnamed)'}")


def _problem(problem: ErrorDetails) -> str:
    location = [str(part) for part in problem["loc"]]
    context: dict[str, Any] = problem.get("ctx") or {}
    kind = problem["type"]
    if kind == FAULT:
        place = ".".join([*location, *filter(None, [context["field"]])])
        return f"{place}: {context['message']}"
    place = ".".join(location) or "(object)"
    if kind == "extra_forbidden":
        return f"{place}: {_shown(problem['input'])} is set, but there is no such field; {_nearest(location)}"
    if kind == "missing":
        return f"{place}: is missing; set it{_hint(location)}"
    return f"{place}: {_shown(problem['input'])} is refused: {_lower(problem['msg'])}{_hint(location)}"


def _nearest(location: list[str]) -> str:
    known = _fields_at(location[:-1])
    close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


def _hint(location: list[str]) -> str:
    """The field's own documentation, where it has one; for what is no object at all, what an object has."""
    if not location:
        return f"; give an object with {', '.join(_WRITTEN_KEYS)}"
    owner = _model_at(location[:-1])
    if owner is None:
        return ""
    for info in owner.model_fields.values():
        if info.alias == location[-1] and info.description:
            return f" ({_one_line(info.description).rstrip('.')})"
    return ""


def _fields_at(location: list[str]) -> list[str]:
    owner = _model_at(location)
    return [str(info.alias) for info in owner.model_fields.values()] if owner else []


def _model_at(location: list[str]) -> type[BaseModel] | None:
    owner: type[BaseModel] = InferenceService
    for part in location:
        annotation = next((i.annotation for i in owner.model_fields.values() if i.alias == part), None)
        found = next((c for c in (annotation, *get_args(annotation)) if _is_model(c)), None)
        if found is None:
            return None
        owner = cast(type[BaseModel], found)
    return owner


def _is_model(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def _shown(value: object) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _one_line(text: str) -> str:
    return " ".join(text.split())
