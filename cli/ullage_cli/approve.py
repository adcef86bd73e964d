"""`ullage approve`: a person's yes to a proposal, in a cluster or for a service that `ullage up` runs.

It changes `spec.approved` and `spec.approvedBy` of the record and nothing else; the policy carries the proposal out
at its next sweep, if it still applies then. Saying yes twice is saying it once.
"""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import InputError
from .options import Context, Kubeconfig, Namespace, OutputOption, where_of
from .tables import Output, as_json

if TYPE_CHECKING:
    from ullage_operator.model import Remediation

    from .api import Api, Where

STATE = Path(".ullage")
ATTEMPTS = 3
"""Times that a record is read again because somebody changed it meanwhile."""


def approve(
    remediation: Annotated[str, typer.Argument(metavar="REMEDIATION", help="Name of a record that waits.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Annotated[bool, typer.Option("--local", help="Among those of `ullage up` on this machine.")] = False,
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="With --local: state folders.")] = STATE,
    by: Annotated[
        str | None, typer.Option(metavar="WHO", help="Who approves, for the record.", show_default="user name")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Approve a remediation that was proposed (mode Propose) and waits for a person."""
    who = by or _user()
    if local:
        record, changed = approve_file(remediation, state_dir, who)
    else:
        record, changed = asyncio.run(_in_cluster(remediation, where_of(namespace, kubeconfig, context), who))
    print(as_json(as_dict(record, changed=changed)) if output is Output.JSON else text(record, changed=changed))


def require_open(record: Remediation) -> bool:
    """Whether an approval is still to be given; False when it was given before.

    Raises:
        InputError: it can be approved no more, or never could.
    """
    name, status = record.metadata.name, record.status
    if record.final:
        how = "expired" if status.phase == "Expired" else f"has ended ({status.phase})"
        raise InputError(f"REMEDIATION: {name} {how}: {status.message or 'no reason given'}; a new one may be proposed")
    if record.spec.mode != "Propose":
        raise InputError(f"REMEDIATION: {name} was decided under mode {record.spec.mode}, which asks nobody")
    if status.phase == "Running" and not record.spec.approved:
        raise InputError(f"REMEDIATION: {name} is being carried out already")
    return not record.spec.approved


async def approve_object(api: Api, name: str, who: str) -> tuple[Remediation, bool]:
    """Approve an object of the cluster; the record, and whether anything changed.

    Raises:
        InputError: there is none, or it cannot be approved.
        ApiFailed: the API server refused or did not answer.
    """
    from .api import ApiFailed
    from .explain.records import from_cluster

    for attempt in range(1, ATTEMPTS + 1):
        await _require_kind(api, name)
        record = (await from_cluster(api, name)).record
        if not require_open(record):
            return record, False
        body = {
            "metadata": {"resourceVersion": record.metadata.resource_version},
            "spec": {"approved": True, "approvedBy": who},
        }
        try:
            await api.merge(_path(api, "remediations", name), body)
        except ApiFailed as error:
            if error.status == 409 and attempt < ATTEMPTS:
                continue  # it may have ended, or been approved, meanwhile
            raise
        return _approved(record, who), True
    raise AssertionError("unreachable")


def approve_file(name: str, folder: Path, who: str) -> tuple[Remediation, bool]:
    """Approve a record of `ullage up`; the record, and whether anything changed.

    Raises:
        InputError: there is none, or it cannot be approved.
    """
    from .explain.records import from_state
    from .records import replace_file

    record = from_state(name, folder).record
    if not require_open(record):
        return record, False
    (file,) = sorted(folder.glob(f"*/remediations/{record.metadata.name}.yaml"))[:1]
    approved = _approved(record, who)
    replace_file(file, approved)
    return approved, True


def as_dict(record: Remediation, *, changed: bool) -> dict[str, Any]:
    """For programs."""
    spec = record.spec
    return {
        "name": record.metadata.name,
        "namespace": record.metadata.namespace,
        "service": spec.service,
        "pod": spec.pod,
        "action": spec.action,
        "phase": record.status.phase,
        "approved": spec.approved,
        "approvedBy": spec.approved_by,
        "changed": changed,
    }


def text(record: Remediation, *, changed: bool) -> str:
    """For people."""
    from .words import intention

    if not changed:
        by = f" by {record.spec.approved_by}" if record.spec.approved_by else ""
        return f"{record.metadata.name} was approved before{by}; it is {record.status.phase}."
    return f"Approved: {intention(record)}.\nIt is carried out at the next sweep, if it still applies."


async def _in_cluster(name: str, where: Where, who: str) -> tuple[Remediation, bool]:
    from .api import connected

    async with connected(where) as api:
        return await approve_object(api, name, who)


async def _require_kind(api: Api, name: str) -> None:
    """Say so when a service was named instead of one of its records."""
    if await api.get(_path(api, "remediations", name)) is not None:
        return
    if await api.get(_path(api, "inferenceservices", name)) is not None:
        raise InputError(
            f"REMEDIATION: {name} is an InferenceService; name one of its remediations"
            f" (kubectl get remed -n {api.namespace} -l ullage.dev/service={name})"
        )


def _path(api: Api, plural: str, name: str) -> str:
    from urllib.parse import quote

    from .api import GROUP

    return f"{GROUP}/namespaces/{quote(api.namespace, safe='')}/{plural}/{quote(name, safe='')}"


def _approved(record: Remediation, who: str) -> Remediation:
    return record.model_copy(update={"spec": record.spec.model_copy(update={"approved": True, "approved_by": who})})


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in containers
        return "unknown"
