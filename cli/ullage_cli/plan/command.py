"""The command line of `ullage plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..completion import starting
from ..errors import InputError
from ..tables import Output, as_json
from .machines import GPUS
from .planning import WEIGHT_BYTES
from .shape import KNOWN

if TYPE_CHECKING:
    from .planning import Plan

_GPU_NAMES, _TYPES = starting(tuple(GPUS)), starting(tuple(WEIGHT_BYTES))


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder or config.json of a model, or a known name (docs/cli.md).",
            autocompletion=starting(tuple(KNOWN)),
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Shape: layers.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Shape: query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Shape, or KV heads to count instead.")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, help="Shape: channels of a head.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Shape: width of the model.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Shape: width of the MLP.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Shape: tokens known.")] = None,
    parameters: Annotated[str | None, typer.Option(metavar="N", help="Parameters, as 8e9.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the built-in table.", autocompletion=_GPU_NAMES),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Accelerators that share the model (tensor parallel).")] = 1,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one: 80GB, 24GiB.")] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", help="Memory bandwidth of one.")] = None,
    price: Annotated[float | None, typer.Option(min=0, metavar="$/H", help="Price of one an hour.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="fp32, bf16, fp16, fp8, int8, int4.", autocompletion=_TYPES),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt and answer.")] = 2048,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Sequences at once; default: all that fit.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    scale_group: Annotated[int | None, typer.Option(min=0, help="Channels per scale; 0: no scales.")] = None,
    budget: Annotated[float, typer.Option(min=0.01, max=1, help="Share kept in the row with a budget.")] = 0.2,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 512,
    reserve: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the memory left alone.")] = 0.1,
    step_ms: Annotated[float | None, typer.Option(metavar="MS", help="A step with a 16-bit cache.")] = None,
    narrow_step_ms: Annotated[float | None, typer.Option(metavar="MS", help="A step with an 8-bit cache.")] = None,
    example: Annotated[bool, typer.Option("--example", help="The published example, then its assumptions.")] = False,
    measure: Annotated[
        str | None, typer.Option(metavar="MANIFEST|URL", help="Run an engine, or ask one, instead of assuming.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw what fits by context length.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print.")] = Output.TABLE,
) -> None:
    """Say how much KV cache a model needs, what fits, and what a million tokens cost.

    Exit status 1: what was asked for fits with no cache type.
    """
    from . import planning, report
    from .asking import Asked, request_of

    asked = Asked(
        model=model, layers=layers, heads=heads, kv_heads=kv_heads, head_size=head_size, hidden=hidden,
        intermediate=intermediate, vocabulary=vocabulary, parameters=parameters, gpu=gpu, gpus=gpus, memory=memory,
        bandwidth=bandwidth, price=price, weights=weights, context=context, concurrency=concurrency,
        block_size=block_size, scale_group=scale_group, budget=budget, batch_tokens=batch_tokens, reserve=reserve,
        step_ms=step_ms, narrow_step_ms=narrow_step_ms,
    )  # fmt: skip
    if example and (model is not None or measure is not None):
        raise InputError("--example: it has its own model and is not measured; leave MODEL and --measure out")
    request = planning.example() if example else request_of(asked, measured=measure is not None)
    if measure is not None:
        from .measure import measured_plan

        found, document, words = measured_plan(measure, request, gpu_named=gpu is not None or memory is not None)
    else:
        found = planning.make_plan(request)
        document, words = report.as_dict(found), report.text(found)
    if example:
        document["corrected"] = report.ladder_dict(request)
        words = f"{words}\n\n{report.ladder_text(request)}"
    if plot is not None:
        _draw(plot, found)
    print(as_json(document) if output is Output.JSON else words)
    if not report.fits_somewhere(found.fits):
        raise typer.Exit(1)


def _draw(file: Path, found: Plan) -> None:
    from .picture import picture

    try:
        file.write_text(picture(found), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--plot: {file}: {error.strerror}; give a file that can be written") from error
    print(f"picture: {file}", file=sys.stderr)
