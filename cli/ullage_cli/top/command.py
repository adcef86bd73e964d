"""The command line of `ullage top`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..options import AllNamespaces, Context, Kubeconfig, Namespace, OutputOption, where_of
from ..tables import Output, as_json

if TYPE_CHECKING:
    from ..api import Where
    from .sources import Source

STATE = Path(".ullage")


def top(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    local: Annotated[bool, typer.Option("--local", help="Services that `ullage up` runs on this machine.")] = False,
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="With --local: their state folders.")] = STATE,
    agent: Annotated[list[str] | None, typer.Option(metavar="URL", help="Agents by metrics URL.")] = None,
    interval: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, as columns.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show services, engines, risk and remediations live.

    From a cluster by default. In a pipe, with --once or with -o json, one reading is printed.
    """
    where = where_of(namespace, kubeconfig, context, all_namespaces=all_namespaces)
    if local and not state_dir.is_dir():
        raise InputError(f"--state-dir: {state_dir} is no folder; run ullage up there, or name its state folder")
    live = not once and output is Output.TABLE and sys.stdout.isatty()
    asyncio.run(_top(where, state_dir if local else None, agent or [], interval, live=live, output=output))


async def _top(
    where: Where, state: Path | None, urls: list[str], interval: float, *, live: bool, output: Output
) -> None:
    from .fleet import as_dict
    from .picture import plain

    async with AsyncExitStack() as stack:
        source = await _source(where, state, urls, stack)
        if not live:
            fleet = await source.read()
            print(as_json(as_dict(fleet)) if output is Output.JSON else plain(fleet))
            return
        await _watch(source, interval)


async def _source(where: Where, state: Path | None, urls: list[str], stack: AsyncExitStack) -> Source:
    from .sources import AgentSource, ClusterSource, LocalSource

    if urls:
        return AgentSource(urls)
    if state is not None:
        return LocalSource(state)
    from ..api import connected

    return ClusterSource(await stack.enter_async_context(connected(where)), where)


async def _watch(source: Source, interval: float) -> None:
    from rich.console import Console

    from .keys import pressed
    from .loop import Viewer

    console = Console(highlight=False)
    with pressed(sys.stdin.fileno()) as keys:
        await Viewer(source=source, console=console, interval_s=interval).run(keys)
