"""Shell completion: the scripts for bash, zsh and fish, the answers that they ask for, and kubectl's own protocol.

kubectl completes a plugin by a program named `kubectl_complete-ullage`, which prints a word a line and then `:` and
what else the shell may do (0: complete file names where no word was found).
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

PROGRAM = "ullage"
LOOK_UP_S = 3.0
_DEFAULT = ":0"


class Shell(StrEnum):
    """Shells that scripts exist for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Which shell the script is for.")],
) -> None:
    """Print a completion script.

    bash: source <(ullage completion bash); zsh: source <(ullage completion zsh), after compinit; fish: ullage
    completion fish | source. kubectl completes kubectl ullage by itself.
    """
    print(script(PROGRAM, shell))


def script(program: str, shell: Shell) -> str:
    """The script of one program for one shell."""
    made: str = get_completion_script(prog_name=program, complete_var=variable(program), shell=shell.value)
    return made


def variable(program: str) -> str:
    """Name of the environment variable by which the script asks."""
    return f"_{program.replace('-', '_')}_COMPLETE".upper()


def prepare() -> None:
    """Where a script asks, make the shells known; costs nothing otherwise."""
    if variable(PROGRAM) in os.environ:
        completion_init()


def complete_plugin(words: Sequence[str], ask: Callable[[], int]) -> int:
    """Answer kubectl: `words` are those after `kubectl ullage`, the last one unfinished. `ask` runs the program."""
    os.environ[variable(PROGRAM)] = "complete_bash"
    os.environ["COMP_WORDS"] = shlex.join([PROGRAM, *words])
    os.environ["COMP_CWORD"] = str(len(words))
    sys.argv = [PROGRAM]
    try:
        status = ask()
    except SystemExit as end:  # how completion ends
        status = end.code if isinstance(end.code, int) else 0
    print(_DEFAULT, flush=True)
    return status


def starting(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Those of a fixed list that begin so."""
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]


def remediation_names(context: typer.Context, incomplete: str) -> list[str]:
    """Records of the namespace, or of local runs; none where nobody answers in time."""
    given = context.params
    if given.get("local"):
        folder = Path(given.get("state_dir") or ".ullage")
        found = sorted(path.stem for path in folder.glob("*/remediations/[!.]*.yaml"))
    else:
        try:
            found = asyncio.run(asyncio.wait_for(_stored(given), LOOK_UP_S))
        except Exception:  # noqa: BLE001  a shell that completes must not be disturbed
            return []
    return [name for name in found if name.startswith(incomplete)]


async def _stored(given: dict[str, object]) -> list[str]:
    from .api import Where, connected, path_of

    kubeconfig, context, namespace = given.get("kubeconfig"), given.get("context"), given.get("namespace")
    where = Where(
        kubeconfig=Path(str(kubeconfig)) if kubeconfig else None,
        context=str(context) if context else None,
        namespace=str(namespace) if namespace else None,
    )
    async with connected(where) as api:
        return [str(obj["metadata"]["name"]) for obj in await api.list(path_of(where, api, "remediations"))]
