"""The command line of `ullage tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from ..options import OutputOption
from ..tables import Output, as_json

if TYPE_CHECKING:
    from .lengths import Mix
    from .measure import Candidate, Measured


def tune(
    recording: Annotated[
        Path | None, typer.Argument(metavar="[RECORDING]", help="Recording or Prometheus answer, for its lengths.")
    ] = None,
    pod: Annotated[str | None, typer.Option(metavar="NAME", help="Engine, where the file holds several.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean prompt, without a recording.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(min=1, help="Mean answer, without a recording.")] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="MANIFEST", help="Start its engine with each cache type, and compare.")
    ] = None,
    types: Annotated[str, typer.Option(metavar="TYPES", help="Cache types beside bf16.")] = "fp8,int8",
    layers: Annotated[
        int | None, typer.Option(min=1, help="The model's layers: also try groups of them in bf16.")
    ] = None,
    groups: Annotated[int, typer.Option(min=2, max=8, help="With --layers: so many groups.")] = 3,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to predict; default: Python's docs.")] = None,
    positions: Annotated[int, typer.Option(min=4, max=1024, help="Places of the text to compare at.")] = 24,
    target: Annotated[float, typer.Option(min=0.0, metavar="KL", help="Greatest KL that is acceptable.")] = 0.01,
    output: OutputOption = Output.TABLE,
) -> None:
    """Advise block size, cache type and per-layer precision from measurements.

    Block size from the lengths of a recording; cache type and layers from what engines predict with each, through their
    public API. Each kind of cache is one start of the engine.
    """
    from . import advice
    from .lengths import SIZES, cost

    mix = _mix(recording, pod, prompt_tokens, answer_tokens)
    if mix is None and measure is None:
        raise InputError("RECORDING: none; give one, or --prompt-tokens and --answer-tokens, or --measure MANIFEST")
    costs = [cost(mix, size) for size in SIZES] if mix is not None else []
    reference: float | None = None
    found: list[Measured] = []
    if measure is not None:
        reference, found = _measured(measure, _candidates(types, layers, groups), text, positions)
    if output is Output.JSON:
        print(as_json(advice.as_dict(mix, costs, reference, found, target)))
        return
    parts = [advice.size_text(mix, costs)] if mix is not None else []
    parts += [advice.type_text(reference, found, target)] if found else []
    print("\n\n".join(parts))


def _mix(recording: Path | None, pod: str | None, prompt: int | None, answer: int | None) -> Mix | None:
    from .lengths import from_means, from_recording

    if recording is not None:
        from ..replay.readings import read_file

        return from_recording(read_file(recording, pod))
    if (prompt is None) != (answer is None):
        raise InputError("--prompt-tokens, --answer-tokens: give both")
    return None if prompt is None or answer is None else from_means(prompt, answer)


def _candidates(types: str, layers: int | None, count: int) -> list[Candidate]:
    from .measure import Candidate
    from .measure import groups as split

    kinds = [kind.strip() for kind in types.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in ("fp8", "int8")]
    if unknown or not kinds:
        raise InputError(f"--types: {types!r}: write fp8, int8 or both")
    found = [Candidate(kind=kind) for kind in kinds]
    if layers is not None:
        if layers < count:
            raise InputError(f"--layers: {layers} layers cannot be cut into {count} groups")
        found += [Candidate(kind=kinds[0], kept_layers=kept) for kept in split(layers, count)]
    return found


def _measured(
    manifest: Path, candidates: list[Candidate], text: Path | None, positions: int
) -> tuple[float | None, list[Measured]]:
    from ..preflight import check_model_source, read_manifest
    from .measure import measure, read_text

    words = read_text(text)
    service = read_manifest(manifest)
    check_model_source(service)
    return measure(service, candidates, words, positions)
