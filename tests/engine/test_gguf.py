"""GGUF files of each family: written here from small random models, converted, and equal to what was written."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from ullage_engine import models

WORDS = 128
FAMILIES: dict[str, tuple[gguf.MODEL_ARCH, str, dict[str, Any]]] = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, "gpt2", {}),
    "MistralForCausalLM": (gguf.MODEL_ARCH.LLAMA, "gpt2", {}),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, "gpt2", {}),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, "gpt2", {"head_dim": 128}),
    "Gemma2ForCausalLM": (gguf.MODEL_ARCH.GEMMA2, "llama", {"head_dim": 16, "sliding_window": 20}),
    "Gemma3ForCausalLM": (gguf.MODEL_ARCH.GEMMA3, "llama", {"head_dim": 16, "sliding_window": 20}),
    "Phi3ForCausalLM": (gguf.MODEL_ARCH.PHI3, "llama", {"pad_token_id": 0}),
}


def tiny(family: str, options: dict[str, Any]) -> Any:
    import transformers

    cls: Any = getattr(transformers, family)
    config = cls.config_class(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=256,
        tie_word_embeddings=family.startswith("Gemma"),
        **options,
    )
    torch.manual_seed(11)
    return cls(config).eval()


def write(model: Any, arch: gguf.MODEL_ARCH, vocabulary: str, path: Path) -> None:
    """A GGUF file as llama.cpp's converters write it: rotary rows interleaved for Llama, norms shifted for Gemma."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(WORDS)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    add_tokenizer(writer, vocabulary)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, for_file(name, tensor.float(), config, arch).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def for_file(name: str, tensor: torch.Tensor, config: Any, arch: gguf.MODEL_ARCH) -> torch.Tensor:
    if arch is gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape).contiguous()
    if arch in {gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3} and "norm" in name:
        return tensor + 1
    return tensor


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: str) -> None:
    special = ["<unk>", "<s>", "</s>"]
    if vocabulary == "gpt2":
        words = [*special, *(chr(33 + i) for i in range(WORDS - len(special) - 1)), '!"']
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(['! "'])
    else:
        words = [*special, *(f"<0x{i:02X}>" for i in range(WORDS - len(special)))]
        writer.add_token_scores([0.0] * WORDS)
    writer.add_tokenizer_model(vocabulary)
    writer.add_token_list(words)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    rest = gguf.TokenType.NORMAL if vocabulary == "gpt2" else gguf.TokenType.BYTE
    writer.add_token_types([*kinds, *[rest] * (WORDS - len(special))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_weights_are_those_of_the_file(family: str, tmp_path: Path) -> None:
    arch, vocabulary, options = FAMILIES[family]
    model = tiny(family, options)
    file = tmp_path / "tiny.gguf"
    write(model, arch, vocabulary, file)
    folder = models.folder_for(models.resolve(str(file)), tmp_path / "cache")
    models.check_architecture(folder)
    loaded = models.load(folder, "tiny", torch.float32, torch.device("cpu"))
    got = loaded.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(got[name], tensor.bfloat16().float()), name
    assert len(loaded.tokenizer) >= WORDS
    assert models.shape_of(loaded.config) == models.shape_of(model.config)


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    arch, vocabulary, options = FAMILIES["LlamaForCausalLM"]
    write(tiny("LlamaForCausalLM", options), arch, vocabulary, tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_converted_files_are_as_readable_as_the_umask_lets_new_files_be(
    umask: int, mode: int, llama_file: Path, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        folder = models.folder_for(llama_file, tmp_path / "cache")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {mode}, modes
    assert ".mode" not in modes


def test_a_converted_model_is_found_without_writing_to_the_cache(llama_file: Path, tmp_path: Path) -> None:
    """Another user's process can neither lock nor write there."""
    folder = models.folder_for(llama_file, tmp_path / "cache")
    lock = Path(f"{folder}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()  # refuses to be opened as a lock, whoever asks
    assert models.folder_for(llama_file, tmp_path / "cache") == folder
