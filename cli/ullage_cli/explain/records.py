"""Finds a remediation, its service and the service's other remediations: in a file, in local state, or in a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import yaml
from pydantic import ValidationError

from ullage_operator.errors import ManifestError
from ullage_operator.manifest import read_service
from ullage_operator.model import InferenceService, Remediation
from ullage_operator.records import read_record

from ..api import GROUP, Api, Object
from ..errors import InputError
from ..running import service_of

LABEL = "ullage.dev/service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A remediation and what belongs to it."""

    record: Remediation
    service: InferenceService | None
    """None: not to be had; the story is shorter then."""
    others: tuple[Remediation, ...] = ()


def from_file(file: Path) -> Found:
    """A record in a file, as `ullage up` writes it or `kubectl get -o yaml` prints it; its neighbours too."""
    record = _read(file)
    if record is None:
        raise InputError(f"REMEDIATION: {file} is no Remediation; give a record's file or name")
    others = [other for path in file.parent.glob("[!.]*.yaml") if path != file and (other := _read(path, quiet=True))]
    return Found(
        record=record,
        service=_service(service_of(file.parent.parent)),
        others=tuple(other for other in others if other.spec.service == record.spec.service),
    )


def from_state(name: str, folder: Path) -> Found:
    """By name in the state folders of `ullage up`."""
    files = sorted(folder.glob(f"*/remediations/{name}.yaml"))
    if not files:
        known = sorted(path.stem for path in folder.glob("*/remediations/[!.]*.yaml"))
        raise InputError(f"REMEDIATION: no {name!r} under {folder}; there {_there(known)}")
    return from_file(files[0])


async def from_cluster(api: Api, name: str) -> Found:
    """By name in the namespace."""
    base = f"{GROUP}/namespaces/{quote(api.namespace, safe='')}"
    obj = await api.get(f"{base}/remediations/{quote(name, safe='')}")
    if obj is None:
        known = [str(item["metadata"]["name"]) for item in await api.list(f"{base}/remediations")]
        raise InputError(f"REMEDIATION: no {name!r} in namespace {api.namespace}; there {_there(known)}")
    record = read_record(obj)
    if record is None:
        raise InputError(f"REMEDIATION: {name} is of a version that this program cannot read")
    service = await api.get(f"{base}/inferenceservices/{quote(record.spec.service, safe='')}")
    rest = await api.list(f"{base}/remediations", f"{LABEL}={record.spec.service}")
    read = [other for other in map(read_record, rest) if other and other.metadata.name != name]
    return Found(record=record, service=None if service is None else _service(service), others=tuple(read))


def _read(file: Path, *, quiet: bool = False) -> Remediation | None:
    try:
        obj = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Remediation.read(obj, lenient=True) if isinstance(obj, dict) else None
    except OSError as error:
        raise InputError(f"REMEDIATION: {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        if quiet:
            return None
        raise InputError(f"REMEDIATION: {file} is no Remediation ({' '.join(str(error).split())[:200]})") from error


def _service(obj: Object | None) -> InferenceService | None:
    if not isinstance(obj, dict):
        return None
    try:
        return read_service(obj, stored=True)
    except ManifestError:
        return None


def _there(known: list[str]) -> str:
    if not known:
        return "are none"
    return "are " + ", ".join(known[-5:]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
