"""Find a model's files, convert GGUF once, and load weights and tokenizer with transformers.

Model definitions are transformers' own; only the attention function is ours (`attention`).

Sources: a Hugging Face folder, a `.gguf` file, or `package://MODULE/FILE` for a file in an installed package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import shutil
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open

from ullage_engine import attention
from ullage_engine.errors import ModelError

log = logging.getLogger(__name__)

SUPPORTED = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Architectures whose logits through the paged cache were compared with transformers' own."""
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
PACKAGE_SCHEME = "package://"
CONVERSION = "1"
"""Raised when converted folders of an earlier version can't be used any more."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    folder: Path

    @property
    def config(self) -> Any:
        return self.model.config


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the model's config says about its keys and values."""

    layers: int
    kv_heads: int
    head_size: int
    max_positions: int


def quiet_progress() -> None:
    """Keep transformers' progress bars out of log files; a terminal still gets them."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def resolve(source: str) -> Path:
    """The file or folder a source names.

    Raises:
        ModelError: it does not exist.
    """
    path = _in_package(source) if source.startswith(PACKAGE_SCHEME) else Path(source).expanduser()
    if not path.exists():
        raise ModelError(
            f"--model: {source!r} does not exist; give a model folder, a .gguf file or {PACKAGE_SCHEME}MODULE/FILE"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"--model: {source!r} is a file but not .gguf; give a model folder or a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"--model: {source!r} has no config.json; give a Hugging Face model folder")
    return path


def _in_package(source: str) -> Path:
    module, _, inner = source.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"--model: {source!r} names package {module!r}, which is not installed; install it with pip")
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / inner).resolve()
    if not inner or not path.is_relative_to(root):
        raise ModelError(f"--model: {source!r} names no file inside package {module!r}")
    return path


def served_name(source: str) -> str:
    """The name clients use when none is given: the folder's or file's, lower case."""
    return Path(source.removeprefix(PACKAGE_SCHEME)).name.removesuffix(".gguf").lower()


def shape_of(config: Any) -> CacheShape:
    """Cache shape from a transformers config."""
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        max_positions=_positions(config),
    )


def _positions(config: Any) -> int:
    """Positions that the model can be served at.

    Rotary embeddings that change with the longest sequence (`longrope`, `dynamic`) are served up to where they don't:
    sequences of many lengths share a step, and cached keys keep the rotation they were written with.
    """
    limit: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type", part.get("type")) in LENGTH_DEPENDENT_ROPE:
            original = part.get("original_max_position_embeddings")
            limit = min(limit, original or getattr(config, "original_max_position_embeddings", None) or limit)
    return limit


def folder_for(path: Path, cache_dir: Path | None) -> Path:
    """The Hugging Face folder of a model path, converting a GGUF file at most once per cache folder.

    Raises:
        ModelError: the file can't be converted.
    """
    if path.is_dir():
        return path
    if cache_dir is None:
        return convert_gguf(path, Path(tempfile.mkdtemp(prefix="ullage-model-")))
    found = path.stat()
    key = hashlib.sha256(f"{CONVERSION}|{path}|{found.st_size}|{found.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_dir / f"{path.stem}-{key}"
    try:
        if target.is_dir():  # before anything is written: the cache may be another user's, or read-only by now
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            return target if target.is_dir() else _convert_into(path, target)
    except OSError as error:
        raise ModelError(
            f"--cache-dir: {cache_dir} cannot be written: {error.strerror}; give another folder"
        ) from error


def _convert_into(path: Path, target: Path) -> Path:
    """Convert beside the target and rename; the lock is held, so what an earlier attempt left behind can go."""
    staging = target.with_name(f".converting-{target.name}")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        return convert_gguf(path, staging).rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def convert_gguf(path: Path, folder: Path) -> Path:
    """Write `path` as a Hugging Face folder with bfloat16 safetensors (about 20 s for 135M parameters)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s; this happens once and takes a while", path.name)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # the loaded object remembers its quantised origin and refuses to be saved: move the weights to a plain one
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain: Any = type(loaded)(config)
        plain.to(torch.bfloat16)
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        _share(folder)
    except Exception as error:  # readers of foreign files raise whatever they stumble over
        raise ModelError(f"--model: {path.name} cannot be converted: {_first_line(error)}") from error
    return folder


def _share(folder: Path) -> None:
    """Give all files the mode of new ones, as the process's umask says: safetensors' writer lets only its user read."""
    probe = folder / ".mode"  # a new file tells the umask; asking for it would change it for other threads
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def check_architecture(folder: Path) -> None:
    """Refuse what the attention function was not compared with.

    Raises:
        ModelError: unreadable config or another architecture.
    """
    try:
        names = json.loads((folder / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"--model: {folder / 'config.json'} cannot be read: {_first_line(error)}") from error
    if not set(names) & set(SUPPORTED):
        raise ModelError(
            f"--model: architecture {', '.join(names) or 'unknown'} is not served; "
            f"those that are: {', '.join(SUPPORTED)}"
        )


def weight_count(folder: Path) -> int:
    """Number of weights in the files that transformers will load; 0 where it can't be told beforehand.

    Raises:
        ModelError: a weight file that can't be read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        return sum(_weights_in(folder / name) for name in names if (folder / name).exists())
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ModelError(f"--model: weights in {folder} cannot be read: {_first_line(error)}") from error


def _weights_in(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def read_config(folder: Path) -> Any:
    """transformers' config of a folder.

    Raises:
        ModelError: it can't be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # validators of foreign configs raise whatever they like
        raise ModelError(f"--model: {folder / 'config.json'} cannot be read: {_first_line(error)}") from error


def vocabulary(folder: Path) -> dict[str, int]:
    """Token ids by token, added ones included.

    Raises:
        ModelError: transformers can't load the tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokens: dict[str, int] = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    except Exception as error:  # as above
        raise ModelError(f"--model: the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error
    return tokens


def load(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Weights, with the paged attention function set, and tokenizer.

    Raises:
        ModelError: transformers can't load the folder.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    AttentionInterface.register(attention.NAME, attention.paged_attention)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ModelError(f"--model: {folder} cannot be loaded: {_first_line(error)}") from error
    model.to(device).eval()
    model.set_attn_implementation(attention.NAME)
    return LoadedModel(model, tokenizer, name, folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
