"""The command line of `ullage explain`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..completion import remediation_names
from ..options import Context, Kubeconfig, Namespace, OutputOption, where_of
from ..tables import Output, as_json

if TYPE_CHECKING:
    from ..api import Where
    from .records import Found

STATE = Path(".ullage")


def explain(
    remediation: Annotated[
        str,
        typer.Argument(
            metavar="REMEDIATION",
            help="Name of a record, or its YAML file.",
            autocompletion=remediation_names,
        ),
    ],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Annotated[bool, typer.Option("--local", help="Among those of `ullage up` on this machine.")] = False,
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="With --local: state folders.")] = STATE,
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell in words what a remediation saw, did and brought, and what would have happened otherwise."""
    from .otherwise import otherwise
    from .story import as_dict, tell, text

    found = _find(remediation, where_of(namespace, kubeconfig, context), state_dir if local else None)
    story = tell(found.record, otherwise(found.record, found.service, found.others))
    print(as_json(as_dict(found.record, story)) if output is Output.JSON else text(story))


def _find(name: str, where: Where, state: Path | None) -> Found:
    from .records import from_file, from_state

    if name.endswith((".yaml", ".yml")) or "/" in name:
        return from_file(Path(name))
    if state is not None:
        return from_state(name, state)
    return asyncio.run(_asked(name, where))


async def _asked(name: str, where: Where) -> Found:
    from ..api import connected
    from .records import from_cluster

    async with connected(where) as api:
        return await from_cluster(api, name)
