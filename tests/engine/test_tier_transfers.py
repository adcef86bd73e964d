"""Copies in threads, what a host tier may take, and how a start says that something cannot be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ullage_engine.config import EngineConfig
from ullage_engine.device import CpuDevice
from ullage_engine.errors import ConfigError, SizingError
from ullage_engine.sizing import Memory
from ullage_engine.tiers.assembly import allocate_host, weights_digest
from ullage_engine.tiers.base import OwnBlock
from ullage_engine.tiers.budget import HostPlan, beside_tier, disk_slots, host_plan
from ullage_engine.tiers.movers import DeviceCopies, HostCopies
from ullage_engine.tiers.slots import SlotTable
from ullage_engine.tiers.transfer import Copy, Done, ThreadTransfers, TierFault

WAIT_S = 30.0
GIB = 1 << 30


def collect(transfers: ThreadTransfers, count: int) -> list[Done]:
    done: list[Done] = []
    while len(done) < count:
        transfers.wait(WAIT_S)
        found = transfers.finished()
        assert found, "nothing ended in time"
        done += found
    return done


def copy(ticket: int, kind: str = "store", **options: Any) -> Copy:
    return Copy(ticket=ticket, kind=kind, slot=ticket, block=ticket, **options)  # type: ignore[arg-type]


def test_blocks_go_down_and_come_back() -> None:
    pool = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    original, host = pool.clone(), np.zeros((40, 64), np.uint8)
    transfers = ThreadTransfers(HostCopies(pool, host, verify=True).movers())
    transfers.submit([copy(i) for i in range(40)])
    sums = {done.ticket: done.checksum for done in collect(transfers, 40)}
    assert (host == original.numpy()).all()
    pool.zero_()
    transfers.submit([copy(i, "load", checksum=sums[i]) for i in range(40)])
    assert all(done.fault is None for done in collect(transfers, 40))
    assert torch.equal(pool, original)
    transfers.close()


def test_changed_bytes_are_told() -> None:
    pool, host = torch.zeros((2, 64), dtype=torch.uint8), np.zeros((2, 64), np.uint8)
    transfers = ThreadTransfers(HostCopies(pool, host, verify=True).movers())
    transfers.submit([copy(0)])
    [done] = collect(transfers, 1)
    host[0, 7] ^= 1
    transfers.submit([copy(0, "load", checksum=done.checksum)])
    [done] = collect(transfers, 1)
    assert done.fault == "corrupt"
    assert "host slot 0: checksum" in done.message
    transfers.close()


def test_a_slow_kind_holds_up_no_other_and_a_failing_one_goes_on() -> None:
    gate = threading.Event()

    def slow(copies: Sequence[Copy]) -> list[int | TierFault | None]:
        assert gate.wait(WAIT_S)
        return [None] * len(copies)

    def failing(copies: Sequence[Copy]) -> list[int | TierFault | None]:
        raise OSError("the device is gone")

    closed: list[bool] = []
    transfers = ThreadTransfers({"fetch": slow, "load": failing}, closed=lambda: closed.append(True))
    told = threading.Event()
    transfers.listen(told.set)
    transfers.submit([copy(1, "fetch"), copy(2, "load"), copy(3, "load")])
    done = collect(transfers, 2)
    assert {d.ticket for d in done} == {2, 3}
    assert {d.fault for d in done} == {"unavailable"}
    assert "the device is gone" in done[0].message
    assert told.wait(WAIT_S)
    gate.set()
    assert collect(transfers, 1)[0].ticket == 1
    transfers.close()
    assert closed == [True]


def test_nothing_is_begun_after_the_end() -> None:
    began: list[Copy] = []

    def note(copies: Sequence[Copy]) -> list[int | TierFault | None]:
        began.extend(copies)
        return [None] * len(copies)

    transfers = ThreadTransfers({"store": note})
    transfers.close()
    transfers.submit([copy(1)])
    assert transfers.finished() == []
    assert began == []


# -- budgets -----------------------------------------------------------------------------------------------------


def test_weights_and_cache_get_what_the_host_tier_leaves() -> None:
    memory = Memory(available=4 * GIB, source="cgroup memory.max")
    assert beside_tier(memory, None) == memory
    left = beside_tier(memory, GIB)
    assert (left.available, left.source) == (3 * GIB, "cgroup memory.max beside --host-memory")
    with pytest.raises(SizingError, match=r"--host-memory: 5,120.0 MiB does not fit the 4,096.0 MiB that cgroup"):
        beside_tier(memory, 5 * GIB)


@pytest.mark.parametrize(
    ("accelerator", "limit", "pinned", "note"),
    [(False, None, False, ""), (True, None, True, ""), (True, 1 << 20, True, ""), (True, 1000, False, "ulimit -l")],
)
def test_what_is_pinned(accelerator: bool, limit: int | None, pinned: bool, note: str) -> None:
    plan = host_plan(1 << 20, 1024, accelerator=accelerator, lock_limit=limit)
    assert (plan.slots, plan.pinned) == (1024, pinned)
    assert note in plan.note and bool(plan.note) == bool(note)


def test_a_tier_of_less_than_a_block_is_refused() -> None:
    assert disk_slots(3000, 1024) == 2
    with pytest.raises(SizingError, match=r"--disk-memory: 100 bytes hold no block of 1024 bytes"):
        disk_slots(100, 1024)
    with pytest.raises(SizingError, match=r"--host-memory: 100 bytes hold no block of 1024 bytes"):
        host_plan(100, 1024, accelerator=False, lock_limit=None)


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an accelerator torch refuses to pin, as a driver does that is out of pinnable memory."""
    monkeypatch.setattr(torch, "empty", _refusing(torch.empty))
    with caplog.at_level(logging.WARNING):
        made = allocate_host(HostPlan(4, pinned=True), 128)
    assert tuple(made.shape) == (4, 128)
    assert "pinning 512 bytes of host memory failed, which is no lack of accelerator memory" in caplog.text


def _refusing(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def refuse(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    return refuse


def test_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(1 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    weights[700_000:710_000] = b"\x01" * 10_000
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disk_dir": Path("/d")}, "--disk-dir: '/d' cannot work; give --disk-dir and --disk-memory together"),
        ({"disk_memory": 5}, "give --disk-dir and --disk-memory together"),
        ({"disk_dir": Path("/d"), "disk_memory": 5}, "give --host-memory too"),
        ({"host_memory": 0}, "--host-memory: 0 cannot work"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **settings)
    assert message in str(caught.value)


# -- slots -------------------------------------------------------------------------------------------------------


def test_reserving_is_all_or_nothing() -> None:
    table = SlotTable(3, lambda content: None)
    held = table.reserve([OwnBlock(1), OwnBlock(1)])
    assert held is not None
    assert table.reserve([OwnBlock(1), OwnBlock(1)]) is None
    assert (table.free, len(table)) == (1, 2)
    for record in held:
        table.commit(record, None)
    assert table.reserve([OwnBlock(1), OwnBlock(1)]) is None, "a sequence's own blocks were pushed out"
    table.drop(held[0].content)
    assert table.reserve([OwnBlock(1), OwnBlock(1)]) is not None
    table.check_integrity()


def test_a_slot_is_not_used_again_while_a_copy_reads_or_writes_it() -> None:
    table = SlotTable(1, lambda content: None)
    [record] = table.reserve([OwnBlock(1)]) or []
    table.drop(record.content)
    assert table.available == 0
    assert not table.commit(record, None)
    assert table.available == 1
    [record] = table.reserve([OwnBlock(1)]) or []
    table.commit(record, None)
    table.pin(record)
    table.drop(record.content)
    assert table.available == 0
    table.unpin(record)
    assert table.available == 1
    table.check_integrity()


def test_slots_that_are_not_pinned_are_reached_through_a_ring() -> None:
    pool = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    original, host = pool.clone(), torch.zeros((40, 64), dtype=torch.uint8)
    copies = DeviceCopies(CpuDevice(), pool, host, verify=True)
    transfers = ThreadTransfers(copies.movers(), copies.mark)
    order = torch.randperm(40).tolist()
    transfers.submit([Copy(ticket=i, kind="store", slot=slot, block=i) for i, slot in enumerate(order)])
    sums = {done.ticket: done.checksum for done in collect(transfers, 40)}
    assert torch.equal(host[order], original)
    pool.zero_()
    transfers.submit(
        [Copy(ticket=i, kind="load", slot=slot, block=i, checksum=sums[i]) for i, slot in enumerate(order)]
    )
    assert all(done.fault is None for done in collect(transfers, 40))
    assert torch.equal(pool, original)
    host[order[3], 5] += 1
    transfers.submit([Copy(ticket=3, kind="load", slot=order[3], block=3, checksum=sums[3])])
    assert collect(transfers, 1)[0].fault == "corrupt"
    transfers.close()
