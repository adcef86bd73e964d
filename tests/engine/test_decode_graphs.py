"""Decode steps over fixed buffers: padding changes nothing, nobody else's block is written, late copies do no harm."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_engine import engine_around, run, submit
from test_fused import tiny

from ullage_engine.build import build_engine
from ullage_engine.config import EngineConfig
from ullage_engine.decode_graphs import STEP, DecodeGraphs, buckets, widths
from ullage_engine.decode_tables import DecodeTables
from ullage_engine.device import CpuDevice, Device, Work
from ullage_engine.engine import Engine
from ullage_engine.fake_device import FakeDevice
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.layout import CacheLayout
from ullage_engine.measure import measure_step
from ullage_engine.models import shape_of
from ullage_engine.numerics import make_invariant
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.staging import StagingRing
from ullage_engine.store import BlockStore

CPU = torch.device("cpu")


class LateRunner(ModelRunner):
    """What is not launched on the device happens after what is, as on one stream."""

    def __init__(self, model: Any, store: BlockStore, device: Device, graphs: DecodeGraphs | None) -> None:
        super().__init__(model, store, CPU, graphs)
        self._order = device

    def forward(self, chunks: list[Chunk]) -> torch.Tensor:
        if not (self._decode and self._decode.fits(chunks)):
            self._order.mark().wait()
        return super().forward(chunks)

    def copy_blocks(self, copies: dict[int, int]) -> None:
        self._order.mark().wait()
        super().copy_blocks(copies)

    def scrub(self, blocks: list[int]) -> None:
        self._order.mark().wait()
        super().scrub(blocks)


def make_store(model: Any, kernels: CpuKernels | None, kind: str = "fp8", blocks: int = 64) -> BlockStore:
    shape = shape_of(model.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 8, kind)
    return BlockStore(layout, blocks, "cpu", None, kernels)


def sequence(number: int, length: int, table: list[int], size: int) -> Sequence:
    """A decoding sequence whose newest token is not computed yet."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 256, (length,), generator=generator).tolist()
    request = GenerationRequest(
        request_id=f"s{number}", prompt=tuple(tokens[:-1]), sampling=SamplingParams(max_tokens=9, temperature=0)
    )
    made = Sequence(request, lambda output: None, number, tokens, size)
    made.append_blocks(table)
    return made


def prefilled(model: Any, store: BlockStore, lengths: list[int]) -> list[Chunk]:
    """Decode chunks of sequences of these lengths, what comes before computed."""
    chunks, used, size = [], 0, store.layout.block_tokens
    for number, length in enumerate(lengths):
        count = store.layout.blocks_for(length + 1)
        one = sequence(number, length, [*range(used, used + count)], size)
        used += count
        if length > 1:
            ModelRunner(model, store, CPU).forward([Chunk(one, length - 1)])
            one.computed = length - 1
        chunks.append(Chunk(one, 1))
    return chunks


def test_buckets_hold_every_batch_with_little_padding() -> None:
    for limit in range(1, 300):
        sizes = buckets(limit)
        assert all(after - before <= STEP for before, after in zip([0, *sizes], sizes, strict=False))
        assert limit <= sizes[-1] < limit + STEP
        assert widths(limit)[-1] == limit
        assert sorted(widths(limit)) == widths(limit)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    "lengths", [[9], [11, 9, 18], [18, 9, 16, 17, 13], [7] * 8, [12, 9, 10, 9, 16, 17, 13, 30, 600]]
)
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_padding_changes_no_bit(cpu_kernels: CpuKernels, kind: str, backend: str, lengths: list[int]) -> None:
    # torch attends to sequences of like lengths together, and sums otherwise where one of them sees nothing: none here
    # has but one block beside padding
    model, _ = tiny("llama")
    make_invariant(model)  # products whose rows do not depend on how many there are, so that only the batch differs
    store = make_store(model, cpu_kernels if backend == "compiled" else None, kind, blocks=128)
    chunks = prefilled(model, store, lengths)
    before = store.data.clone()
    wanted = ModelRunner(model, store, CPU).forward(chunks)
    written = store.data.clone()
    store.data.copy_(before)
    graphs = DecodeGraphs(model, store, CpuDevice(), limit=9, context=1000)  # tables of 64 and of 125 blocks
    graphs.prepare()
    flight = graphs.launch(chunks, logits=True)
    assert torch.equal(flight.logits(), wanted)
    assert flight.tokens() == wanted.argmax(-1).tolist()
    assert torch.equal(store.data, written)


def digest(store: BlockStore, blocks: range) -> list[str]:
    return [hashlib.sha256(store.data[block].numpy().tobytes()).hexdigest() for block in blocks]


def test_steps_without_sequences_write_to_nobodys_block(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    store = make_store(model, cpu_kernels)
    graphs = DecodeGraphs(model, store, CpuDevice(), limit=16, context=64)
    chunks = prefilled(model, store, [20] * 16)
    graphs.launch(chunks)  # rows of all sixteen are in the buffers, and then these sequences end
    one = sequence(99, 1, [63], 8)
    held = digest(store, range(63))
    graphs.prepare()
    graphs.launch([Chunk(one, 1)])
    assert digest(store, range(63)) == held, "a block was written that belongs to none of the step's sequences"


def test_tables_arrive_whatever_is_late() -> None:
    """Random tables that grow, change and go; what the device holds when it comes to a step is that step's."""
    device, random = FakeDevice(), Random(5)
    tables = DecodeTables(device, 8, 6)
    alive = [sequence(i, 3, [i], 8) for i in range(8)]
    seen: list[tuple[list[list[int]], list[list[int]]]] = []
    wanted = []
    for _ in range(300):
        count = random.randint(0, 8)
        for one in random.sample(alive, 3):
            if len(one.table) == 6 or random.random() < 0.2:
                one.table, one.starts = [random.randrange(99)], [8 * random.randrange(4)]
            elif random.random() < 0.3:
                one.table[-1] = random.randrange(99)  # copied on write, in place
            else:
                one.append_blocks([random.randrange(99)])
        random.shuffle(alive)
        tables.send(alive[:count], 8)
        wanted.append([[*one.table, *[0] * (6 - len(one.table))] for one in alive[:count]] + [[0] * 6] * (8 - count))
        device.launch(lambda: seen.append((tables.tables.tolist(), tables.starts.tolist())))
        device.run(random.randint(0, 4))
    device.run(device.pending)
    assert [found for found, _ in seen] == wanted


def test_unchanged_tables_are_not_sent_again() -> None:
    device = FakeDevice()
    tables = DecodeTables(device, 4, 4)
    members = [sequence(i, 3, [i], 8) for i in range(3)]
    tables.send(members, 4)
    device.run(device.pending)
    tables.send(members, 4)
    assert device.pending == 0
    members[1].append_blocks([7])
    tables.send(members, 4)
    assert device.pending == 2, "one row's table and its starts"


def test_a_staging_buffer_is_not_written_before_its_copy_ran() -> None:
    device = FakeDevice()
    ring = StagingRing(device, 2, 1)
    target, seen = torch.zeros(1, dtype=torch.int64), []
    for number in range(20):
        with ring.buffer() as host:
            host[0] = number
            device.copy(target, host)
            device.launch(lambda: seen.append(int(target[0])))
        assert device.pending <= 4, "the ring handed out a buffer whose copy had not run"
    device.run(device.pending)
    assert seen == list(range(20))


def test_a_staging_buffer_left_by_an_error_is_waited_for_too() -> None:
    device = FakeDevice()
    ring = StagingRing(device, 1, 1)
    target = torch.zeros(1, dtype=torch.int64)

    def fail() -> None:
        with ring.buffer() as host:
            host[0] = 7
            device.copy(target, host)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    with ring.buffer() as host:
        host[0] = 8
    assert int(target[0]) == 7


class RefusingDevice(CpuDevice):
    """Records nothing."""

    def record(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


class CountingDevice(CpuDevice):
    """Counts what is recorded."""

    records = True

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Work) -> Work:
        self.recorded += 1
        return work


def test_the_largest_step_is_measured_with_what_is_recorded(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    device, layout = CountingDevice(), make_store(model, cpu_kernels).layout
    sizes: dict[str, Any] = {"tokens": 16, "sequences": 12, "device": device, "kernels": cpu_kernels}
    assert measure_step(model, layout, **sizes) >= 0
    assert device.recorded == 0
    assert measure_step(model, layout, **sizes, recorded=(9, 8 * 300)) >= 0
    assert device.recorded == 3, "tables of 64, 256 and 300 blocks, with the most rows"
    DecodeGraphs(model, make_store(model, cpu_kernels), device, limit=9, context=8 * 300).prepare()
    assert device.recorded == 3 + 5 * 3


def test_a_device_that_cannot_record_is_asked_once(cpu_kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = tiny("llama")
    graphs = DecodeGraphs(model, make_store(model, cpu_kernels), RefusingDevice(), limit=8, context=2000)
    graphs.prepare()
    assert [record.message for record in caplog.records] == [
        "decode steps run without a graph, which is slower: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("make", [CpuDevice, FakeDevice, RefusingDevice])
@pytest.mark.parametrize("variant", ["llama", "mistral, sliding window"])
def test_answers_are_those_of_packed_steps(cpu_kernels: CpuKernels, variant: str, make: type[CpuDevice]) -> None:
    model, _ = tiny(variant)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 256, (length,), generator=generator).tolist() for length in (1, 15, 16, 33, 50)]
    packed = make_store(model, cpu_kernels, "fp32")
    wanted = run(engine_around(ModelRunner(model, packed, CPU), budget=20), prompts, 16)
    device, store = make(), make_store(model, cpu_kernels, "fp32")
    graphs = DecodeGraphs(model, store, device, limit=8, context=128)
    engine = engine_around(LateRunner(model, store, device, graphs), budget=20)
    assert run(engine, prompts, 16) == wanted


def test_logits_are_only_sent_where_somebody_draws(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    store = make_store(model, cpu_kernels, "fp32")
    graphs = DecodeGraphs(model, store, CpuDevice(), limit=8, context=64)
    flight = graphs.launch(prefilled(model, store, [5, 6]))
    with pytest.raises(ValueError, match="without its logits"):
        flight.logits()


def test_nan_becomes_no_token_and_is_never_looked_up(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    store = make_store(model, cpu_kernels, "fp32")
    graphs = DecodeGraphs(model, store, CpuDevice(), limit=8, context=64)
    chunks = prefilled(model, store, [5, 6])
    wanted = graphs.launch(chunks).tokens()
    store.data[chunks[1].sequence.table[0]] = 255  # NaN in every value
    first = graphs.launch(chunks)
    assert first.tokens() == [wanted[0], -1]
    assert graphs.launch(chunks, first).tokens()[1] == -1


def test_drawn_answers_are_those_of_packed_steps(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")

    def answers(engine: Engine) -> list[list[int | None]]:
        outputs = [submit(engine, f"g{i}", [1, 2, i], 8, frozenset()) for i in range(2)]
        drawn: list[Any] = []
        sampling = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=4)
        engine.add(GenerationRequest(request_id="d", prompt=(3, 4, 5), sampling=sampling), drawn.append)
        while not engine.idle:
            engine.step()
        return [[o.token for o in output] for output in (*outputs, drawn)]

    wanted = answers(engine_around(ModelRunner(model, make_store(model, cpu_kernels, "fp32"), CPU)))
    device, store = FakeDevice(), make_store(model, cpu_kernels, "fp32")
    graphs = DecodeGraphs(model, store, device, limit=8, context=128)
    assert answers(engine_around(LateRunner(model, store, device, graphs))) == wanted


def test_only_the_step_launched_last_can_be_followed(cpu_kernels: CpuKernels) -> None:
    model, _ = tiny("llama")
    store = make_store(model, cpu_kernels)
    graphs = DecodeGraphs(model, store, CpuDevice(), limit=8, context=64)
    chunks = prefilled(model, store, [5, 6])
    first = graphs.launch(chunks)
    graphs.launch(chunks[:1], logits=True)
    with pytest.raises(ValueError, match="only the one launched last"):
        graphs.launch(chunks, first)


class RecordingDevice(CpuDevice):
    """A host that claims to record, so that an engine is built as for an accelerator."""

    records = True


def test_an_engine_built_for_a_device_that_records(tmp_path: Path, cpu_library: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model, _ = tiny("llama")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_memory=1 << 20, max_sequences=3, max_batch_tokens=16)

    def answers(device: Device) -> list[list[int | None]]:
        loaded = build_engine(config, device)
        try:
            engine: Any = loaded.core._engine
            ended, outputs = threading.Event(), [[] for _ in range(5)]  # type: ignore[var-annotated]
            for i, output in enumerate(outputs):
                sampling = SamplingParams(max_tokens=12 + i, temperature=0)

                def tell(told: Any, output: list[Any] = output) -> None:
                    output.append(told)
                    if all(other and other[-1].finish_reason for other in outputs):
                        ended.set()

                request = GenerationRequest(request_id=f"r{i}", prompt=(1, 2, i), sampling=sampling)
                loaded.core.submit(request, tell)
            assert ended.wait(60)
            assert (engine._runner._decode is not None) == device.records
            return [[told.token for told in output] for output in outputs]
        finally:
            loaded.close()

    assert answers(RecordingDevice()) == answers(CpuDevice())
