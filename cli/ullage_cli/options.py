"""Options that several commands share, named as in kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .tables import Output

if TYPE_CHECKING:
    from .api import Where

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NS", help="Namespace; default: that of the context.")
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Default: $KUBECONFIG, ~/.kube/config, or the pod's account.")
]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig.")]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print.")]


def where_of(
    namespace: str | None, kubeconfig: Path | None, context: str | None, *, all_namespaces: bool = False
) -> Where:
    """The options as one object."""
    from .api import Where

    return Where(kubeconfig=kubeconfig, context=context, namespace=namespace, all_namespaces=all_namespaces)
