"""The command line of `ullage doctor`."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import AllNamespaces, Context, Kubeconfig, Namespace, OutputOption, where_of
from ..tables import Output, as_json

if TYPE_CHECKING:
    from ..api import Where
    from .findings import Finding


def doctor(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    agent: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Check agents by their metrics URL, without a cluster.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check an installation and say what to fix.

    CRDs, operator, its rights, webhook, certificates, labels, NetworkPolicies, agents and their metrics, versions.
    Exit status 1: something does not work. What may not be read is reported as not checked.
    """
    from . import report

    where = where_of(namespace, kubeconfig, context, all_namespaces=all_namespaces)
    findings = asyncio.run(_agents(agent) if agent else _cluster(where))
    print(as_json(report.as_dict(findings)) if output is Output.JSON else report.text(findings))
    raise typer.Exit(report.status(findings))


async def _cluster(where: Where) -> list[Finding]:
    from ..api import connected
    from .checks import examine
    from .facts import read_facts

    async with connected(where) as api:
        return examine(await read_facts(api, where, now=time.time(), own_version=version("ullage")))


async def _agents(urls: list[str]) -> list[Finding]:
    from ..agents import fetch_agents
    from .checks_service import agent_findings
    from .findings import error

    findings: list[Finding] = []
    for url, found in zip(urls, await fetch_agents(urls), strict=True):
        if isinstance(found, str):
            findings.append(error(f"agent {url}", found, "is it up, and is this its plain port (9400)?"))
        else:
            findings += agent_findings(f"agent {url}", found, version("ullage"))
    return findings
