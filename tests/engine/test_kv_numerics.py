"""What narrower caches cost in prediction quality, on real text through the real paged path.

`bench/kv_numerics.py` makes the full table over 12,288 tokens; its figures, measured once, are the reference here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_numerics import REFERENCE, Candidate, Comparison, compare
from workload import real_text

MEASURED_KL = {"bf16": 0.00005, "fp8": 0.0066, "int8": 0.0008}
"""Mean KL divergence in nats from the FP32 cache's predictions, SmolLM2, one scale for 64 channels."""
TOKENS = 512
"""The first of the text: their contexts are shorter than the table's, which costs a little less KL."""


@pytest.mark.model
def test_kl_against_the_fp32_cache_is_what_was_measured(smollm2: Any) -> None:
    window = smollm2.tokenizer(real_text()[:8000], add_special_tokens=False).input_ids[:TOKENS]
    assert len(window) == TOKENS
    candidates = {kind: Candidate(kind) for kind in MEASURED_KL}  # type: ignore[arg-type]
    found = compare(smollm2, [window], list(candidates.values()), chunk=128)
    assert found[REFERENCE].figures()["kl"] == 0.0
    for kind, candidate in candidates.items():
        figures = found[candidate].figures()
        assert figures["kl"] <= 1.1 * MEASURED_KL[kind], kind
        assert figures["kl"] >= 0.5 * MEASURED_KL[kind], f"{kind}: too good for what it stores"
        assert figures["perplexity"] == pytest.approx(found[REFERENCE].figures()["perplexity"], rel=0.01)


def test_comparison_of_known_distributions() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    candidate = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    comparison = Comparison()
    comparison.add(reference, candidate, torch.tensor([1, 0]))
    figures = comparison.figures()
    # KL of the first row: 0.5 ln 2 - 0.25 ln 2; of the second: 0
    assert figures["kl"] == pytest.approx(0.25 * 0.6931472 / 2, rel=1e-5)
    assert figures["top1"] == 0.5
    assert figures["perplexity"] == pytest.approx((1 / (0.5 * 0.8)) ** 0.5, rel=1e-5)
