"""Models with a strong constant in a few key channels: FP8 alone fails them, centring makes them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ullage_engine import attention, device
from ullage_engine.build import build_engine
from ullage_engine.centring import fingerprint, key_means
from ullage_engine.config import EngineConfig
from ullage_engine.device import CpuDevice
from ullage_engine.engine import Engine
from ullage_engine.errors import ConfigError
from ullage_engine.layout import CacheLayout
from ullage_engine.measure import measure_step
from ullage_engine.models import shape_of
from ullage_engine.request import GenerationRequest, SamplingParams
from ullage_engine.runner import ModelRunner
from ullage_engine.scheduler import Chunk
from ullage_engine.sequence import Sequence
from ullage_engine.store import BlockStore

HEAD = 32
BIAS_SIGMAS = (50.0, 150.0, 300.0)


def biased_qwen() -> Any:
    """A small random Qwen2 whose keys carry 50, 150 and 300 sigma on three slowly rotating channels."""
    from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

    AttentionInterface.register(attention.NAME, attention.paged_attention)
    torch.manual_seed(5)
    model: Any = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=HEAD,
            vocab_size=128,
            max_position_embeddings=256,
            rope_theta=1e6,
        )
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.normal_(0, 0.25)
            layer.self_attn.k_proj.weight.normal_(0, 0.12)
            for head in range(2):
                # the last channels of each half rotate slowest
                for channel, sigmas in zip((13, 14, 15), BIAS_SIGMAS, strict=True):
                    layer.self_attn.k_proj.bias[head * HEAD + channel] = sigmas
    return model


@torch.inference_mode()
def logits(model: Any, kind: str, centre: torch.Tensor | None, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, computed token by token through a paged cache."""
    shape = shape_of(model.config)
    layout = CacheLayout(shape.layers, shape.kv_heads, shape.head_size, 8, kind)
    store = BlockStore(layout, layout.blocks_for(len(tokens)), centre=centre)
    model.set_attn_implementation(attention.NAME)
    runner = ModelRunner(model, store, torch.device("cpu"))
    request = GenerationRequest(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=1))
    sequence = Sequence(request, lambda output: None, 0, [], 8)
    sequence.append_blocks(list(range(store.data.shape[0])))
    rows = []
    for token in tokens:
        sequence.tokens.append(token)
        rows.append(runner.forward([Chunk(sequence, 1)])[0])
        sequence.computed += 1
    return torch.stack(rows)


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL in nats from the exact distribution to the cached one."""
    log_p, log_q = wanted.log_softmax(-1), got.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_fp8_fails_a_strong_key_constant_and_centring_repairs_it() -> None:
    model = biased_qwen()
    tokens = torch.randint(128, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = logits(model, "fp32", None, tokens)
    plain = divergence(exact, logits(model, "fp8", None, tokens))
    centred = divergence(exact, logits(model, "fp8", key_means(model), tokens))
    assert plain > 20 * centred, f"KL {plain} without centring, {centred} with it"


def test_softmax_does_not_see_the_centre() -> None:
    model = biased_qwen()
    tokens = torch.randint(128, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    exact = logits(model, "fp32", None, tokens)
    # float32 itself loses a little on constants of hundreds
    assert torch.allclose(logits(model, "fp32", key_means(model), tokens), exact, atol=2e-3)


def test_measuring_the_means_leaves_the_model_as_it_was() -> None:
    model = biased_qwen()
    model.set_attn_implementation(attention.NAME)
    one, two = key_means(model), key_means(model)
    assert model.config._attn_implementation == attention.NAME
    assert torch.equal(one, two)
    assert fingerprint(one) == fingerprint(two) != fingerprint(one + 1)


def test_largest_step_is_measured_above_its_logits() -> None:
    model = biased_qwen()
    model.set_attn_implementation(attention.NAME)
    layout = CacheLayout(2, 2, HEAD, 8)
    size = measure_step(model, layout, tokens=256, sequences=32, device=CpuDevice())
    assert 0 <= size < 1 << 30
    assert measure_step(model, layout, tokens=5, sequences=32, device=CpuDevice()) >= 0


@pytest.mark.parametrize("options", [{"kv_centring": True, "kv_group": 16}, {"kv_bf16_layers": frozenset({1})}])
def test_engine_built_from_a_folder_with_these_settings(tmp_path: Any, options: dict[str, Any]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = biased_qwen()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({str(i): i for i in range(128)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    loaded = build_engine(EngineConfig(model=str(tmp_path), kv_memory=1 << 20, **options))
    try:
        engine: Engine = loaded.core._engine
        layout = engine._runner.store.layout  # type: ignore[attr-defined]
        assert layout.group_size == options.get("kv_group", HEAD)
        assert layout.cells[1].kind.name == ("bf16" if "kv_bf16_layers" in options else "fp8")
        assert (engine._runner.store.centre is not None) == options.get("kv_centring", False)  # type: ignore[attr-defined]
    finally:
        loaded.close()


def test_a_model_that_caps_its_logits_cannot_be_centred(tmp_path: Any) -> None:
    from transformers import Gemma2Config

    config = Gemma2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--kv-centring: this model caps its attention logits"):
        build_engine(EngineConfig(model=str(tmp_path), kv_memory=1 << 20, kv_centring=True))


def test_a_system_without_a_resettable_peak_still_starts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    model = biased_qwen()
    model.set_attn_implementation(attention.NAME)
    assert measure_step(model, CacheLayout(2, 2, HEAD, 8), tokens=16, sequences=2, device=CpuDevice()) >= 0
    assert "cannot be written" in caplog.text
