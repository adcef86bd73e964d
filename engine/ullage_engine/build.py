"""Put an engine together from its settings: find the model, size the cache, load, start the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ullage_engine import centring, models, policies, sizing
from ullage_engine.budgets import Retention, workspace_bytes
from ullage_engine.cells import CellPool
from ullage_engine.config import EngineConfig, default_cache_dir
from ullage_engine.decode_graphs import DecodeGraphs
from ullage_engine.device import CpuDevice, Device, find_device
from ullage_engine.engine import Engine
from ullage_engine.errors import ConfigError, KernelError, SizingError
from ullage_engine.eviction import Protection
from ullage_engine.fused import fuse_layers
from ullage_engine.kernels import cpu_build, dispatch, paged_decode
from ullage_engine.kernels.cpu import CpuKernels
from ullage_engine.kernels.dispatch import Choice
from ullage_engine.layout import CacheLayout
from ullage_engine.loop import EngineLoop, LoopLimits
from ullage_engine.measure import measure_step
from ullage_engine.numerics import make_invariant
from ullage_engine.packing import PackedLinear, cpu_has_matrix_units, pack_linears
from ullage_engine.policies.reread import INSTRUCTION
from ullage_engine.pool import BlockPool
from ullage_engine.prefix import PrefixIndex
from ullage_engine.readings import EngineIdentity
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Scheduler
from ullage_engine.speculation.assemble import DraftModel, find_draft, make_speculator, named_draft
from ullage_engine.store import BlockStore
from ullage_engine.tiers.assembly import make_tiers
from ullage_engine.tiers.budget import beside_tier
from ullage_engine.tiers.packing import CellPacking

log = logging.getLogger(__name__)
T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A running engine and what its server needs."""

    core: EngineLoop
    tokenizer: Any

    def close(self) -> None:
        self.core.close()


def build_engine(config: EngineConfig, device: Device | None = None) -> LoadedEngine:
    """Load the model and start the step loop.

    Args:
        device: what computes; None: the accelerator if there is one, else the host.

    Raises:
        ConfigError: with one line that names the setting, its value and the remedy.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    models.quiet_progress()
    loop, tokenizer = in_a_thread(lambda: _assembled(config, device or find_device()))
    loop.start()
    return LoadedEngine(loop, tokenizer)


def in_a_thread(work: Callable[[], T]) -> T:
    """Do tensor work in a thread that ends with it.

    OpenMP keeps worker threads for each thread that ever computed in parallel. Once they outnumber the cores its
    barriers no longer spin but sleep, and a decode step has hundreds: on two cores it took 89 ms instead of 57.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, which raises it
            future.set_exception(error)

    thread = threading.Thread(target=run, name="build", daemon=True)  # an interrupted start does not wait for it
    thread.start()
    result = future.result()
    thread.join()
    return result


def _assembled(config: EngineConfig, machine: Device) -> tuple[EngineLoop, Any]:
    """The loop, not yet started, around the loaded model; and its tokenizer."""
    device = machine.torch_device
    source = models.resolve(config.model)
    folder = models.folder_for(source, config.cache_dir)
    models.check_architecture(folder)
    kernels = _kernels(config, device)
    dtype = _dtype(config.dtype, device)
    draft = find_draft(config, folder)
    layout = _check_size(config, folder, dtype, machine, draft)
    require_served(config, kernels, layout)
    loaded = models.load(folder, config.served_name or models.served_name(config.model), dtype, device)
    centre = centring.key_means(loaded.model) if config.kv_centring else None
    _prepare(config, loaded.model, dtype, device, kernels)
    drafting = None if draft is None else _load_draft(config, draft, dtype, device, kernels)
    beside = 0 if draft is None else draft.layout.block_bytes
    runner = _allocate(config, loaded, layout, machine, centre, kernels, beside)
    drafts = None
    if draft is not None and drafting is not None:
        blocks = runner.store.data.shape[0]
        drafts = ModelRunner(drafting, BlockStore(draft.layout, blocks, device, None, kernels), device)
    return assemble(config, loaded, runner, drafts, machine), loaded.tokenizer


def _prepare(config: EngineConfig, model: Any, dtype: torch.dtype, device: torch.device, kernels: Choice) -> None:
    """Lay a model's weights out as this machine and the settings want them."""
    if device.type == "cpu":
        speed_up(model, dtype, kernels if isinstance(kernels, CpuKernels) else None)
    if config.numerics == "invariant":
        make_invariant(model)


def _load_draft(
    config: EngineConfig, draft: DraftModel, dtype: torch.dtype, device: torch.device, kernels: Choice
) -> Any:
    """The draft model, ready to run."""
    with named_draft():
        model = models.load(draft.folder, "draft", dtype, device).model
    _prepare(config, model, dtype, device, kernels)
    return model


def _kernels(config: EngineConfig, device: torch.device) -> Choice:
    """Who computes on this device.

    Raises:
        KernelError: what the settings insist on is not to be had.
    """
    if config.kernels == "torch":
        return "torch"
    if config.kernels == "triton":
        dispatch.require_triton(device)
        return "triton"
    if device.type == "cpu":
        return _compiled(config)
    if config.kernels == "native":
        raise KernelError(f"--kernels: native is for a CPU, and the model runs on {device}; leave the option out")
    return None


def _compiled(config: EngineConfig) -> Choice:
    """The compiled CPU kernels; torch where they are not to be had and not insisted on."""
    try:
        return CpuKernels(cpu_build.library((config.cache_dir or default_cache_dir()) / "kernels"))
    except KernelError as error:
        if config.kernels == "native":
            raise KernelError(f"--kernels: native is not to be had: {error}; leave the option out") from error
        log.warning(
            "torch alone computes attention, so decoding takes about twice as long as with compiled kernels: %s", error
        )
        return "torch"


def require_served(config: EngineConfig, kernels: Choice, layout: CacheLayout) -> None:
    """Refuse a cache that the compiled kernels were insisted on for, and that they leave to torch.

    Raises:
        KernelError: it is such a one.
    """
    if config.kernels == "native" and isinstance(kernels, CpuKernels) and not kernels.serves(layout):
        sizes = f"head size {layout.head_size} and scale groups of {layout.group_size}"
        raise KernelError(f"--kernels: native has none for {sizes}; leave the option out for torch's")


def speed_up(model: Any, dtype: torch.dtype, kernels: CpuKernels | None) -> None:
    """The same weights, in the order that this CPU multiplies fastest, in as few operations as it allows."""
    packs = dtype == torch.bfloat16 and cpu_has_matrix_units()
    fused = fuse_layers(model, kernels, PackedLinear if packs else _as_it_is) if kernels is not None else 0
    packed = pack_linears(model) if packs else 0
    log.info("%d layers fused, %d more linear layers laid out for the CPU's matrix units", fused, packed)


def _as_it_is(linear: torch.nn.Linear) -> torch.nn.Module:
    return linear


def _allocate(
    config: EngineConfig,
    loaded: models.LoadedModel,
    layout: CacheLayout,
    machine: Device,
    centre: torch.Tensor | None,
    kernels: Choice,
    beside: int,
) -> ModelRunner:
    """The model over a KV cache that is sized after the largest step, and all that is recorded, has been measured."""
    context = config.max_model_len or models.shape_of(loaded.config).max_positions
    invariant = config.numerics == "invariant"
    records = machine.records and not invariant
    activations = measure_step(
        loaded.model,
        layout,
        tokens=config.max_batch_tokens,
        sequences=_logits_rows(config),
        device=machine,
        kernels=kernels,
        invariant=invariant,
        recorded=(config.max_sequences, context) if records else None,
    )
    activations += layout.workspace_bytes(max(context, paged_decode.GROUP_TOKENS)) + workspace_bytes(layout, context)
    if isinstance(kernels, CpuKernels):
        activations += kernels.scratch_bytes(context, layout.kv_heads)
    blocks = sizing.block_count(
        layout,
        kv_memory=config.kv_memory,
        kv_fraction=config.kv_fraction,
        weights=0,
        activations=activations,
        memory=_memory(machine, config),
        beside=beside,
    )
    log.info("largest step takes %.1f MiB; KV cache of %d blocks", activations / sizing.MIB, blocks)
    device = machine.torch_device
    try:
        store = BlockStore(layout, blocks, device, centre, kernels)
    except RuntimeError as error:
        raise SizingError(
            f"--kv-memory: allocating {blocks} blocks of {layout.block_bytes} bytes failed on {device}: {error}"
        ) from error
    graphs = None
    if records:
        graphs = DecodeGraphs(loaded.model, store, machine, limit=config.max_sequences, context=context)
        graphs.prepare()
    return ModelRunner(loaded.model, store, device, graphs, invariant=invariant)


def retention(config: EngineConfig, loaded: models.LoadedModel) -> Retention:
    """What sequences keep, and the policies that requests may choose from."""
    model, head_size = loaded.config, models.shape_of(loaded.config).head_size
    per_channel = getattr(model, "query_pre_attn_scalar", None) or head_size
    scaling = getattr(model, "attention_multiplier", None) or per_channel**-0.5
    rotary = next((m for m in loaded.model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)), None)
    return Retention(
        budget=config.kv_budget,
        policy=config.eviction_policy,
        interval=config.evict_interval,
        policies={name: policies.make(name, scaling=scaling) for name in policies.NAMES},
        instruction=tuple(loaded.tokenizer.encode(INSTRUCTION, add_special_tokens=False)),
        inverse_frequencies=None if rotary is None else rotary.inv_freq.float(),
    )


def assemble(
    config: EngineConfig,
    loaded: models.LoadedModel,
    runner: ModelRunner,
    draft: ModelRunner | None = None,
    machine: Device | None = None,
) -> EngineLoop:
    """Wire pool, tiers, scheduler and loop around a model and its cache; the loop is not started.

    Args:
        machine: what holds the cache; None: this host.
    """
    store = runner.store
    blocks = store.data.shape[0]
    salt = "|".join(
        (
            loaded.name,
            str(loaded.folder),
            ",".join(cell.kind.name for cell in store.layout.cells),
            f"{store.layout.block_tokens}/{store.layout.group_size}",
            "" if store.centre is None else centring.fingerprint(store.centre),
            config.numerics,
        )
    )
    pool = BlockPool(blocks, config.block_size, PrefixIndex(salt, config.block_size))
    cells = CellPool(pool, store.layout.cell_classes)
    packing = CellPacking(pool, cells, runner)
    tiers = make_tiers(config, pool, store.data, packing, machine or CpuDevice(), loaded.folder, salt, time.monotonic)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=config.max_batch_tokens,
        max_sequences=config.max_sequences,
        prefix_reuse=config.prefix_reuse,
        cells=cells,
        residency=tiers,
    )
    engine = Engine(
        identity=EngineIdentity(model=loaded.name, version=version("ullage")),
        runner=runner,
        pool=pool,
        scheduler=scheduler,
        protection=Protection(first_tokens=config.protected_tokens, recent_tokens=config.recent_tokens),
        tiers=tiers,
        retention=retention(config, loaded),
        speculator=make_speculator(config, runner, draft, vocabulary=loaded.config.vocab_size),
    )
    limits = LoopLimits(
        max_model_len=_context(config, models.shape_of(loaded.config).max_positions, blocks * config.block_size),
        max_queue=config.max_queue,
        max_sequences=config.max_sequences,
    )
    return EngineLoop(engine, limits, _eos_tokens(loaded))


def _memory(machine: Device, config: EngineConfig) -> sizing.Memory:
    """What weights and cache may take, beside the host tier.

    Raises:
        SizingError: the host tier does not fit this machine's memory.
    """
    host = beside_tier(sizing.read_memory(), config.host_memory)
    return machine.memory() if machine.torch_device.type != "cpu" else host


def _check_size(
    config: EngineConfig, folder: Path, dtype: torch.dtype, machine: Device, draft: DraftModel | None
) -> CacheLayout:
    """The layout, after an estimate from the model's config: refuses in a moment what can't work, before it loads."""
    model = models.read_config(folder)
    if config.kv_centring and getattr(model, "attn_logit_softcapping", None):
        raise ConfigError(
            "--kv-centring: this model caps its attention logits, which a centre would shift; leave the option out"
        )
    shape = models.shape_of(model)
    layout = CacheLayout(
        shape.layers,
        shape.kv_heads,
        shape.head_size,
        config.block_size,
        config.kv_type,
        config.kv_group,
        dict.fromkeys(config.kv_bf16_layers, "bf16"),
    )
    weights = models.weight_count(folder) + (0 if draft is None else models.weight_count(draft.folder))
    blocks = sizing.block_count(
        layout,
        kv_memory=config.kv_memory,
        kv_fraction=config.kv_fraction,
        weights=weights * dtype.itemsize,
        beside=0 if draft is None else draft.layout.block_bytes,
        activations=sizing.activation_bytes(
            hidden=model.hidden_size,
            intermediate=model.intermediate_size,
            vocabulary=model.vocab_size,
            tokens=config.max_batch_tokens,
            sequences=_logits_rows(config),
        ),
        memory=_memory(machine, config),
    )
    _context(config, shape.max_positions, blocks * config.block_size)
    return layout


def _logits_rows(config: EngineConfig) -> int:
    """Most rows of logits in a step: one a sequence, and one a drafted token."""
    drafted = 0 if config.speculation == "off" else config.speculation_tokens
    return min(config.max_batch_tokens, config.max_sequences * (1 + drafted))


def _context(config: EngineConfig, positions: int, cache_tokens: int) -> int:
    """Greatest prompt plus answer: what the model and the cache can both hold."""
    wanted = config.max_model_len
    if wanted is None:
        return min(positions, cache_tokens)
    if wanted > positions:
        raise ConfigError(f"--max-model-len: {wanted} is above the model's {positions} positions; lower it")
    if wanted > cache_tokens:
        raise SizingError(
            f"--max-model-len: {wanted} tokens do not fit a KV cache of {cache_tokens} tokens; raise --kv-memory or "
            f"lower it to {cache_tokens}"
        )
    return wanted


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = device.type == "cuda" or cpu_has_matrix_units()
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[name]


def _eos_tokens(loaded: models.LoadedModel) -> frozenset[int]:
    configured = loaded.model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*several, loaded.tokenizer.eos_token_id) if token is not None)
