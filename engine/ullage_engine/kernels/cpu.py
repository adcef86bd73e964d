"""Calls into the compiled CPU kernels (`cpu.cpp`): torch tensors in, torch tensors out, the GIL released meanwhile.

Each method computes what its torch twin does (named in its docstring); tests hold one against the other. Arguments are
checked here, since nothing is behind.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch

from ullage_engine.errors import KernelError
from ullage_engine.kernels import cpu_build
from ullage_engine.kernels.checks import require, rows_of
from ullage_engine.kernels.tables import BlockTables, Tables, addresses, check_tables
from ullage_engine.kernels.view import LayerView

if TYPE_CHECKING:
    from ullage_engine.layout import CacheLayout
    from ullage_engine.policies.base import Mode, Queries
    from ullage_engine.policies.mass import Keys, Rule

LANES = 16
"""Sizes are multiples of this."""
MAX_HEAD_SIZE = 1024
KINDS = {"fp8": 0, "int8": 1, "bf16": 2, "fp32": 3}
TYPES = {torch.float32: 0, torch.bfloat16: 1}
MODES: dict[Mode, int] = {"square": 0, "sum": 1, "entropy": 2}
SCRATCH, SCRATCH_HEAD = 192, 64
"""Bytes that scoring takes for a row: in each thread for a tile's logits and sums, for each KV head for its parts."""


class Cells(ctypes.Structure):
    """One layer of a block store, as `cpu.cpp` has it."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("block_bytes", "layer_offset", "cell_bytes")),
        *((name, c_int64) for name in ("k_codes", "k_scales", "v_codes", "v_scales")),
        *((name, c_int32) for name in ("kv_heads", "head_size", "block_tokens", "group", "kind")),
    ]


class Reading(ctypes.Structure):
    """What decode reads and writes, as `cpu.cpp` has it."""

    _fields_: ClassVar = [
        ("table", c_void_p), ("table_row", c_int64), ("table_head", c_int64),
        ("rows", c_void_p), ("rows_row", c_int64), ("rows_head", c_int64),
        ("starts", c_void_p), ("known", c_void_p), ("starts_row", c_int64), ("starts_head", c_int64),
        *((name, c_void_p) for name in ("at", "positions", "query", "out", "lse", "sinks")),
        *((name, c_int64) for name in ("query_row", "out_row", "lse_row", "count", "heads", "window")),
        ("scaling", c_float), ("softcap", c_float),
        *((name, c_int32) for name in ("cells", "type", "out_type", "threads")),
    ]  # fmt: skip


class Scoring(ctypes.Structure):
    """Queries that are scored and the keys they look at, as `cpu.cpp` has it."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("queries", "asked", "keys", "positions", "exists", "lse", "out")),
        ("query_row", c_int64), ("query_head", c_int64),
        *((name, c_int64) for name in ("steps", "heads", "kv_heads", "rows", "size", "window")),
        ("scaling", c_float), ("softcap", c_float), ("mode", c_int32), ("threads", c_int32),
    ]  # fmt: skip


SIGNATURES: dict[str, list[type]] = {
    "ullage_write": [c_void_p, c_void_p, c_int64, *[c_void_p, c_int64, c_int64] * 2, c_void_p, c_int32, c_int32],
    "ullage_read": [c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int32, c_int32],
    "ullage_decode": [c_void_p, c_void_p],
    "ullage_scores": [c_void_p],
    "ullage_rms_norm": [c_void_p, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int32, c_int32],
    "ullage_silu_mul": [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32],
    "ullage_rotate": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32],
}  # fmt: skip


class CpuKernels:
    """The compiled library. Calls use as many threads as torch."""

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            KernelError: it can't be loaded here, or it is of another version or for another CPU.
        """
        self._views: WeakKeyDictionary[LayerView, Cells] = WeakKeyDictionary()
        try:
            self._library = ctypes.CDLL(str(path))
            _check_fit(self._library, path)
            for name, arguments in SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, None
        except (OSError, AttributeError) as error:
            raise KernelError(f"the CPU kernels in {path} cannot be loaded: {error}") from error

    @staticmethod
    def serves(layout: CacheLayout) -> bool:
        """Whether these head sizes and scale groups can be handled."""
        sizes = (layout.head_size, layout.group_size)
        return all(size % LANES == 0 for size in sizes) and layout.head_size <= MAX_HEAD_SIZE

    # -- the cache -----------------------------------------------------------------------------------------------

    def _cells(self, view: LayerView) -> Cells:
        """The view for C, made once."""
        cells = self._views.get(view)
        if cells is None:
            cells = self._views[view] = Cells(
                view.data.data_ptr(), view.block_bytes, view.layer_offset, view.cell_bytes,
                view.k_codes, view.k_scales, view.v_codes, view.v_scales,
                view.kv_heads, view.head_size, view.block_tokens, view.group, KINDS[view.kind.name],
            )  # fmt: skip
        return cells

    def write(
        self,
        view: LayerView,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        centre: torch.Tensor | None,
    ) -> None:
        """`kv_write.reference`."""
        cells = self._cells(view)
        if values.dtype != keys.dtype:  # each is rounded by itself, so float32 holds both
            keys, values = keys.float(), values.float()
        keys, values = rows_of(keys), rows_of(values)
        require(slots.dtype == torch.int64 and slots.is_contiguous(), "slots must be contiguous int64", slots)
        shape = (slots.numel(), cells.kv_heads, cells.head_size)
        require(keys.shape == shape, f"keys must be {shape}", keys)
        require(values.shape == shape, f"values must be {shape}", values)
        self._library.ullage_write(
            ctypes.addressof(cells), slots.data_ptr(), slots.numel(),
            keys.data_ptr(), keys.stride(0), keys.stride(1), values.data_ptr(), values.stride(0), values.stride(1),
            None if centre is None else centre.data_ptr(), TYPES[keys.dtype], torch.get_num_threads(),
        )  # fmt: skip

    def read(self, view: LayerView, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`BlockStore.read`: keys and values [N, kv_heads, B * block_tokens, head_size] of blocks [N, B]."""
        return self._read(view, blocks, False, dtype)

    def read_cells(
        self, view: LayerView, offsets: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`read` of cells by their offsets [N, kv_heads, C], as `LayerView.of_cells` has them."""
        require(offsets.shape[1] == view.kv_heads, f"offsets must be of {view.kv_heads} heads", offsets)
        return self._read(view, offsets, True, dtype)

    def _read(
        self, view: LayerView, table: torch.Tensor, by_cell: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cells = self._cells(view)
        table = table.to(torch.int64).contiguous()
        count, width = table.shape[0], table.shape[-1]
        keys = torch.empty((count, cells.kv_heads, width * cells.block_tokens, cells.head_size), dtype=dtype)
        values = torch.empty_like(keys)
        self._library.ullage_read(
            ctypes.addressof(cells), table.data_ptr(), by_cell, count, width, keys.data_ptr(), values.data_ptr(),
            TYPES[dtype], torch.get_num_threads(),
        )  # fmt: skip
        return keys, values

    def decode(
        self,
        view: LayerView,
        tables: Tables,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`paged_decode.reference`.

        Keys and values are never dequantised: K scales multiply logits, V scales multiply probabilities.
        """
        cells = self._cells(view)
        query = rows_of(query)
        query = query if query.stride(1) == cells.head_size else query.contiguous()
        fits = out.shape == query.shape and out.dtype in TYPES and out.is_contiguous()
        require(fits, f"out must be contiguous, {tuple(query.shape)} of one of {tuple(TYPES)}", out)
        check_tables(view, tables, window)
        (table, rows, known), strides = addresses(tables, window)
        for name, given, shape in (("lse", lse, query.shape[:2]), ("sinks", sinks, query.shape[1:2])):
            if given is not None:
                fits = given.shape == shape and given.dtype == torch.float32 and given.stride(-1) == 1
                require(fits, f"{name} must be {tuple(shape)} of float32, the last dimension contiguous", given)
        positions = None if known is None else known.data_ptr()
        blocks = isinstance(tables, BlockTables)
        reading = Reading(
            table.data_ptr(), *strides[:2], rows.data_ptr(), *strides[2:4],
            positions if blocks else None, None if blocks else positions, *strides[4:],
            tables.at.data_ptr(), tables.positions.data_ptr(), query.data_ptr(), out.data_ptr(), _address(lse),
            _address(sinks), query.stride(0), out.stride(0), 0 if lse is None else lse.stride(0), tables.at.numel(),
            query.shape[1], window or 0, scaling, softcap or 0.0,
            not blocks, TYPES[query.dtype], TYPES[out.dtype], torch.get_num_threads(),
        )  # fmt: skip
        self._library.ullage_decode(ctypes.addressof(cells), ctypes.addressof(reading))

    # -- what policies rank by -----------------------------------------------------------------------------------

    def attention(self, queries: Queries, keys: Keys, lse: torch.Tensor | None, mode: Mode, rule: Rule) -> torch.Tensor:
        """`policies.mass.attention`, the same to the bit with any number of threads; positions fit into 32 bits."""
        asked, vectors = rows_of(queries.vectors.float()), keys.vectors.float().contiguous()
        (steps, heads, _), (kv_heads, rows, size) = asked.shape, vectors.shape
        fits = asked.shape[2] == size and heads % kv_heads == 0
        require(fits, f"queries must be of {size} numbers, of a multiple of {kv_heads} heads", asked)
        at, positions = queries.positions.int().contiguous(), keys.positions.int().contiguous()
        exists, lse = keys.exists.contiguous(), None if lse is None else lse.float().contiguous()
        require(at.shape == (steps,), f"queries' positions must be {(steps,)}", at)
        require(positions.shape == (kv_heads, rows), f"keys' positions must be {(kv_heads, rows)}", positions)
        fits = exists.shape == (kv_heads, rows) and exists.dtype == torch.bool
        require(fits, f"exists must be {(kv_heads, rows)} of bool", exists)
        if lse is not None:
            require(lse.shape == (steps, heads), f"lse must be {(steps, heads)}", lse)
        out = torch.empty((kv_heads, rows))
        scoring = Scoring(
            asked.data_ptr(), at.data_ptr(), vectors.data_ptr(), positions.data_ptr(), exists.data_ptr(), _address(lse),
            out.data_ptr(), asked.stride(0), asked.stride(1), steps, heads, kv_heads, rows, size, rule.window or 0,
            rule.scaling, rule.softcap or 0.0, MODES[mode], torch.get_num_threads(),
        )  # fmt: skip
        self._library.ullage_scores(ctypes.addressof(scoring))
        return out

    @staticmethod
    def scratch_bytes(rows: int, kv_heads: int) -> int:
        """Bytes that `attention` takes on top of what it is given."""
        return rows * (SCRATCH * torch.get_num_threads() + SCRATCH_HEAD * kv_heads)

    # -- around it -----------------------------------------------------------------------------------------------

    def rms_norm(
        self, values: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """transformers' RMSNorm of rows [T, size]; `residual`, if given, has `values` added to it first, in place."""
        values = rows_of(values)
        out = torch.empty((values.shape[0], values.shape[1]), dtype=values.dtype)
        require(weight.dtype == values.dtype and weight.is_contiguous(), f"weight must be {values.dtype}", weight)
        if residual is not None:
            alike = residual.shape == out.shape and residual.dtype == out.dtype and residual.is_contiguous()
            require(alike, f"residual must be contiguous, {tuple(out.shape)} of {out.dtype}", residual)
        self._library.ullage_rms_norm(
            values.data_ptr(), values.stride(0), None if residual is None else residual.data_ptr(),
            weight.data_ptr(), eps, out.data_ptr(), *values.shape, TYPES[values.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of rows [T, 2 * size] that hold both."""
        gate_up = gate_up.contiguous()
        count, width = gate_up.shape
        out = torch.empty((count, width // 2), dtype=gate_up.dtype)
        self._library.ullage_silu_mul(
            gate_up.data_ptr(), out.data_ptr(), count, width // 2, TYPES[out.dtype], torch.get_num_threads()
        )
        return out

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """transformers' `apply_rotary_pos_emb` in place on [T, H, D] with contiguous heads; cosine, sine [T, D]."""
        count, heads_, size = heads.shape
        require(heads.stride()[1:] == (size, 1), "heads must lie side by side", heads)
        cosine, sine = cosine.to(heads.dtype).contiguous(), sine.to(heads.dtype).contiguous()
        for angles in (cosine, sine):
            require(angles.shape == (count, size), f"cosine and sine must be {(count, size)}", angles)
        self._library.ullage_rotate(
            heads.data_ptr(), heads.stride(0), cosine.data_ptr(), sine.data_ptr(), count, heads_, size,
            TYPES[heads.dtype], torch.get_num_threads(),
        )  # fmt: skip


def _check_fit(library: ctypes.CDLL, path: Path) -> None:
    """Refuse a library whose calls would be misunderstood, or end the process for want of an instruction."""
    for function in (library.ullage_source, library.ullage_needs):
        function.argtypes, function.restype = [], c_char_p
    if library.ullage_source().decode() != cpu_build.source_hash():
        raise KernelError(f"the CPU kernels in {path} were made from another version of their source; make them anew")
    flags = cpu_build.cpu_flags()
    missing = [name for name in library.ullage_needs().decode().split() if flags and name not in flags]
    if missing:
        raise KernelError(
            f"the CPU kernels in {path} were compiled for a CPU with {', '.join(missing)}, which this one lacks"
        )


def _address(values: torch.Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()
