"""The command line's words as a `planning.Request`: what was left out is taken from the model and the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .machines import find_gpu
from .planning import WEIGHT_BYTES, Request
from .shape import ModelShape, from_config, read_model
from .sums import Blocks, Load, Machine

_SIZE = re.compile(r"^\s*([0-9.]+)\s*(B|KB|MB|GB|TB|KI|MI|GI|TI|KIB|MIB|GIB|TIB)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{letter}{end}": 1 << 10 * (index + 1) for index, letter in enumerate("KMGT") for end in ("I", "IB")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options as they were given."""

    model: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    parameters: str | None = None
    gpu: str | None = None
    gpus: int = 1
    memory: str | None = None
    bandwidth: float | None = None
    price: float | None = None
    weights: str | None = None
    context: int = 2048
    concurrency: int | None = None
    block_size: int = 16
    scale_group: int | None = None
    budget: float = 0.2
    batch_tokens: int = 512
    reserve: float = 0.1
    step_ms: float | None = None
    narrow_step_ms: float | None = None


def request_of(asked: Asked, *, measured: bool) -> Request:
    """Everything a plan needs. `measured`: the machine may be left out, it will be asked.

    Raises:
        InputError: something is missing or makes no sense.
    """
    if asked.weights is not None and asked.weights not in WEIGHT_BYTES:
        raise InputError(f"--weights: {asked.weights!r} is not one of {', '.join(WEIGHT_BYTES)}")
    for name, value in (("--step-ms", asked.step_ms), ("--narrow-step-ms", asked.narrow_step_ms)):
        if value is not None and not value > 0:
            raise InputError(f"{name}: {value:g} is not above 0; give milliseconds")
    shape = _shape(asked)
    own = asked.kv_heads is not None and asked.model is not None
    return Request(
        shape=shape,
        machine=_machine(asked, measured=measured),
        load=Load(context=asked.context, concurrency=asked.concurrency, batch_tokens=asked.batch_tokens),
        blocks=Blocks(tokens=asked.block_size, scale_group=asked.scale_group),
        weight_type=asked.weights,
        counted_kv_heads=asked.kv_heads if own else None,
        budget=asked.budget,
        step_ms=asked.step_ms,
        narrow_step_ms=asked.narrow_step_ms,
    )


def parse_size(text: str, option: str) -> int:
    """Bytes of `80GB` (10^9) or `24GiB` (2^30).

    Raises:
        InputError: not a size.
    """
    found = _SIZE.match(text)
    try:
        amount = float(found[1]) if found else -1.0
    except ValueError:
        amount = -1.0
    if found is None or amount <= 0:
        raise InputError(f"{option}: {text!r} is not a size; write 80GB or 24GiB")
    return round(amount * _UNITS[(found[2] or "").upper()])


def _shape(asked: Asked) -> ModelShape:
    count = None if asked.parameters is None else _number(asked.parameters)
    if asked.model is not None:
        shape = read_model(asked.model)
        given = {"layers": asked.layers, "heads": asked.heads, "head_size": asked.head_size}
        if any(value is not None for value in given.values()):
            raise InputError("--layers, --heads, --head-size: MODEL says them; leave MODEL or them out")
        if asked.kv_heads is not None and shape.heads % asked.kv_heads:
            raise InputError(f"--kv-heads: {asked.kv_heads} do not divide {shape.heads} query heads")
    else:
        shape = from_config(_config(asked), "model")
    return shape if count is None else replace(shape, parameters=count, file_bytes=None)


def _config(asked: Asked) -> Mapping[str, Any]:
    """Shape flags under the names of a config."""
    if asked.layers is None or asked.heads is None or asked.hidden is None:
        raise InputError("MODEL: none was given; name a folder, a config.json or a known model, or give --layers, "
                         "--heads and --hidden (and --kv-heads, --intermediate, --vocabulary)")  # fmt: skip
    return {
        "num_hidden_layers": asked.layers,
        "num_attention_heads": asked.heads,
        "num_key_value_heads": asked.kv_heads or asked.heads,
        "head_dim": asked.head_size,
        "hidden_size": asked.hidden,
        "intermediate_size": asked.intermediate,
        "vocab_size": asked.vocabulary or 128_000,
        "tie_word_embeddings": False,
    }


def _machine(asked: Asked, *, measured: bool) -> Machine:
    gpu = None if asked.gpu is None else find_gpu(asked.gpu)
    memory = None if asked.memory is None else parse_size(asked.memory, "--memory")
    if gpu is None and memory is None and not measured:
        raise InputError("--gpu: say what the model runs on: --gpu NAME, or --memory SIZE (and --bandwidth)")
    bandwidth = asked.bandwidth * 1e9 if asked.bandwidth is not None else (gpu.bandwidth if gpu else None)
    one = memory if memory is not None else (gpu.memory_bytes if gpu else 0)
    return Machine(
        name=gpu.name if gpu else ("accelerator" if memory is not None else "this machine"),
        memory_bytes=one * asked.gpus,
        bandwidth=None if bandwidth is None else bandwidth * asked.gpus,
        count=asked.gpus,
        reserve=asked.reserve,
        price_per_hour=None if asked.price is None else asked.price * asked.gpus,
    )


def _number(text: str) -> int:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e15:
        raise InputError(f"--parameters: {text!r} is not a number of parameters; write 8e9")
    return round(found)
