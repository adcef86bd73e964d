"""The Triton kernel that quantises on write, against torch to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import kernel_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels import kv_write
from ullage_engine.layout import CacheLayout
from ullage_engine.quant import CACHE_TYPES, EPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wide(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers over many orders of magnitude, zeros and rows of zeros among them."""
    rows = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp()
    rows[torch.rand(shape, generator=generator) < 0.05] = 0.0
    rows[::7] = 0.0
    return rows.clamp(-6e4, 6e4)  # float16 has them


def both(
    layout: CacheLayout,
    blocks: int,
    layer: int,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    centre: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of a poisoned store after the kernel, and after the reference on the CPU."""
    ours = cases.poisoned(layout, blocks)
    wanted = cases.cpu_copy(ours)
    at = cases.DEVICE
    moved = (slots.to(at), keys.to(at), values.to(at), None if centre is None else centre.to(at))
    kv_write.kernel(ours.views[layer], *moved)
    kv_write.reference(wanted.views[layer], slots, keys, values, centre)
    return ours.data.cpu(), wanted.data


@settings(max_examples=25)
@given(
    layout=cases.layouts(),
    tokens=st.sampled_from(cases.LENGTHS[:-1]) | st.integers(0, 40),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    centred=st.booleans(),
    packed=st.booleans(),
    padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bytes_equal_the_reference_and_nothing_else_is_touched(
    layout: CacheLayout,
    tokens: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    centred: bool,
    packed: bool,
    padding: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = layout.blocks_for(tokens) + 2
    heads, size = layout.kv_heads, layout.head_size
    rows = wide(generator, tokens, 2 * heads, size)
    if packed:  # as a fused projection gives them: heads of keys and values side by side in one row
        keys, values = rows.to(dtypes[0]).split(heads, dim=1)
    else:
        keys, values = rows[:, :heads].to(dtypes[0]), rows[:, heads:].to(dtypes[1])
    slots = torch.randperm(blocks * layout.block_tokens, generator=generator)[:tokens]
    if padding:
        slots[1::3] = -1
    centre = torch.randn(heads, size, generator=generator) * 5 if centred else None
    ours, wanted = both(layout, blocks, layout.layers - 1, slots, keys, values, centre)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_a_long_prefill_is_written_whole(kind: str) -> None:
    layout = CacheLayout(2, 3, 64, 16, kind)
    tokens = cases.LENGTHS[-1]
    generator = torch.Generator().manual_seed(3)
    blocks = layout.blocks_for(tokens) + 1
    slots = torch.randperm(blocks * 16, generator=generator)[:tokens]
    rows = torch.randn(2, tokens, 3, 64, generator=generator).bfloat16()
    ours, wanted = both(layout, blocks, 1, slots, rows[0], rows[1], None)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_code_its_neighbours_and_halves_round_as_torch_does(kind: str) -> None:
    limit = CACHE_TYPES[kind].limit or 0.0
    if kind == "fp8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[codes.isfinite()].sort().values
    else:
        codes = torch.arange(-127.0, 128.0)
    halves = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, halves])
    points = torch.cat([points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-torch.inf))])
    points = points[points.abs() <= limit]
    # the group's first channel is the limit, so that its scale is exactly one
    points = torch.cat([points, torch.zeros(-len(points) % 15)]).view(-1, 15)
    rows = torch.cat([torch.full((len(points), 1), limit), points], dim=1).unsqueeze(1)
    layout = CacheLayout(1, 1, 16, 8, kind)
    ours, wanted = both(layout, layout.blocks_for(len(rows)), 0, torch.arange(len(rows)), rows, rows, None)
    assert torch.equal(ours, wanted)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_fault_of_the_model_stays_visible(kind: str, bad: float) -> None:
    layout = CacheLayout(1, 1, 64, 8, kind, group=16)
    store = cases.poisoned(layout, 1)
    rows = torch.ones(3, 1, 64, device=cases.DEVICE)
    rows[1, 0, 20] = bad
    kv_write.kernel(store.views[0], torch.arange(3, device=cases.DEVICE), rows, rows, None)
    for values in store.read(0, torch.tensor([[0]], device=cases.DEVICE), torch.float32):
        assert not values[0, 0, 1, 16:32].isfinite().any()
        for row, channels in ((0, slice(None)), (2, slice(None)), (1, slice(16)), (1, slice(32, None))):
            assert torch.equal(values[0, 0, row, channels], torch.ones(64, device=cases.DEVICE)[channels])


STEPS = {"fp8": (2**-4, 2**-10), "int8": (0.0, 0.5), "bf16": (2**-8, 0.0), "fp32": (0.0, 0.0)}
"""Half the distance of neighbouring codes: relative to the value (half the last place of 3 and of 7 bits of mantissa),
and in scales (subnormal e4m3 codes are 2^-9 apart, int8 codes 1)."""


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("tokens", cases.LENGTHS[:-1])
def test_what_is_read_back_is_within_half_a_step_of_float64(kind: str, tokens: int) -> None:
    layout = CacheLayout(1, 2, 64, 16, kind, group=16)
    store = cases.poisoned(layout, layout.blocks_for(tokens))
    generator = torch.Generator().manual_seed(tokens)
    keys, values = wide(generator, tokens, 2, 64), wide(generator, tokens, 2, 64)
    centre = torch.randn(2, 64, generator=generator)
    at = cases.DEVICE
    kv_write.kernel(store.views[0], torch.arange(tokens, device=at), keys.to(at), values.to(at), centre.to(at))
    table = torch.arange(layout.blocks_for(tokens), device=at)[None]
    relative, scaled = STEPS[kind]
    exact = (keys.double() - centre.double(), values.double())
    for wanted, section in zip(exact, store.read_codes(0, table), strict=True):
        got = section.values(torch.float64)[0, :, :tokens].transpose(0, 1).cpu()
        # and float32 rounds the centred key, its quotient by the scale, and the product with it
        allowed = wanted.abs() * (relative + 4 * 2**-24)
        if section.scales is not None:
            scales = section.scales[0, :, :tokens].transpose(0, 1).cpu()
            allowed += scales.repeat_interleave(16, -1).double() * scaled * (1 + 2**-20)
        assert ((got - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("write", [kv_write.reference, kv_write.kernel])
def test_rows_of_a_padded_batch_are_nobodys(write: Callable[..., None]) -> None:
    store = cases.poisoned(CacheLayout(1, 2, 16, 8, "fp8"), 2)
    rows = torch.ones(3, 2, 16, device=cases.DEVICE)
    write(store.views[0], torch.tensor([-1, -1, -1], device=cases.DEVICE), rows, rows, None)
    assert bool((store.data == cases.POISON).all())
    write(store.views[0], torch.tensor([-1, 9, -7], device=cases.DEVICE), rows, rows, None)
    assert bool((store.data[0] == cases.POISON).all())
    keys, _ = store.read(0, torch.tensor([[1]], device=cases.DEVICE), torch.float32)
    assert torch.equal(keys[0, :, 1], rows[1])


def test_scales_of_tiny_rows_stop_at_the_least_one() -> None:
    layout = CacheLayout(1, 1, 16, 8, "fp8")
    rows = torch.tensor([0.0, EPS / 3, EPS, 1e-38, 1e-45]).repeat_interleave(16).view(5, 1, 16)
    ours, wanted = both(layout, 1, 0, torch.arange(5), rows, -rows, None)
    assert torch.equal(ours, wanted)


def test_arguments_that_do_not_fit_are_refused() -> None:
    layout = CacheLayout(1, 2, 16, 8, "fp8")
    store = cases.poisoned(layout, 2)
    view, at = store.views[0], cases.DEVICE
    rows, slots = torch.zeros(4, 2, 16, device=at), torch.arange(4, device=at)

    def refused(words: str, *arguments: torch.Tensor | None) -> None:
        with pytest.raises(ValueError, match=words):
            kv_write.kernel(view, *arguments)

    refused("slots must be a contiguous list of int64", slots.int(), rows, rows, None)
    refused("slots must be a contiguous list of int64", torch.arange(8, device=at)[::2], rows, rows, None)
    refused(r"keys must be \(4, 2, 16\)", slots, rows[:3], rows, None)
    refused(r"values must be \(4, 2, 16\)", slots, rows, rows[:, :1], None)
    refused("values must be", slots, rows, rows.double(), None)
    refused(r"centre must be contiguous, \(2, 16\) of float32", slots, rows, rows, torch.zeros(16, device=at))
    assert bool((store.data == cases.POISON).all())
