"""Everything that can be found wrong before anything is started.

Non-goal: what only the engine can know, such as whether a model fits the memory; its own error is passed on.
"""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from ullage_operator.errors import ManifestError
from ullage_operator.manifest import load_manifest
from ullage_operator.model import InferenceService

from .errors import InputError

HOST = "127.0.0.1"
"""Local mode serves this machine only."""
_PACKAGE = "package://"


def read_manifest(path: Path) -> InferenceService:
    """The manifest, checked against the API.

    Raises:
        InputError: it cannot be used; the message names object, field, value and remedy.
    """
    try:
        service = load_manifest(path)
    except ManifestError as error:
        raise InputError(str(error)) from error
    if service.spec.suspend:
        raise InputError(f"{_name(service)}: spec.suspend: True leaves nothing to run; set it to false")
    kind = service.spec.engine.type
    if kind != "ullage":
        raise InputError(f"{_name(service)}: spec.engine.type: {kind!r} is not run here; set ullage")
    return service


def check_machine(service: InferenceService) -> None:
    """Whether this machine has the model and the ports.

    Raises:
        InputError: it has not.
    """
    check_model_source(service)
    check_port_free(service)


def check_model_source(service: InferenceService) -> None:
    """Whether the files of the model, and of the one that drafts for it, exist."""
    _check_source(service, "spec.model.source", service.spec.model.source)
    draft = service.spec.engine.speculation
    if draft is not None and draft.draft_model is not None:
        _check_source(service, "spec.engine.speculation.draftModel", draft.draft_model)


def _check_source(service: InferenceService, field: str, source: str) -> None:
    problem = _package_problem(source) if source.startswith(_PACKAGE) else _path_problem(Path(source).expanduser())
    if problem:
        raise InputError(f"{_name(service)}: {field}: {source!r} {problem}")


def check_port_free(service: InferenceService) -> None:
    """Whether the engine's port can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, service.spec.engine.port))
        except OSError as error:
            raise port_taken(service, error) from error


def port_taken(service: InferenceService, error: OSError) -> InputError:
    """The error for a port that cannot be bound."""
    return InputError(
        f"{_name(service)}: spec.engine.port: {service.spec.engine.port} cannot be bound on {HOST} "
        f"({(error.strerror or str(error)).lower()}); stop what uses it or choose another port"
    )


def _package_problem(source: str) -> str | None:
    module, _, file = source.removeprefix(_PACKAGE).partition("/")
    if not (module and file):
        return "is not complete; write package://MODULE/FILE"
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return f"needs the Python package {module}, which is not installed; install it or name another source"
    folders = [Path(place) for place in found.submodule_search_locations or ()]
    if not any((folder / file).is_file() for folder in folders):
        return f"names no file of the installed package {module}; check the file's name"
    return None


def _path_problem(path: Path) -> str | None:
    if path.is_dir():
        return None if (path / "config.json").is_file() else "is a folder without config.json; name a model's folder"
    if not path.exists():
        return "does not exist on this machine; name a Hugging Face folder, a .gguf file or package://MODULE/FILE"
    return None if path.suffix == ".gguf" else "is neither a folder nor a .gguf file; name one of these"


def _name(service: InferenceService) -> str:
    return f"InferenceService/{service.metadata.name}"
