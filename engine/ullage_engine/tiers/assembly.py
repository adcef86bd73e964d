"""Put the lower tiers of an engine together from its settings."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from ullage_engine.config import EngineConfig
from ullage_engine.device import Device
from ullage_engine.pool import BlockPool
from ullage_engine.tiers.budget import HostPlan, disk_slots, host_plan, read_lock_limit
from ullage_engine.tiers.disk import BlockFolder
from ullage_engine.tiers.manager import TierManager
from ullage_engine.tiers.movers import DeviceCopies, HostCopies
from ullage_engine.tiers.packing import CellPacking
from ullage_engine.tiers.residency import TieredResidency
from ullage_engine.tiers.transfer import Kind, Mover, ThreadTransfers

log = logging.getLogger(__name__)

SAMPLE_BYTES = 64 * 1024
SAMPLES = 64
"""Pieces of each file of weights that tell it from others."""


def make_tiers(
    config: EngineConfig,
    pool: BlockPool,
    data: torch.Tensor,
    packing: CellPacking,
    machine: Device,
    model: Path,
    salt: str,
    clock: Callable[[], float],
) -> TieredResidency | None:
    """The tiers below `pool`, whose bytes are `data` [blocks, block_bytes] uint8; None where none is asked for.

    Args:
        packing: for the cells of evicted sequences.
        machine: what holds `data`.
        model: folder of the weights.
        salt: what makes blocks reusable in this process; with the weights it makes them reusable in the next one.

    Raises:
        ConfigError: one that cannot work.
    """
    if config.host_memory is None:
        return None
    size = data.shape[1]
    accelerator = machine.torch_device.type != "cpu"
    plan = host_plan(config.host_memory, size, accelerator=accelerator, lock_limit=read_lock_limit())
    host = allocate_host(plan, size)
    files = 0 if config.disk_memory is None else disk_slots(config.disk_memory, size)
    manager = TierManager(plan.slots, files, pool.lost)
    folder = None
    if config.disk_dir is not None:
        fingerprint = f"{salt}|{size}|{config.dtype}|{weights_digest(model)}"
        folder = BlockFolder(config.disk_dir, files, fingerprint, host.numpy())
        manager.restore(folder.restore(pool.index))
    movers: dict[Kind, Mover] = {} if folder is None else folder.movers()
    closed = _nothing if folder is None else folder.close
    if accelerator:
        lanes = DeviceCopies(machine, data, host, verify=config.check_tiers)
        transfers = ThreadTransfers(lanes.movers() | movers, lanes.mark, closed)
    else:
        copies = HostCopies(data, host.numpy(), verify=config.check_tiers)
        transfers = ThreadTransfers(copies.movers() | movers, closed=closed)
    return TieredResidency(pool, manager, transfers, clock, packing)


def _nothing() -> None:
    return None


def allocate_host(plan: HostPlan, block_bytes: int) -> torch.Tensor:
    """The host tier's bytes, [slots, block_bytes] uint8: pinned if planned and possible, else pageable."""
    if plan.note:
        log.warning("host tier: %s", plan.note)
    if plan.pinned:
        try:
            return torch.empty((plan.slots, block_bytes), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning(
                "host tier: pinning %d bytes of host memory failed, which is no lack of accelerator memory; they are "
                "not pinned, and copies take about twice as long: %s",
                plan.slots * block_bytes,
                error,
            )
    return torch.empty((plan.slots, block_bytes), dtype=torch.uint8)


def weights_digest(folder: Path) -> str:
    """Tells a model's files from others of the same name: sizes, and samples of what is in them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
