"""The compiled CPU kernels against their torch twins, and what happens where they can't be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.attention import Batch, make_batch, paged_attention
from ullage_engine.build import require_served
from ullage_engine.config import EngineConfig
from ullage_engine.errors import KernelError
from ullage_engine.kernels import cpu_build
from ullage_engine.kernels.attend import attend
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.kernels.tables import BlockTables
from ullage_engine.kernels.view import Section
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import KvType
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore

KINDS: tuple[KvType, ...] = ("fp8", "int8", "bf16", "fp32")
SHAPES = ((64, None), (128, None), (256, None), (64, 16), (80, 80))
"""Head size and scale group: both that have an instance of their own, two groups, narrow groups, odd sizes."""


def stores(
    layout: CacheLayout, blocks: int, kernels: CpuKernels, centred: bool = False
) -> tuple[BlockStore, BlockStore]:
    """Two equal stores, the first with torch, the second with the kernels."""
    shape = (layout.layers, layout.kv_heads, layout.head_size)
    centre = torch.randn(shape, generator=torch.Generator().manual_seed(1)) if centred else None
    return BlockStore(layout, blocks, "cpu", centre), BlockStore(layout, blocks, "cpu", centre, kernels)


def rows_of(count: int, layout: CacheLayout, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values over many orders of magnitude, zeros and a strong channel among them; K and V differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, layout.kv_heads, layout.head_size)
    keys = torch.randn(shape, generator=generator) * (torch.randn(shape, generator=generator) * 2).exp()
    values = torch.randn(shape, generator=generator) * 20
    keys[0] = 0
    keys[-1, :, 3] = 300.0
    values[count // 2] *= 1e-20
    return keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "group"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_written_bytes_and_read_values_equal_torchs(
    cpu_kernels: CpuKernels, kind: KvType, size: int, group: int | None, dtype: torch.dtype
) -> None:
    for centred, block in ((False, 16), (True, 8)):
        layout = CacheLayout(2, 3, size, block, kind, group)
        plain, native = stores(layout, 20, cpu_kernels, centred)
        slots = torch.randperm(20 * block, generator=torch.Generator().manual_seed(2))[:101]
        slots[5::9] = -1  # padding of a batch
        keys, values = rows_of(101, layout, dtype, seed=3)
        for store in (plain, native):
            store.write(1, slots, keys, values)
        assert torch.equal(plain.data, native.data)
        blocks = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(4))
        for one, other in zip(plain.read(1, blocks, dtype), native.read(1, blocks, dtype), strict=True):
            assert torch.equal(one, other)


def test_every_e4m3_code_is_written_and_read_as_torch_does(cpu_kernels: CpuKernels) -> None:
    """All codes with the scale 1 (absmax 448), and all midpoints between neighbours, where rounding shows."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[~codes.isnan()].sort().values
    rows = torch.cat((finite, (finite[1:] + finite[:-1]) / 2))
    rows = torch.nn.functional.pad(rows, (0, -rows.numel() % 15)).view(-1, 1, 15)
    rows = torch.nn.functional.pad(rows, (0, 1), value=448.0)
    layout = CacheLayout(1, 1, 16, 16, "fp8")
    plain, native = stores(layout, layout.blocks_for(len(rows)), cpu_kernels)
    for store in (plain, native):
        store.write(0, torch.arange(len(rows)), rows, -rows)
    assert torch.equal(plain.data, native.data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_fault_of_the_model_stays_visible(cpu_kernels: CpuKernels, kind: KvType, bad: float) -> None:
    layout = CacheLayout(1, 1, 32, 16, kind)
    _, native = stores(layout, 1, cpu_kernels)
    rows = torch.ones(4, 1, 32)
    rows[2, 0, 5] = bad
    native.write(0, torch.arange(4), rows, rows)
    for read in native.read(0, torch.tensor([[0]]), torch.float32):
        assert not read[0, 0, 2].isfinite().all()
        assert torch.equal(read[0, 0, :2], torch.ones(2, 32))


def chunk(length: int, blocks: list[int], size: int, count: int = 1, dropped: int = 0) -> Chunk:
    """A sequence of `length` computed tokens about to compute `count`; `dropped` blocks are gone after the first."""
    request = GenerationRequest(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=1))
    sequence = Sequence(request, lambda output: None, 0, [0] * (length + count), size)
    sequence.append_blocks(blocks)
    for _ in range(dropped):
        sequence.table.pop(1)
        sequence.starts.pop(1)
        sequence.dropped += size
    sequence.computed = length
    return Chunk(sequence, count)


class Module(torch.nn.Module):
    layer_idx = 1


def decoding(batch: Batch) -> BlockTables:
    """The tables of a step that only decodes."""
    (part,) = batch.parts
    assert isinstance(part.tables, BlockTables)
    return part.tables


def decode(
    store: BlockStore, layer: int, tables: BlockTables, query: torch.Tensor, out: torch.Tensor, scaling: float
) -> None:
    store.operations.paged_decode(store.views[layer], tables, query, out, None, scaling=scaling)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    size=st.sampled_from([8, 16, 32]),
    heads=st.sampled_from([1, 2, 3]),
    repeat=st.sampled_from([1, 2, 3, 4, 7]),
    lengths=st.lists(st.sampled_from([0, 1, 14, 15, 16, 17, 63, 200]), min_size=1, max_size=4),
    prefill=st.integers(0, 20),
    dropped=st.integers(0, 2),
    window=st.sampled_from([None, 1, 20]),
    softcap=st.sampled_from([None, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_step_attends_as_torch_does(cpu_kernels: CpuKernels, **drawn: Any) -> None:
    """Decoding sequences of unequal contexts beside a chunk of prefill, blocks in any order, some evicted."""
    kind, (width, group), size = drawn["kind"], drawn["shape"], drawn["size"]
    layout = CacheLayout(2, drawn["heads"], width, size, kind, group)
    counts = [1] * len(drawn["lengths"]) + ([drawn["prefill"]] if drawn["prefill"] > 1 else [])
    lengths = [*drawn["lengths"], 5][: len(counts)]
    needed = [layout.blocks_for(length + count) for length, count in zip(lengths, counts, strict=True)]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(5)).tolist()
    chunks = []
    for length, count, blocks in zip(lengths, counts, needed, strict=True):
        mine, order = order[:blocks], order[blocks:]
        dropped = drawn["dropped"] if blocks > 3 else 0
        chunks.append(chunk(length, mine, size, count, dropped))
    plain, native = stores(layout, sum(needed), cpu_kernels)
    past = rows_of(sum(needed) * size, layout, torch.float32, seed=6)
    for store in (plain, native):
        store.write(1, torch.arange(sum(needed) * size), *past)
    tokens, dtype = sum(counts), drawn["dtype"]
    keys, values = rows_of(tokens, layout, dtype, seed=7)
    generator = torch.Generator().manual_seed(8)
    query = torch.randn(tokens, drawn["heads"] * drawn["repeat"], width, generator=generator).to(dtype)
    answers = [
        paged_attention(
            Module(), *(part.to(of).transpose(0, 1).unsqueeze(0) for part in (query, keys, values)), None,
            scaling=0.05, ullage_batch=make_batch(store, chunks, torch.device("cpu")),
            sliding_window=drawn["window"], softcap=drawn["softcap"],
        )[0].float()
        for store, of in ((plain, torch.float32), (native, dtype))
    ]  # fmt: skip
    # float32 sums in another order; of a bfloat16 query the result alone is rounded, to 8 bits. A bfloat16 chunk of
    # prefill is torch's own on both sides, and rounds its keys
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1 / 256}[dtype]
    compared = tokens if dtype == torch.float32 else len(drawn["lengths"])
    one, other = (answer[0, :compared] for answer in answers)
    assert torch.allclose(one, other, rtol=tolerance, atol=2e-5 * 60)


def test_an_answer_does_not_depend_on_the_batch_or_on_threads(cpu_kernels: CpuKernels) -> None:
    layout = CacheLayout(2, 3, 64)
    store = BlockStore(layout, 60, "cpu", None, cpu_kernels)
    store.write(1, torch.arange(960), *rows_of(960, layout, torch.float32, seed=0))
    lengths = [3, 200, 17, 90]
    chunks = [chunk(n, list(range(15 * i, 15 * i + 15)), 16) for i, n in enumerate(lengths)]
    query = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(0))

    def answers(of: list[int]) -> torch.Tensor:
        batch = make_batch(store, [chunks[i] for i in of], torch.device("cpu"))
        tables = decoding(batch)
        out = torch.full((len(of), 9, 64), torch.nan)
        decode(store, 1, tables, query[of], out, 0.1)
        return out

    alone = torch.cat([answers([i]) for i in range(4)])
    torch.set_num_threads(2)
    try:
        together = answers([0, 1, 2, 3])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together)


def test_a_long_context_stays_exact(cpu_kernels: CpuKernels) -> None:
    """20,000 keys whose weights are alike: float32 sums must not drift."""
    rows = 20_000
    layout = CacheLayout(1, 1, 64, 32, "fp32")
    store = BlockStore(layout, layout.blocks_for(rows + 1), "cpu", None, cpu_kernels)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, rows + 1, 1, 64, generator=generator)
    store.write(0, torch.arange(rows + 1), keys, values)
    batch = make_batch(store, [chunk(rows, list(range(layout.blocks_for(rows + 1))), 32)], torch.device("cpu"))
    query = torch.randn(1, 1, 64, generator=generator)
    out = torch.empty(1, 1, 64)
    tables = decoding(batch)
    decode(store, 0, tables, query, out, 0.125)
    weights = (query.double()[0] @ keys[:, 0].double().T * 0.125).softmax(-1)
    assert torch.allclose(out[0].double(), weights @ values[:, 0].double(), rtol=0, atol=1e-6)


def test_sums_of_attention_agree_with_float64(cpu_kernels: CpuKernels) -> None:
    """Against `attend` in float64 over what was read back, logits large enough for exp to matter."""
    layout = CacheLayout(1, 2, 64)
    store = BlockStore(layout, 8, "cpu", None, cpu_kernels)
    store.write(0, torch.arange(128), *rows_of(128, layout, torch.float32, seed=1))
    batch = make_batch(store, [chunk(99, list(range(8)), 16)], torch.device("cpu"))
    query = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    out = torch.empty(1, 6, 64)
    tables = decoding(batch)
    decode(store, 0, tables, query, out, 0.1)
    keys, values = (part.double() for part in store.read(0, tables.tables, torch.float32))
    mask = (torch.arange(112) < 100).view(1, 1, 1, 112)
    sections = (Section(keys, None), Section(values, None))
    wanted = attend(query.double().unsqueeze(2), *sections, mask, scaling=0.1)[0][:, :, 0]
    # 24 bits of float32 over values up to 60
    assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("queries", "values"), [(1e4, 1.0), (1.0, 1e-8), (1e-8, 1e6)])
@pytest.mark.parametrize("shape", [(64, None), (64, 32)])
def test_large_queries_and_small_values_keep_their_digits(
    cpu_kernels: CpuKernels, kind: KvType, queries: float, values: float, shape: tuple[int, int | None]
) -> None:
    """The factor of e4m3's bits, 2^120, neither overflows with queries nor pushes values below float32's range."""
    layout = CacheLayout(1, 1, shape[0], 16, kind, shape[1])
    store = BlockStore(layout, 20, "cpu", None, cpu_kernels)
    key, value = torch.randn(2, 320, 1, 64, generator=torch.Generator().manual_seed(3))
    store.write(0, torch.arange(320), key / queries, value * values)
    batch = make_batch(store, [chunk(319, list(range(20)), 16)], torch.device("cpu"))
    tables = decoding(batch)
    query = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(4)) * queries
    out = torch.empty(1, 1, 64)
    decode(store, 0, tables, query, out, 0.125)
    keys, read = (part.double() for part in store.read(0, tables.tables, torch.float32))
    everything = torch.ones(1, 1, 1, 320, dtype=torch.bool)
    wanted, _ = attend(query.double().unsqueeze(2), Section(keys, None), Section(read, None), everything, scaling=0.125)
    assert torch.allclose(out.double() / values, wanted[:, :, 0] / values, rtol=1e-4, atol=1e-6)


def test_arguments_that_would_be_read_past_their_end_are_refused(cpu_kernels: CpuKernels) -> None:
    layout = CacheLayout(1, 2, 32)
    _, store = stores(layout, 2, cpu_kernels)
    rows, slots = torch.ones(4, 2, 32), torch.arange(4)
    with pytest.raises(ValueError, match="slots must be contiguous int64"):
        store.write(0, slots.int(), rows, rows)
    with pytest.raises(ValueError, match="slots must be contiguous int64"):
        store.write(0, torch.arange(8)[::2], rows, rows)
    with pytest.raises(ValueError, match="values must be"):
        store.write(0, slots, rows, rows[:3])
    with pytest.raises(ValueError, match="keys must be"):
        store.write(0, slots, rows[..., :16], rows)
    # a model that rotates only part of a head has narrower angles
    with pytest.raises(ValueError, match="cosine and sine must be"):
        cpu_kernels.rotate(rows, torch.ones(4, 16), torch.ones(4, 16))
    with pytest.raises(ValueError, match="heads must lie side by side"):
        cpu_kernels.rotate(rows.transpose(0, 1), torch.ones(2, 32), torch.ones(2, 32))
    with pytest.raises(ValueError, match="weight must be"):
        cpu_kernels.rms_norm(rows[:, 0], torch.ones(32, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="residual must be"):
        cpu_kernels.rms_norm(rows[:, 0], torch.ones(32), 1e-5, rows[:, 1])


def test_keys_and_values_of_unlike_types_are_written_as_torch_does(cpu_kernels: CpuKernels) -> None:
    """As where a model rotates keys in float32 and leaves values in bfloat16."""
    plain, native = stores(CacheLayout(1, 3, 64), 7, cpu_kernels)
    keys, values = rows_of(101, plain.layout, torch.float32, seed=9)
    for store in (plain, native):
        store.write(0, torch.arange(101), keys, values.bfloat16())
    assert torch.equal(plain.data, native.data)


def test_strided_inputs_of_the_small_operations(cpu_kernels: CpuKernels) -> None:
    wide = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    every_other, left = wide[:, ::2], wide[:, :64]
    ones = torch.ones(96)
    assert torch.equal(
        cpu_kernels.rms_norm(every_other, ones, 1e-5), cpu_kernels.rms_norm(every_other.clone(), ones, 1e-5)
    )
    assert torch.equal(cpu_kernels.silu_mul(left), cpu_kernels.silu_mul(left.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_small_operations_equal_transformers(cpu_kernels: CpuKernels, dtype: torch.dtype, rows: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(rows)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]  # transformers rounds twice, the kernel once

    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance * 4)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    norm = LlamaRMSNorm(96, 1e-5).to(dtype)
    norm.weight.data.copy_(random(96))
    values, residual = random(rows, 96), random(rows, 96)
    weight = norm.weight.detach()
    assert close(cpu_kernels.rms_norm(values, weight, 1e-5), norm(values))
    wanted = residual + values
    assert close(cpu_kernels.rms_norm(values, weight, 1e-5, residual), norm(wanted))
    assert torch.equal(residual, wanted)

    both = random(rows, 2 * 160) * 10
    both[0, :2] = torch.tensor([200.0, -200.0])
    gate, up = both.split(160, dim=1)
    assert close(cpu_kernels.silu_mul(both), torch.nn.functional.silu(gate) * up)

    packed = random(rows, 7, 64)  # the last two heads are values: not rotated
    angles = torch.randn(rows, 32, generator=generator) * 100
    cosine, sine = (f(torch.cat((angles, angles), -1)).to(dtype) for f in (torch.cos, torch.sin))
    query, key = (packed[:, a:b].transpose(0, 1).unsqueeze(0) for a, b in ((0, 4), (4, 5)))
    rotated = [part[0].transpose(0, 1) for part in apply_rotary_pos_emb(query, key, cosine[None], sine[None])]
    expected = torch.cat((*rotated, packed[:, 5:]), 1)
    cpu_kernels.rotate(packed[:, :5], cosine, sine)
    assert close(packed, expected)
    assert torch.equal(packed[:, 5:], expected[:, 5:])


def test_compiled_kernels_that_are_insisted_on_serve_or_the_start_fails(cpu_kernels: CpuKernels) -> None:
    odd = CacheLayout(1, 1, 24, 16, "fp8", 24)
    with pytest.raises(KernelError, match="--kernels: native has none for head size 24 and scale groups of 24"):
        require_served(EngineConfig(model="m", kernels="native"), cpu_kernels, odd)
    require_served(EngineConfig(model="m"), cpu_kernels, odd)
    require_served(EngineConfig(model="m", kernels="native"), cpu_kernels, CacheLayout(1, 1, 32))


def test_sizes_that_are_no_whole_vectors_are_left_to_torch(cpu_kernels: CpuKernels) -> None:
    for size, group in ((24, None), (32, 8), (2048, 128)):
        assert not CpuKernels.serves(CacheLayout(1, 1, size, 16, "fp8", group))
        assert BlockStore(CacheLayout(1, 1, size, 16, "fp8", group), 1, "cpu", None, cpu_kernels).kernels is None


# -- where they come from --------------------------------------------------------------------------------------------


def test_a_library_is_made_once_and_named_after_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def build(target: Path, compiler: tuple[str, ...], march: str = "native") -> None:
        made.append(compiler)
        target.write_bytes(b"")

    monkeypatch.setattr(cpu_build, "build", build)
    environment = {"PATH": os.environ["PATH"]}
    first = cpu_build.library(tmp_path, environment)
    assert cpu_build.library(tmp_path, environment) == first
    monkeypatch.setattr(cpu_build, "_cpu", lambda: b"another")
    assert cpu_build.library(tmp_path, environment) != first
    assert len(made) == 2


def test_what_stands_in_the_way_is_said(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"no C\+\+ compiler .* is on the PATH"):
        cpu_build.library(tmp_path, {"PATH": str(tmp_path)})
    with pytest.raises(KernelError, match=r"no C\+\+ compiler \(nonesuch\)"):
        cpu_build.library(tmp_path, {"PATH": os.environ["PATH"], "CXX": "nonesuch"})
    with pytest.raises(KernelError, match=r"ULLAGE_CPU_KERNELS: .*gone\.so is not a file"):
        cpu_build.library(tmp_path, {"ULLAGE_CPU_KERNELS": str(tmp_path / "gone.so")})
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(KernelError, match="the disk is on fire"):
        cpu_build.library(tmp_path, {"PATH": os.environ["PATH"], "CXX": str(broken)})
    assert not list(tmp_path.glob("*.so"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(KernelError, match=r"text\.so cannot be loaded"):
        CpuKernels(tmp_path / "text.so")


def test_a_prebuilt_library_is_taken(cpu_library: Path, tmp_path: Path) -> None:
    found = cpu_build.library(tmp_path, {"ULLAGE_CPU_KERNELS": str(cpu_library), "PATH": ""})
    assert found == cpu_library
    CpuKernels(found)


def test_a_compiler_may_come_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CXX="ccache g++"`; a path with spaces is one program."""
    wrapper = tmp_path / "my ccache"
    wrapper.write_text('#!/bin/sh\nprintf \'%s\\n\' "$TMPDIR" "$@" >&2\nexit 3\n')
    wrapper.chmod(0o755)
    plain = tmp_path / "ccache"
    plain.write_bytes(wrapper.read_bytes())
    plain.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert cpu_build.find_compiler({"PATH": path, "CXX": "ccache c++ -m64"}) == (str(plain), "c++", "-m64")
    assert cpu_build.find_compiler({"PATH": path, "CXX": str(wrapper)}) == (str(wrapper),)
    with pytest.raises(KernelError, match=r"no C\+\+ compiler \(g\+\+ 'half\)"):
        cpu_build.find_compiler({"PATH": path, "CXX": "g++ 'half"})
    ran: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        ran.append({"command": command, **options})
        raise OSError("enough")

    monkeypatch.setattr(cpu_build.subprocess, "run", run)
    with pytest.raises(KernelError, match="enough"):
        cpu_build.library(tmp_path / "cache", {"PATH": path, "CXX": "ccache c++ -m64"})
    assert ran[0]["command"][:3] == [str(plain), "c++", "-m64"]
    # compilers' temporary files go beside the library: /tmp may be read-only
    assert Path(ran[0]["env"]["TMPDIR"]).parent == tmp_path / "cache"


def test_a_cache_that_cannot_be_written_or_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled before is taken from a read-only cache; where nothing was, that is said."""

    class Lock:
        fault: Exception = PermissionError(30, "Read-only file system")

        def __init__(self, path: str) -> None:
            raise self.fault

    monkeypatch.setattr(cpu_build, "FileLock", Lock)
    environment = {"PATH": os.environ["PATH"]}
    with pytest.raises(KernelError, match="cannot be written: Read-only file system"):
        cpu_build.library(tmp_path, environment)
    monkeypatch.setattr(Lock, "fault", NotImplementedError("no locks here"))
    with pytest.raises(KernelError, match="cannot be written: no locks here"):
        cpu_build.library(tmp_path, environment)
    made = tmp_path / f"cpu-{cpu_build._key(cpu_build.find_compiler(environment))}.so"
    made.write_bytes(b"")
    assert cpu_build.library(tmp_path, environment) == made


def test_a_library_for_another_cpu_or_of_another_version_is_refused(
    cpu_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of ending the process by an illegal instruction, or of reading arguments it does not have."""
    old = tmp_path / "cpuinfo"
    old.write_text("processor\t: 0\nflags\t\t: fpu sse sse2\nFeatures\t: fp asimd\n")
    if cpu_build.cpu_flags() & {"avx", "sve"}:
        with monkeypatch.context() as patch:
            patch.setattr(cpu_build, "CPU_INFO", old)
            with pytest.raises(KernelError, match=r"compiled for a CPU with .*(avx2|sve).*, which this one lacks"):
                CpuKernels(cpu_library)
            patch.setattr(cpu_build, "CPU_INFO", tmp_path / "none")  # nothing known: nothing held against it
            CpuKernels(cpu_library)
    monkeypatch.setattr(cpu_build, "source_hash", lambda: "another")
    with pytest.raises(KernelError, match="another version of their source"):
        CpuKernels(cpu_library)
