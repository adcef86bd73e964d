"""The commands of `ullage`: reads arguments, prints endings, gives the exit status.

Exit status: 0 done; 1 requests failed or a part broke; 2 bad input, with one line `error: …`; 130 stopped before it
was done, by a signal or, with a demo load, by the end of `--duration`.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .approve import approve
from .completion import completion, prepare
from .doctor.command import doctor
from .errors import CliError, InputError
from .explain.command import explain
from .plan.command import plan
from .replay.command import replay
from .top.command import top
from .tune.command import tune

if TYPE_CHECKING:
    from .session import Ending
    from .up import UpOptions

_STOPPED = 130
_USAGE_ERROR = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
"""Base of what typer raises for bad arguments; it exports the subclass alone."""

app = typer.Typer(
    name="ullage",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _commands(context: typer.Context) -> None:
    """Keeps LLM inference servers from stalling because the KV cache filled up."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def up(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="YAML file with one InferenceService.")],
    demo_load: Annotated[
        bool, typer.Option("--demo-load", help="Send real chats until the risk is high, then let it fall; then stop.")
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Records and logs.", show_default=".ullage/NAME")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop after so long; status 130 if the demo load is not done.",
            show_default="until Ctrl-C",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
) -> None:
    """Run an InferenceService on this machine, without a cluster.

    Starts one engine and one agent for each replica and lets the operator's policy act on them. Ends with a summary
    and, as its last line, one JSON object.
    """
    from .up import UpOptions  # the libraries behind cost half a second that `--help` need not pay

    if duration is not None and not duration > 0:
        raise InputError(f"--duration: {duration:g} is not above 0; give seconds")
    options = UpOptions(manifest=manifest, demo_load=demo_load, state_dir=state_dir, duration_s=duration)
    raise typer.Exit(run_up(options, plain=plain))


app.command()(plan)
app.command()(tune)
app.command()(doctor)
app.command()(top)
app.command()(replay)
app.command()(explain)
app.command()(approve)
app.command()(completion)


@app.command()
def version() -> None:
    """Print the version."""
    print(installed_version("ullage"))


def run_up(options: UpOptions, *, plain: bool) -> int:
    """Run a service to its end and print how it went; the exit status."""
    from .screen import choose_screen
    from .up import up as run_service

    ending = asyncio.run(run_service(options, choose_screen(plain=plain)))
    return conclude(ending, to_the_end=options.demo_load)


def conclude(ending: Ending, *, to_the_end: bool) -> int:
    """Print how a run ended; the exit status. `to_the_end`: being stopped is not its normal end."""
    from .summary import json_line, text

    if ending.outcome is None:
        print("Stopped before it served.", flush=True)
        return _STOPPED
    print(text(ending.outcome), flush=True)
    if ending.problem is not None:
        print(f"error: {ending.problem}", file=sys.stderr, flush=True)
    print(json_line(ending.outcome), flush=True)
    if ending.problem is not None or ending.outcome.requests_failed:
        return CliError.exit_status
    return _STOPPED if ending.interrupted and to_the_end else 0


def reporting(command: Callable[[], object]) -> int:
    """Run a command; whatever goes wrong on purpose becomes one line and an exit status."""
    try:
        status = command()
    except CliError as error:
        return _complain(str(error), error.exit_status)
    except _USAGE_ERROR as error:
        return _complain(f"{error.format_message()} See ullage --help.", InputError.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        return _STOPPED
    except BrokenPipeError:  # whoever read our output has left; so has the need to flush it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CliError.exit_status
    return status if isinstance(status, int) else 0


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name (those of the process by default); returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode sees ?, not a traceback
    words = None if arguments is None else list(arguments)
    prepare()
    plugin = Path(sys.argv[0]).name == "kubectl-ullage"
    name = "kubectl ullage" if plugin else None
    return reporting(lambda: app(args=words, prog_name=name, standalone_mode=False))


def _complain(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status
