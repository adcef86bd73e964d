"""The quality benchmark's cache: greedy answers are greedy, budgets free what they say, nothing leaks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eviction_cache import EvictionCache, Settings
from eviction_quality import cost_of, result_of, run_ours
from eviction_tasks import Context, Probe
from run_kvpress import Peer
from transformers import LlamaConfig, LlamaForCausalLM

from ullage_engine import models
from ullage_engine.attention import NAME, paged_attention
from ullage_engine.policies import NAMES

CONTEXT = [(7 * i * i + 3 * i) % 90 + 3 for i in range(150)]
PROMPT, ANSWER = [5, 9], [11, 12, 13, 14, 15, 16]
OTHER = Probe("ends", [7, 8, 4], ANSWER[::-1])
ASKED = Context("x", CONTEXT, [Probe("ends", PROMPT, ANSWER), OTHER, Probe("copy", [3], [3, 4])])
OLD_NAME = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
"""kvpress's environment has a transformers that knows no newer one."""


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AttentionInterface

    torch.manual_seed(0)
    AttentionInterface.register(NAME, paged_attention)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def peer_of(model: Any, kind: type[Peer] = Peer) -> Peer:
    """kvpress's side around the same model, without its loading."""
    model.set_attn_implementation("sdpa")
    peer = kind.__new__(kind)
    peer._torch, peer.model = torch, model
    return peer


class Fussy(Peer):
    """Finds no fake key for more than three queries, and says so when half of its layers have taken the tokens."""

    def _logits(self, cache: Any, position: int, tokens: Any, keep: int) -> Any:
        before = self._lengths(cache)
        logits = super()._logits(cache, position, tokens, keep)
        if len(tokens) > 3:
            self._crop(cache, [cache.layers[0].keys.shape[2], *before[1:]])
            raise ValueError("no fake key")
        return logits


def cache_of(model: Any, policies: tuple[str, ...], keeps: tuple[float, ...]) -> EvictionCache:
    settings = Settings(policies=policies, keeps=keeps, chunk=64, observed=16, kv_type="fp32")
    return EvictionCache(models.LoadedModel(model, None, "tiny", Path()), settings, 200, None)


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    model.set_attn_implementation("sdpa")
    said: list[int] = []
    for _ in range(count):
        said.append(int(model(torch.tensor([[*tokens, *said]])).logits[0, -1].argmax()))
    return said


@torch.inference_mode()
def test_drafting_the_answer_changes_nothing_that_is_said(model: Any) -> None:
    wanted = greedy(model, [*CONTEXT, *PROMPT], 6)
    cache = cache_of(model, (), ())
    base = cache.prefill(CONTEXT, [1])
    variants = cache.variants(base)
    sequences = [variant.sequence for variant in variants]
    for draft in (ANSWER, wanted, [*wanted[:3], *ANSWER[3:]]):
        assert [answer.tokens for answer in cache.answers(sequences, PROMPT, draft)] == [wanted]


@torch.inference_mode()
def test_budgets_free_blocks_and_give_everything_back(model: Any) -> None:
    cache = cache_of(model, NAMES, (1.0, 0.5))
    base = cache.prefill(CONTEXT, [1, 2])
    variants = cache.variants(base)
    said = cache.answers([variant.sequence for variant in variants], PROMPT, ANSWER)
    for variant, answer in zip(variants, said, strict=True):
        assert (variant.freed > 0) == (variant.keep < 1.0), variant.policy
        assert variant.keep < 1.0 or answer.tokens == said[0].tokens, "all of a context is no less than all of it"
        entries = variant.sequence.kept_tokens
        assert entries <= variant.keep * len(CONTEXT) + 1e-6
    assert len({variant.policy for variant in variants}) == 1 + len(NAMES)
    cache.release([base.sequence, *(variant.sequence for variant in variants)])
    assert cache.pool.free == cache.pool.total


@torch.inference_mode()
def test_a_question_that_was_seen_is_part_of_the_context(model: Any) -> None:
    cache = cache_of(model, ("window", "reconstruct"), (0.6,))
    base = cache.prefill(CONTEXT, [1, 2])
    asked = cache.asked(base, PROMPT)
    assert asked.sequence.computed == len(CONTEXT) + len(PROMPT) - 1
    assert asked.observed[0].positions[-1] == len(CONTEXT) + len(PROMPT) - 2
    variants = cache.variants(asked)
    said = cache.answers([variant.sequence for variant in variants], PROMPT[-1:], ANSWER)
    assert said[0].tokens == greedy(model, [*CONTEXT, *PROMPT], 6)


@torch.inference_mode()
def test_chances_are_those_of_the_text(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([[*CONTEXT, *PROMPT, *ANSWER[:-1]]])).logits[0, -len(ANSWER) :].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(ANSWER)[:, None])[:, 0]
    cache = cache_of(model, (), ())
    variants = cache.variants(cache.prefill(CONTEXT, [1]))
    got = cache.chances(variants[0].sequence, PROMPT, ANSWER)
    assert torch.allclose(got, wanted, rtol=1e-3)


@torch.inference_mode()
def test_costs_are_of_what_was_dropped(model: Any) -> None:
    cache = cache_of(model, NAMES, (0.5,))
    base = cache.prefill(CONTEXT, [1, 2])
    cache.decode(base.sequence, 3)
    assert base.sequence.computed == len(CONTEXT)
    variants = cache.variants(base)
    for variant in variants[1:]:
        kept = variant.sequence.kept_tokens
        assert cache.costs.dropped[str(variant.policy)] == pytest.approx((len(CONTEXT) - kept) * cache.heads, abs=1)
    told = cost_of(cache)
    assert set(told["per_evicted_token"]) == set(NAMES)
    one = told["per_evicted_token"]["reconstruct"]
    step = cache.costs.decode_s / cache.costs.decode_tokens
    assert one["share_of_decode_step"] == pytest.approx((one["score_us"] + one["cut_us"]) / 1e6 / step, rel=0.05)
    assert cache.costs.decode_tokens == 3


@torch.inference_mode()
def test_an_answers_chances_are_those_of_the_right_answer_whatever_was_said(model: Any) -> None:
    cache = cache_of(model, ("window", "reconstruct"), (0.5,))
    variants = cache.variants(cache.prefill(CONTEXT, [1, 2]))
    said = cache.answers([variant.sequence for variant in variants], PROMPT, ANSWER)
    assert all(answer.tokens != ANSWER for answer in said), "else nothing is tested"
    for variant, answer in zip(variants, said, strict=True):
        alone = cache.chances(variant.sequence, PROMPT, ANSWER)
        steps = [cache.chances(variant.sequence, [*PROMPT, *ANSWER[:i]], ANSWER[i : i + 1]) for i in range(len(ANSWER))]
        assert torch.allclose(answer.chances, alone, rtol=1e-3)
        assert torch.allclose(answer.chances, torch.cat(steps), rtol=1e-3)
    assert not torch.allclose(said[1].chances, said[0].chances, rtol=1e-2), "a cut is felt"


@OLD_NAME
@torch.inference_mode()
def test_both_sides_full_caches_have_the_same_nats(model: Any) -> None:
    peer = peer_of(model)
    wanted = {setting: peer.results(ASKED, setting, None) for setting in ("unseen", "seen")}
    direct = []
    for probe in ASKED.probes:
        tokens = [*ASKED.tokens, *probe.prompt, *probe.answer]
        logs = model(torch.tensor([tokens])).logits[0, -len(probe.answer) - 1 : -1].log_softmax(-1)
        direct.append(-float(logs.gather(1, torch.tensor(probe.answer)[:, None]).mean()))
    cache = cache_of(model, ("recency",), (1.0, 0.2))
    for setting, said in run_ours(cache, ASKED, [1, 2], ("unseen", "seen")):
        full, uncut, cut = (result_of(150, ASKED, setting, one) for one in said)
        assert full.nats == pytest.approx({"ends": (direct[0] + direct[1]) / 2, "copy": direct[2]}, rel=1e-3)
        assert full.nats == pytest.approx(wanted[setting]["nats"], rel=1e-3)
        assert full.sure == pytest.approx(wanted[setting]["sure"], rel=1e-2)
        assert uncut.nats == pytest.approx(full.nats, rel=1e-3)
        assert cut.nats != pytest.approx(full.nats, rel=1e-2)


@OLD_NAME
@torch.inference_mode()
def test_text_that_goes_on_has_the_nats_of_its_perplexity(model: Any) -> None:
    text = Context("t", CONTEXT, [Probe("text", [5], ANSWER)])
    wanted = peer_of(model).results(text, "unseen", None)
    ((_, (said,)),) = run_ours(cache_of(model, (), ()), text, [1, 2], ("unseen",))
    full = result_of(150, text, "unseen", said)
    assert full.nats == pytest.approx(wanted["nats"], rel=1e-3)
    assert full.scores["text"] == pytest.approx(math.exp(-full.nats["text"]))


@OLD_NAME
@torch.inference_mode()
def test_chances_do_not_depend_on_how_many_queries_a_fake_key_hides_from(model: Any) -> None:
    peer, fussy = peer_of(model), peer_of(model, Fussy)
    cache = peer.prefill(CONTEXT, None)
    wanted = peer.chances(cache, len(CONTEXT), PROMPT, ANSWER)
    peer._crop(cache, [len(CONTEXT)] * 2)
    with pytest.raises(ValueError, match="no fake key"):
        fussy._logits(cache, len(CONTEXT), ANSWER, 1)
    peer._crop(cache, [len(CONTEXT)] * 2)
    assert torch.allclose(fussy.chances(cache, len(CONTEXT), PROMPT, ANSWER), wanted, rtol=1e-3)
    assert fussy.results(ASKED, "unseen", None)["nats"] == pytest.approx(
        peer.results(ASKED, "unseen", None)["nats"], rel=1e-3
    )
