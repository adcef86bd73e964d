"""Settings of the engine and of its servers, one frozen dataclass per concern.

Values are checked where they are made, so an object of these types can be trusted. Purpose: say what can be
set, in which unit and range. Non-goal: reading arguments (`main`) or deciding sizes from a model (`sizing`).
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal, get_args

from ullage_engine.errors import ConfigError
from ullage_engine.request import KvBudget

KvType = Literal["fp8", "int8", "bf16", "fp32"]
BlockSize = Literal[8, 16, 32]
Dtype = Literal["auto", "float32", "bfloat16"]
EvictionPolicy = Literal["reconstruct", "window", "expected", "entropy", "streaming", "recency"]
KernelChoice = Literal["auto", "native", "torch", "triton"]
Numerics = Literal["fast", "invariant"]
Speculation = Literal["off", "ngram", "draft"]

KV_TYPES: tuple[KvType, ...] = get_args(KvType)
BLOCK_SIZES: tuple[BlockSize, ...] = get_args(BlockSize)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
KERNELS: tuple[KernelChoice, ...] = get_args(KernelChoice)
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
SPECULATIONS: tuple[Speculation, ...] = get_args(Speculation)

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]i?B?|B)?", re.IGNORECASE)
_UNIT_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_SIZE = 1 << 60


def parse_size(text: str, *, name: str) -> int:
    """Bytes from `1024`, `48MiB`, `48Mi` or `0.5GiB` (powers of 1024), `48MB` or `48M` (powers of 1000).

    Raises:
        ConfigError: anything else, or a size that is not at least one byte; the message begins with `name`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is not a size; write bytes or a unit, such as 48MiB or 0.5GiB")
    unit = (match["unit"] or "").lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = int(Decimal(match["number"]) * base ** _UNIT_POWERS[unit.removesuffix("i")])
    if not 1 <= size <= _MAX_SIZE:
        raise ConfigError(f"{name}: {text!r} is {size} bytes, outside 1 byte to 1 EiB")
    return size


def default_cache_dir() -> Path:
    """In the user's cache folder; the temporary one for a user without a home, as in a container."""
    home = os.environ.get("HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else tempfile.gettempdir())
    return Path(cache) / "ullage" / "models"


def _require(condition: bool, flag: str, value: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"{flag}: {value!r} cannot work; {remedy}")


def _require_one_of(value: object, known: tuple[object, ...], flag: str) -> None:
    _require(value in known, flag, value, f"choose one of {', '.join(map(str, known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the core needs to load a model and size its cache."""

    model: str
    """A Hugging Face folder, a `.gguf` file, or `package://MODULE/FILE`."""
    served_name: str | None = None
    """Name clients use; None: derived from `model`."""
    kv_memory: int | None = None
    """Bytes of the KV cache; None: `kv_fraction`, or a share chosen from the memory left."""
    kv_fraction: float | None = None
    """In (0, 1): share for the KV cache of the memory left after weights and activations."""
    kv_type: KvType = "fp8"
    kv_group: int | None = None
    """Channels that share a scale; None: min(128, head size)."""
    kv_bf16_layers: frozenset[int] = frozenset()
    """Layers kept in bfloat16 whatever `kv_type` is."""
    kv_centring: bool = False
    """Leave each head's mean key out of the cache: for models with a strong constant in their keys."""
    block_size: BlockSize = 16
    """Tokens a block holds."""
    host_memory: int | None = None
    """Bytes of host memory for blocks that leave the pool; None: no host tier."""
    disk_dir: Path | None = None
    """Folder for blocks that leave the host tier; None: no disk tier. Outlives the process."""
    disk_memory: int | None = None
    """Bytes of blocks that `disk_dir` may hold."""
    check_tiers: bool = False
    """Compute checksums of all that goes to the host tier; on disk they are always computed."""
    max_model_len: int | None = None
    """Greatest prompt plus answer, in tokens; None: the model's limit, as far as the cache can hold it."""
    max_batch_tokens: int = 512
    """Tokens computed in one step, prefill and decode together."""
    max_sequences: int = 64
    """Sequences running at once."""
    max_queue: int = 256
    """Requests waiting at once; more are refused with 429. 0: none may wait beyond the running ones."""
    dtype: Dtype = "auto"
    """Of weights and activations; auto: bfloat16 on a GPU and on a CPU with matrix units, else float32."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    kernels: KernelChoice = "auto"
    """native: compiled for this CPU, or the start fails; triton: for a GPU, or the start fails; torch: none; auto:
    triton on a GPU, and on a CPU native where a compiler is found."""
    numerics: Numerics = "fast"
    """invariant: logits depend, to the bit, on their own sequence alone, not on the batch; slower."""
    speculation: Speculation = "off"
    """Where drafts of coming tokens come from: ngram: earlier text of the same request; draft: `draft_model`."""
    draft_model: str | None = None
    """A source as `model`, of the same vocabulary; for `speculation` draft, and needed for it."""
    speculation_tokens: int = 8
    """Most tokens drafted for a sequence in one step."""
    kv_budget: KvBudget | None = None
    """What a sequence may keep in the cache where its request does not say; None: everything."""
    eviction_policy: EvictionPolicy = "reconstruct"
    """Chooses what stays of a sequence with a budget, where its request does not say."""
    evict_interval: int = 256
    """Tokens by which a decoding sequence may outgrow its budget before it is cut again."""
    protected_tokens: int = 256
    """First tokens of each sequence that eviction never touches."""
    recent_tokens: int = 256
    """Last tokens of each sequence that eviction never touches."""
    prefix_reuse: bool = True
    cache_dir: Path | None = None
    """Where converted weights and compiled kernels are kept between starts; None: weights are not kept."""

    def __post_init__(self) -> None:
        _require(
            bool(self.model.strip()),
            "--model",
            self.model,
            "name a folder, a .gguf file or package://MODULE/FILE",
        )
        _require(
            self.served_name is None or bool(self.served_name.strip()),
            "--served-name",
            self.served_name,
            "give a name",
        )
        _require_one_of(self.kv_type, KV_TYPES, "--kv-type")
        _require_one_of(self.block_size, BLOCK_SIZES, "--block-size")
        _require_one_of(self.dtype, DTYPES, "--dtype")
        _require_one_of(self.eviction_policy, EVICTION_POLICIES, "--eviction-policy")
        _require_one_of(self.kernels, KERNELS, "--kernels")
        _require_one_of(self.numerics, NUMERICS, "--numerics")
        _require_one_of(self.speculation, SPECULATIONS, "--speculation")
        _require(
            (self.speculation == "draft") == (self.draft_model is not None),
            "--draft-model",
            self.draft_model,
            "give a model with --speculation draft, and only with it",
        )
        self._check_tiers()
        self._check_numbers()

    def _check_tiers(self) -> None:
        folder = None if self.disk_dir is None else str(self.disk_dir)
        together = (self.disk_dir is None) == (self.disk_memory is None)
        _require(together, "--disk-dir", folder, "give --disk-dir and --disk-memory together")
        _require(
            self.disk_dir is None or self.host_memory is not None,
            "--disk-dir",
            folder,
            "blocks go to disk by way of the host tier: give --host-memory too",
        )

    def _check_numbers(self) -> None:
        above_zero = {
            "--kv-memory": self.kv_memory,
            "--host-memory": self.host_memory,
            "--disk-memory": self.disk_memory,
            "--kv-group": self.kv_group,
            "--max-model-len": self.max_model_len,
            "--max-batch-tokens": self.max_batch_tokens,
            "--max-sequences": self.max_sequences,
            "--threads": self.threads,
            "--evict-interval": self.evict_interval,
            "--speculation-tokens": self.speculation_tokens,
        }
        for flag, value in above_zero.items():
            _require(value is None or value >= 1, flag, value, "give a number of at least 1")
        _require(
            self.kv_fraction is None or 0 < self.kv_fraction < 1,
            "--kv-memory",
            self.kv_fraction,
            "give a share above 0% and below 100%",
        )
        at_least_zero = {
            "--max-queue": self.max_queue,
            "--protected-tokens": self.protected_tokens,
            "--recent-tokens": self.recent_tokens,
        }
        for flag, value in at_least_zero.items():
            _require(value >= 0, flag, value, "give a number of at least 0")
        _require(
            self.max_batch_tokens >= self.max_sequences,
            "--max-batch-tokens",
            self.max_batch_tokens,
            f"a step decodes a token of each sequence: give at least --max-sequences ({self.max_sequences})",
        )


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`port` 0 means any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket in the file system."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the HTTP side needs: addresses, limits and waits."""

    public: TcpAddress = TcpAddress("0.0.0.0", 8000)
    admin: UnixAddress | TcpAddress | None = None
    """Reachable inside the pod only: a Unix socket or a loopback address. None: no admin interface."""
    api_keys: frozenset[str] = frozenset()
    """Keys of which a client must send one as `Authorization: Bearer`. Empty: no key is asked for."""
    max_body_bytes: int = 1024 * 1024
    """Greatest request body; a larger one is refused with 413. Reading a body holds up others: about 0.3 s a MiB."""
    max_wait_s: float = 600.0
    """A call that still waits in the queue after so long ends with 503; infinity: it may wait forever."""
    drain_seconds: float = 30.0
    """How long requests in flight may go on after SIGTERM or SIGINT."""
    health_step_age_s: float = 60.0
    """`/health` fails once the step loop has not completed a pass for so long."""
    ready_step_age_s: float = 10.0
    """`/ready` fails once the step loop has not completed a pass for so long."""

    def __post_init__(self) -> None:
        _require(self.max_body_bytes >= 1024, "--max-body", self.max_body_bytes, "give at least 1024 bytes")
        _require(0 <= self.drain_seconds <= 3600, "--drain-seconds", self.drain_seconds, "give 0 to 3600 seconds")
        _require(
            self.max_wait_s > 0, "--max-wait-seconds", self.max_wait_s, "give seconds above 0, or inf for no limit"
        )
        for flag, age in (
            ("--health-step-age", self.health_step_age_s),
            ("--ready-step-age", self.ready_step_age_s),
        ):
            _require(0 < age < float("inf"), flag, age, "give seconds above 0")
